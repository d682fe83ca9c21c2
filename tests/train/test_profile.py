"""A profiled window of a real run: parts add up, collectives are as planned, no overhead outside the window."""

import errno
import gzip
import json
import logging
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import toy_run
from gloo_ranks import run_ranks
from torch.profiler import ProfilerActivity
from torch.profiler import profile as torch_profile

from smalti.cli.main import run as smalti
from smalti.config.load import from_dict
from smalti.config.optimizer import OptimizerConfig
from smalti.config.run import RunConfig
from smalti.track.profiles import read
from smalti.track.run import RunFolder
from smalti.train import build, fit, profile
from smalti.train.optim import build_optimizer
from smalti.train.profile import kind_of


def _fit(rank: int, config: Any) -> None:
    fit(build(config))


def _profiled(config: RunConfig, **profile: Any) -> RunConfig:
    return from_dict(RunConfig, {**config.model_dump(mode="json"), "profile": profile}).config


@pytest.mark.slow
def test_two_ranks_write_what_they_did_and_it_is_what_was_planned(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = _profiled(toy_run.config(tmp_path, duration="6step"), steps=[3, 4], ranks="all")
    run_ranks(2, _fit, config)
    run = Path(config.run_folder)
    result = read(run)
    assert [(one.first_step, one.last_step, one.rank) for one in result] == [(3, 4, 0), (3, 4, 1)]
    for summary in result:
        assert sum(part.s for part in summary.parts) == pytest.approx(summary.window_s, rel=1e-6)
        assert {part.name for part in summary.parts} >= {"matrix products", "optimizer", "norms"}
        by_kind = {(one.op, one.axis): one for one in summary.traffic}
        for kind in (("all_gather", "shard"), ("reduce_scatter", "shard")):
            one = by_kind[kind]
            assert (one.calls, one.bytes) == (one.planned_calls, one.planned_bytes), kind
        gathered = by_kind["all_gather", "shard"]
        assert gathered.s is not None  # of gloo's reduce-scatter nobody is told when it is done
        assert 0 < gathered.s < 2 * summary.window_s
    folder = run / "profile" / "steps-00000003-00000004" / "rank-001"
    calls = [json.loads(line) for line in (folder / "collectives.jsonl").read_text().splitlines()]
    assert {call["axis"] for call in calls} <= {"shard", "world"}
    with gzip.open(folder / "trace.json.gz") as file:
        assert json.load(file)["traceEvents"]
    assert smalti(["runs", "profile", str(run)]) == 0
    shown = capsys.readouterr().out
    assert "bottleneck:" in shown
    assert "reduce_scatter" in shown


@pytest.mark.exhaustive
def test_a_window_beyond_the_stop_keeps_what_there_is(tmp_path: Path) -> None:
    config = _profiled(toy_run.config(tmp_path, duration="4step"), steps=[4, 9])
    run_ranks(1, _fit, config)
    (summary,) = read(Path(config.run_folder))
    assert (summary.first_step, summary.last_step) == (4, 4)


def _fit_on_a_full_disk(rank: int, config: RunConfig, full: str) -> list[str]:
    """Return the warning if ``full`` (a file of the profile, or its folder) does not fit."""
    told: list[str] = []
    asked = profile._write_all

    def write_all(folder: Path, files: dict[str, Any]) -> dict[str, str]:
        def fill(path: Path) -> None:
            path.write_text("a part")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

        if full == "folder":
            folder.parent.parent.write_text("in the way")
        return asked(folder, {name: fill if name == full else make for name, make in files.items()})

    setattr(profile, "_write_all", write_all)  # noqa: B010  (this process is a rank of its own)
    logging.getLogger("smalti.train").warning = lambda text, *values: told.append(text % values)  # type: ignore[method-assign]
    fit(build(config))
    return told


@pytest.mark.sample(1)
@pytest.mark.slow
@pytest.mark.parametrize("full", ["trace.json.gz", "folder"])
def test_a_full_disk_costs_the_profile_and_not_the_run(full: str, tmp_path: Path) -> None:
    config = _profiled(toy_run.config(tmp_path, duration="4step"), steps=[2, 3])
    told = "".join(run_ranks(1, _fit_on_a_full_disk, config, full)[0])
    run = RunFolder.read(config.run_folder)
    assert run.status()["state"] == "done"
    saved = next(event for event in run.events() if event["event"] == "profile_saved")
    folder = Path(saved["path"])
    if full == "folder":
        assert saved["missing"] == ["summary.json", "collectives.jsonl", "trace.json.gz"]
        assert f"profile of steps 2 to 3 in {folder} lacks summary.json (Not a directory)" in told
    else:
        assert saved["missing"] == ["trace.json.gz"]
        lacks = f"profile of steps 2 to 3 in {folder} lacks trace.json.gz (No space left on device: the disk at "
        assert lacks in told
        assert told.endswith("free); training continues")
        assert sorted(path.name for path in folder.iterdir()) == ["collectives.jsonl", "summary.json"]
        assert read(run.path)[0].last_step == 3


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("aten::mm", "matrix products"),
        ("aten::_grouped_mm", "matrix products"),
        ("_OverSpansBackward", "attention"),
        ("aten::_scaled_dot_product_flash_attention_for_cpu", "attention"),
        ("ncclDevKernel_AllGather_RING_LL", "collectives"),
        ("c10d::_allgather_base_", "collectives"),
        ("aten::_fused_adamw_", "optimizer"),
        ("aten::copy_", "copies and casts"),
        ("aten::_fused_rms_norm", "norms"),
        ("aten::silu", "other kernels"),
    ],
)
def test_operators_have_a_kind(name: str, kind: str) -> None:
    assert kind_of(name) == kind


@pytest.mark.parametrize("name", ["adamw", "lion"])
def test_all_work_of_an_optimizer_is_its_part(name: str) -> None:
    model = torch.nn.Linear(8, 8)
    optimizer = build_optimizer(model, OptimizerConfig(name=name, lr=1e-3))
    model(torch.ones(2, 8)).sum().backward()
    with torch_profile(activities=[ProfilerActivity.CPU]) as profiler:
        optimizer.step()
    summary = profile._summary(profiler, [], 0.0, 1.0, (), on_gpu=False)
    calls = {part.name: part.calls for part in summary.parts if part.calls}
    assert calls.keys() == {"optimizer"}
    assert calls["optimizer"] == sum(operator.calls for operator in summary.operators)
