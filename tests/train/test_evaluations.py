"""Evaluations of a run: after the save of their step, not before a stop; the next attempt does what is missing."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from in_loop_runs import run_config

from smalti.base.errors import RetryableError
from smalti.train import Hook, build, fit
from smalti.train.loop import Job
from smalti.train.step import StepResult

EVERY = {"eval_every": "2step", "checkpoint": {"every": "2step"}}


@pytest.mark.slow
def test_an_evaluation_that_was_ended_is_done_by_the_next_attempt(tmp_path: Path) -> None:
    config = run_config(tmp_path, train=EVERY).model_copy(update={"evals": None})
    steps: list[int] = []
    saved: list[bool] = []

    def attempt(fails_at: int | None) -> None:
        def evaluate(model: Any, step: int) -> dict[str, float]:
            steps.append(step)
            saved.append((Path(config.run_folder) / f"checkpoints/step-{step:08d}/COMPLETE").exists())
            if step == fails_at:
                raise RuntimeError("killed")
            return {"metrics/eval/code/LanguageCrossEntropy": 1.0}

        fit(build(config, evaluate=evaluate))

    for fails_at, expected in ((2, [2]), (5, [2, 4, 5])):
        with pytest.raises(RuntimeError, match="killed"):
            attempt(fails_at)
        assert steps == expected
        steps.clear()
    attempt(None)  # all steps are done
    assert steps == [5]
    attempt(None)
    assert steps == [5]
    assert saved[-2:] == [True, True], "the last checkpoint is complete before its evaluation"


@pytest.mark.exhaustive
def test_a_stop_does_not_wait_for_an_evaluation(tmp_path: Path) -> None:
    config = run_config(tmp_path, train=EVERY).model_copy(update={"evals": None})
    steps: list[int] = []

    def attempt(stops_at: int | None) -> None:
        def evaluate(model: Any, step: int) -> dict[str, float]:
            steps.append(step)
            return {}

        class Stops(Hook):
            def on_step(self, job: Job, result: StepResult) -> None:
                if job.state.step + 1 == stops_at:
                    os.kill(os.getpid(), signal.SIGTERM)

        fit(build(config, evaluate=evaluate, hooks=[Stops()]))

    with pytest.raises(RetryableError, match="stopped at step 2 of 5"):
        attempt(2)
    assert steps == []
    attempt(None)
    assert steps == [2, 4, 5]
