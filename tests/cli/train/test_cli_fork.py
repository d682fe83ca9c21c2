"""``smalti train --fork`` and runs that are carried out in pieces, with real processes."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from cli_in_process import run_cli
from train_process import RECIPE, losses, train, write_tokens

from smalti.track.run import RunFolder

RAMPS = (
    RECIPE.replace("ranks: 2", "ranks: 1")
    .replace(
        """\
  - until: 0.8run
    weights: {a: 1, b: 2}
  - weights: {b: 1}
""",
        """\
  - until: 4000tok
    weights: {a: 1, b: 2}
    weights_end: {b: 1}
    seq_len: 16
  - weights: {b: 1, a: 0.1}
""",
    )
    .replace(
        "  global_batch_tokens: 256\n",
        "  global_batch_tokens: 256\n  batch_ramp: [{until: 8step, global_batch_tokens: 128}]\n",
    )
)


@pytest.fixture
def work(tmp_path: Path) -> Path:
    for seed, name in enumerate("abhc"):
        write_tokens(tmp_path / "tokens" / name, seed)
    (tmp_path / "r.yaml").write_text(RAMPS)
    return tmp_path


def told(folder: Path) -> list[tuple[int, float, dict[str, float]]]:
    """Step, tokens, and tokens of each source: what may not depend on how the run was carried out."""
    rows = [row for row in RunFolder.read(folder).metrics() if "time/token" in row]
    return [
        (row["step"], row["time/token"], {k: v for k, v in row.items() if k.startswith("data/mix/") and v})
        for row in rows
    ]


@pytest.mark.exhaustive
def test_killed_on_one_rank_and_resumed_on_three_learns_the_same(work: Path) -> None:
    assert (done := train(work, "r.yaml", "name=whole")).returncode == 0, done.stderr
    command = [sys.executable, "-m", "smalti", "train", "r.yaml", "name=killed", "train.restart.attempts=0"]
    process = subprocess.Popen(command, cwd=work)
    folder, end = RunFolder(work / "runs/killed"), time.monotonic() + 120
    while not (folder.checkpoints / "latest").exists():
        assert process.poll() is None
        assert time.monotonic() < end
        time.sleep(0.02)
    rank = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()[0]
    os.kill(int(rank), signal.SIGKILL)
    process.wait(timeout=30)
    resumed = train(work, "r.yaml", "name=killed", "train.parallel.ranks=3", "train.microbatch_tokens=32")
    assert resumed.returncode == 0, resumed.stderr
    assert told(work / "runs/killed") == told(work / "runs/whole")
    assert told(work / "runs/whole")[-1][1] == 8 * 128 + 32 * 256
    pieces, whole = losses(work / "runs/killed"), losses(work / "runs/whole")
    assert [step for step, _ in pieces] == [step for step, _ in whole]
    np.testing.assert_allclose([loss for _, loss in pieces], [loss for _, loss in whole], rtol=2e-3)  # bf16


@pytest.mark.exhaustive
def test_a_finished_run_is_forked_twice_and_its_config_alone_makes_it_again(work: Path) -> None:
    quiet = "track.console=false"
    assert train(work, "r.yaml", quiet).returncode == 0
    longer = ("r.yaml", "train.duration=50step", "data.stages.1.weights={a: 1}", "train.optimizer.lr=5e-4", quiet)
    shown = run_cli(work, "train", *longer, "--fork", "--dry-run")
    assert "40 steps = 9.22k tokens are unchanged" in shown.stdout
    assert "train.duration: 40step -> 50step" in shown.stdout
    assert "train.optimizer.lr: 0.001 -> 0.0005" in shown.stdout
    refused = run_cli(work, "train", *longer)
    assert refused.returncode == 2
    assert "--fork continues this run with the change" in refused.stderr
    done = train(work, *longer, "--fork")
    assert done.returncode == 0, done.stderr
    assert "runs/t: forked at step 40" in done.stderr
    lines = shown.stdout[shown.stdout.index("train.duration: 40step") :].partition("the order of the data")
    for line in (*lines[0].splitlines(), lines[1] + lines[2].splitlines()[0]):
        assert line.strip() in done.stderr, "as the dry run"
    assert "is already forked this way" in train(work, *longer, "--fork").stderr
    assert train(work, *longer).returncode == 0, "the same recipe without --fork"

    last = (*longer, "train.duration=60step", "data.sources.c=tokens/c", "data.seq_len=64",
            "data.stages=[{weights: {c: 1}}]", "train.global_batch_tokens=512")  # fmt: skip
    assert train(work, *last, "--fork").returncode == 0
    folder = RunFolder.read(work / "runs/t")
    assert [event["step"] for event in folder.events() if event["event"] == "forked"] == [40, 50]
    assert [past.at_step for past in folder.config().data.history] == [40, 50]
    assert told(folder.path)[-1][1] == 8 * 128 + 42 * 256 + 10 * 512
    assert told(folder.path)[-1][2]["data/mix/c/tokens"] == 10 * 512

    again = train(work, "runs/t", "name=again")
    assert again.returncode == 0, again.stderr
    assert losses(work / "runs/again") == losses(folder.path)
    assert told(work / "runs/again") == told(folder.path)
