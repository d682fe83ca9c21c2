"""The best checkpoint: the lowest value of steps that are saved and evaluated, in either order and over attempts."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from smalti.base.errors import UserError
from smalti.track.checkpoints.names import best
from smalti.track.events import NoEventLog
from smalti.train.best import KeepBest

METRIC = "metrics/eval/validation/LanguageCrossEntropy"


class Run:
    """A run folder and the calls of the loop."""

    def __init__(self, root: Path) -> None:
        self.folder = SimpleNamespace(path=root, checkpoints=root / "checkpoints")
        self.folder.checkpoints.mkdir(exist_ok=True)
        self.begin()

    def begin(self) -> None:
        """Start another attempt."""
        self.hook = KeepBest(METRIC)

    def job(self, step: int) -> Any:
        state = SimpleNamespace(step=step)
        return SimpleNamespace(folder=self.folder, state=state, is_first=True, events=NoEventLog(), evaluate=print)

    def save(self, step: int) -> None:
        path = self.folder.checkpoints / f"step-{step:08d}"
        path.mkdir()
        (path / "COMPLETE").touch()
        self.hook.on_checkpoint(self.job(step), str(path))

    def evaluate(self, step: int, value: float) -> None:
        with (self.folder.path / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"step": step, METRIC: value}) + "\n")
        self.hook.on_eval(self.job(step), {METRIC: value})

    @property
    def best(self) -> int | None:
        return best(self.folder.checkpoints)


def test_the_lowest_value_of_saved_steps_in_either_order(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.evaluate(1, 0.5)  # never saved
    assert run.best is None
    run.save(2)
    run.evaluate(2, 2.0)
    assert run.best == 2
    run.evaluate(4, 1.0)
    run.save(4)
    assert run.best == 4
    run.save(6)
    run.evaluate(6, 1.0)
    run.save(8)
    run.evaluate(8, float("nan"))
    run.save(10)  # not evaluated
    assert run.best == 4


@pytest.mark.parametrize("value", [0.9, 1.1])
def test_a_step_saved_by_an_earlier_attempt_is_compared_with_its_best(tmp_path: Path, value: float) -> None:
    run = Run(tmp_path)
    run.save(2)
    run.evaluate(2, 1.0)
    run.save(4)
    run.begin()  # killed before the evaluation of step 4, which the next attempt does without a step
    run.evaluate(4, value)
    assert run.best == (4 if value < 1 else 2)


def test_a_best_value_of_zero_is_known_to_the_next_attempt(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.save(2)
    run.evaluate(2, 0.0)
    run.save(4)
    run.begin()
    run.evaluate(4, 0.5)
    assert run.best == 2


def test_a_metric_that_is_not_measured_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is not measured"):
        KeepBest(METRIC).on_eval(Run(tmp_path).job(1), {"metrics/eval/prose/LanguageCrossEntropy": 1.0})


def test_the_moving_average_is_not_measured_at_step_0(tmp_path: Path) -> None:
    hook, job = KeepBest("metrics/eval_ema/prose/LanguageCrossEntropy"), Run(tmp_path).job(0)
    job.config = SimpleNamespace(train=SimpleNamespace(ema=object()))
    hook.on_eval(job, {"metrics/eval/prose/LanguageCrossEntropy": 1.0})
    with pytest.raises(UserError, match="is not measured") as raised:
        KeepBest("metrics/eval_ema/other/LanguageCrossEntropy").on_eval(
            Run(tmp_path).job(1), {f"metrics/{kind}/prose/LanguageCrossEntropy": 1.0 for kind in ("eval", "eval_ema")}
        )
    assert "metrics/eval_ema/prose/LanguageCrossEntropy" in (raised.value.allowed or "")
    job.config.train.ema = None
    with pytest.raises(UserError, match="is not measured"):
        hook.on_eval(job, {"metrics/eval/prose/LanguageCrossEntropy": 1.0})


def test_a_checkpoint_that_is_complete_after_later_evaluations(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.evaluate(2, 1.0)
    run.evaluate(3, 0.5)
    run.save(2)
    assert run.best == 2


def test_a_checkpoint_that_was_complete_and_not_compared_before_a_kill(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.evaluate(2, 1.0)
    run.save(2)
    run.evaluate(4, 0.5)
    (run.folder.checkpoints / "step-00000004").mkdir()
    (run.folder.checkpoints / "step-00000004/COMPLETE").touch()
    run.begin()
    run.hook.on_start(run.job(4))
    assert run.best == 4
    run.begin()
    run.hook.on_start(run.job(2))  # a higher value than that of the best
    assert run.best == 4
