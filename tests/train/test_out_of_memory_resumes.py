"""Real processes: one of two ranks runs out of memory, and the run continues with half the microbatch."""

import json
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest
import toy_run
from conftest import PROVE

from smalti.config.load import dump, load
from smalti.config.run import RunConfig
from smalti.track.run import RunFolder
from smalti.train import build, fit

pytestmark = pytest.mark.slow

INJECTED = """
import os

if os.environ.get("RANK") == "1" and os.environ.get("SMALTI_ATTEMPT", "0") in {attempts!r}:
    import torch
    from smalti.train import loop, step

    asked = step.train_step

    class Falls(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            torch.empty(1 << 61, dtype=torch.uint8)

    def train_step(state, microbatches, loss):
        if state.step != 8:
            return asked(state, microbatches, loss)

        def short(model, microbatch):
            if {phase!r} == "forward":
                torch.empty(1 << 61, dtype=torch.uint8)
            total, weight, sums = loss(model, microbatch)
            return (Falls.apply(total) if {phase!r} == "backward" else total), weight, sums

        if {phase!r} == "optimizer":
            state.optimizer.step = lambda: torch.empty(1 << 61, dtype=torch.uint8)
        return asked(state, microbatches, short)

    loop.train_step = train_step
"""
"""``sitecustomize.py`` of the ranks: before the ninth step of some attempts rank 1 asks for more than there is."""


def _recipe(root: Path, *, axes: dict[str, int] | None = None, **train: Any) -> tuple[Path, Path]:
    parallel = {"ranks": 2, "threads": 1, **(axes or {})}
    config = toy_run.config(root, "moe", parallel=parallel, duration="14step", checkpoint={"every": "5step"}, **train)
    path = root / "recipe.yaml"
    path.write_text(dump(config))
    return path, Path(config.run_folder)


def _train(recipe: Path, *overrides: str, phase: str = "", attempts: str = "0") -> tuple[int, str, float]:
    """(code, output, seconds); with a ``phase``, rank 1 runs out of memory in it, in ``attempts``."""
    site = recipe.parent / "site"
    site.mkdir(exist_ok=True)
    (site / "sitecustomize.py").write_text(
        textwrap.dedent(INJECTED.format(phase=phase, attempts=list(attempts))) if phase else ""
    )
    command = ["env", f"PYTHONPATH={site}", sys.executable, "-m", "smalti", "train", str(recipe), *overrides]
    started_s = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    return done.returncode, done.stdout + done.stderr, time.monotonic() - started_s


def _losses(folder: Path) -> dict[int, float]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line["loss/train/total"] for line in lines if "loss/train/total" in line}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """Losses of the same steps on one rank, in this process."""
    recipe, folder = _recipe(tmp_path_factory.mktemp("undisturbed"), axes={"ranks": 1})
    fit(build(load(RunConfig, recipe).config))
    return _losses(folder)


@pytest.mark.proof
@pytest.mark.parametrize("phase", ["forward", "backward", "optimizer"] if PROVE else ["backward"])
def test_the_run_continues_with_half_the_microbatch(phase: str, tmp_path: Path, undisturbed: dict[int, float]) -> None:
    recipe, folder = _recipe(tmp_path)
    code, output, _ = _train(recipe, phase=phase)
    assert code == 0, output
    events = RunFolder.read(folder).events()
    short = next(event for event in events if event["event"] == "oom")
    assert (short["rank"], short["phase"], short["step"], short["attempt"]) == (1, phase, 8, 0)
    assert (short["microbatch_tokens"], short["next_microbatch_tokens"]) == (192, 96)
    ended = [event for event in events if event["event"] == "attempt_ended"]
    assert [(event["code"], event.get("cause")) for event in ended] == [(75, "oom"), (0, None)]
    assert [e["microbatch_tokens"] for e in events if e["event"] == "auto_resolved"] == [192, 96]
    assert [e["step"] for e in events if e["event"] == "resumed"] == [5]
    assert f"rank 1 ran out of memory in {phase} after step 8, with microbatches of 192 tokens" in output
    losses = _losses(folder)
    assert sorted(losses) == sorted(undisturbed)
    for step, loss in undisturbed.items():
        assert losses[step] == pytest.approx(loss, rel=1e-5), step


@pytest.mark.exhaustive
def test_a_pipeline_continues_with_half_the_microbatch(tmp_path: Path, undisturbed: dict[int, float]) -> None:
    """12 rows are two microbatches of 6, then four of 3; the last pipeline stage is the one that runs out."""
    recipe, folder = _recipe(tmp_path, axes={"pipeline": 2})
    code, output, _ = _train(recipe, phase="backward")
    assert code == 0, output
    events = RunFolder.read(folder).events()
    short = next(event for event in events if event["event"] == "oom")
    assert (short["rank"], short["phase"], short["step"], short["of"]["layout"]) == (1, "backward", 8, "pipeline 2")
    assert (short["microbatch_tokens"], short["next_microbatch_tokens"]) == (192, 96)
    ended = [event for event in events if event["event"] == "attempt_ended"]
    assert [(event["code"], event.get("cause")) for event in ended] == [(75, "oom"), (0, None)]
    assert [e["microbatch_tokens"] for e in events if e["event"] == "auto_resolved"] == [192, 96]
    losses = _losses(folder)
    assert sorted(losses) == sorted(undisturbed)
    for step, loss in undisturbed.items():
        assert losses[step] == pytest.approx(loss, rel=1e-5), step


@pytest.mark.exhaustive
def test_one_row_ends_with_what_would_help(tmp_path: Path) -> None:
    """64 tokens are two rows: one half is left, and then nothing."""
    recipe, folder = _recipe(tmp_path, microbatch_tokens=64)
    code, output, _ = _train(recipe, phase="forward", attempts="012")
    assert code == 2, output
    assert "one row does not fit" in output
    assert "activation_checkpointing=full" in output
    events = RunFolder.read(folder).events()
    assert [e["next_microbatch_tokens"] for e in events if e["event"] == "oom"] == [32, None]
    # the same command tries one row again, and continues if it fits now
    code, output, _ = _train(recipe)
    assert code == 0, output
    assert [e["microbatch_tokens"] for e in RunFolder.read(folder).events() if e["event"] == "auto_resolved"][-1] == 32
