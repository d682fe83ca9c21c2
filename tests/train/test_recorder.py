"""Every metric of the table is written, and sums over a run have the documented values."""

import json
import math
from pathlib import Path

import pytest
import torch
import toy_run

from smalti.config.load import from_dict
from smalti.config.run import RunConfig
from smalti.data.fetch import counts
from smalti.evals.in_loop import heldout_hook
from smalti.track.names import TABLE, metric
from smalti.train import build, fit
from smalti.train.recorder import _by_seq_len, _device_memory

SOURCE = Path(__file__).resolve().parents[2] / "smalti"
ELSEWHERE = {
    "ckpt/peer_": "train/saving.py",
    "evals/<suite>/<task>/<measure>": "cli/eval/run.py",
    "icl/metrics/": "evals/in_loop_suite.py",  # tests/evals/test_in_loop_suite.py
    "loss/train/divergence": "tune/distill.py",
    "loss/train/targets": "tune/preference/loss.py",
    "metrics/eval/<source>/preference_": "tune/heldout.py",
    "metrics/eval/<source>/reward_": "tune/heldout.py",
    "preference/": "tune/preference/loss.py",
    "reward/": "tune/reward/loss.py",
    "system/gpu<i>/": "track/system.py",
}
"""What a training on a CPU does not write -> the file that does."""


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, float]]:
    """metrics.jsonl of a run with experts, all terms of the loss and a held-out set."""
    root = tmp_path_factory.mktemp("record")
    tree = toy_run.config(root, "moe", duration="8step", eval_every="4step", loss={"z_loss_coef": 1e-4}).model_dump()
    tree["model"]["moe"] |= {"balance_loss_coef": 0.01, "global_balance_loss_coef": 0.01, "z_loss_coef": 1e-3}
    tree["data"]["heldout"] = {"code": str(root / "tokens/code")}
    tree["train"]["ema"] = {"decay": 0.9}
    tree["track"] |= {"system_every_s": 0.01}
    config = from_dict(RunConfig, tree, "record").config
    fit(build(config, evaluate=heldout_hook(config)))
    lines = (root / "runs/moe/metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


@pytest.mark.slow
def test_every_metric_of_the_table_is_written(rows: list[dict[str, float]]) -> None:
    written = {metric(name).name for row in rows for name in row if name not in ("step", "ts", "time")}
    written |= {f"data/fetch/{name}" for name in counts.NAMES}
    written |= {"memory/peak_allocated_mem", "memory/peak_reserved_mem", "memory/current_active_mem"}  # below
    for row in TABLE:
        file = next((file for start, file in ELSEWHERE.items() if row.name.startswith(start)), None)
        if file is None:
            assert row.name in written
        else:
            start = next(
                (start for start in ("ckpt/peer_", "evals/", "icl/metrics/") if row.name.startswith(start)), None
            )
            literal = start or row.name.partition(">/")[2].partition("<")[0]
            assert literal in (SOURCE / file).read_text(), row.name


@pytest.mark.slow
def test_sums_of_a_run_are_what_they_say(rows: list[dict[str, float]], tmp_path: Path) -> None:
    steps = [row for row in rows if "time/sample" in row]
    assert [row["step"] for row in steps] == list(range(1, 9))
    assert [row["time/sample"] for row in steps] == [384 / 32 * step for step in range(1, 9)]
    vals = [row["time/val"] for row in steps]
    assert vals == sorted(vals)
    assert vals[4] > 0  # measured after step 4
    for row in steps:
        assert row["time/total"] == pytest.approx(row["time/train"] + row["time/val"])
        left_s = (8 - row["step"]) * row["time/step_s"] * row["time/total"] / row["time/train"]
        assert row["time/remaining_estimate"] * 3600 == pytest.approx(left_s), "evaluations count"
        assert row["time/step_s"] * row["throughput/batches_per_sec"] == pytest.approx(1)
        assert row["throughput/samples_per_sec"] * row["time/step_s"] == pytest.approx(12)
        assert row["metrics/train/LanguageCrossEntropy"] == row["loss/train/cross_entropy"]
        assert row["metrics/train/LanguagePerplexity"] == pytest.approx(math.exp(row["loss/train/cross_entropy"]))
    assert _by_seq_len(toy_run.config(tmp_path, "moe"), 5)["samples_before"] == 60  # of a run that resumes
    assert all(row["ckpt/bytes"] > 1000 for row in rows if "ckpt/save_s" in row)


def test_memory_of_a_gpu_is_in_gigabytes(monkeypatch: pytest.MonkeyPatch) -> None:
    stats = {"allocated_bytes.all.peak": 3e9, "reserved_bytes.all.peak": 4e9, "active_bytes.all.current": 1e9}
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda: stats)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    assert _device_memory() == {}
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    result = {"memory/peak_allocated_mem": 3.0, "memory/peak_reserved_mem": 4.0, "memory/current_active_mem": 1.0}
    assert _device_memory() == result
