"""Real processes: one of two ranks runs out of memory, and the run continues with half the microbatch."""

import json
import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import toy_run
from conftest import PROVE
from forked_command import run

from smalti.config.load import dump, load
from smalti.config.run import RunConfig
from smalti.track.run import RunFolder
from smalti.train import build, fit, loop

pytestmark = pytest.mark.slow


def _no_memory(phase: str, attempts: str) -> None:
    """In some attempts, before its ninth step, rank 1 requests more memory than there is."""
    if os.environ["RANK"] != "1" or os.environ["SMALTI_ATTEMPT"] not in attempts:
        return
    original = loop.train_step

    def train_step(state: Any, microbatches: Any, loss: Any) -> Any:
        if state.step != 8:
            return original(state, microbatches, loss)

        def short(model: Any, microbatch: Any) -> Any:
            if phase == "forward":
                _allocate()
            total, weight, sums = loss(model, microbatch)
            return (_Falls.apply(total) if phase == "backward" else total), weight, sums

        if phase == "optimizer":
            state.optimizer.step = _allocate
        return original(state, microbatches, short)

    loop.train_step = train_step


def _allocate() -> None:
    torch.empty(1 << 61, dtype=torch.uint8)


class _Falls(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> None:
        _allocate()


def _recipe(root: Path, *, axes: dict[str, int] | None = None, **train: Any) -> tuple[Path, Path]:
    parallel = {"ranks": 2, "threads": 1, **(axes or {})}
    config = toy_run.config(root, "moe", parallel=parallel, duration="14step", checkpoint={"every": "5step"}, **train)
    path = root / "recipe.yaml"
    path.write_text(dump(config))
    return path, Path(config.run_folder)


def _train(recipe: Path, *, phase: str = "", attempts: str = "0") -> tuple[int, str]:
    """(code, output); with a ``phase``, rank 1 runs out of memory in it, in ``attempts``."""
    return run("train", str(recipe), in_rank=partial(_no_memory, phase, attempts) if phase else None)


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
    code, output = _train(recipe, phase=phase)
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
    code, output = _train(recipe, phase="backward")
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
    code, output = _train(recipe, phase="forward", attempts="012")
    assert code == 2, output
    assert "one row does not fit" in output
    assert "activation_checkpointing=full" in output
    events = RunFolder.read(folder).events()
    assert [e["next_microbatch_tokens"] for e in events if e["event"] == "oom"] == [32, None]
    # the same command tries one row again, and continues if it fits now
    code, output = _train(recipe)
    assert code == 0, output
    assert [e["microbatch_tokens"] for e in RunFolder.read(folder).events() if e["event"] == "auto_resolved"][-1] == 32
