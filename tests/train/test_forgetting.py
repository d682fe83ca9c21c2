"""The hook for ``data.retain``: one warning for each bound, and none for values that cannot be compared."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from gloo_ranks import run_ranks

from smalti.base.errors import UserError
from smalti.track.line_file import LineFile
from smalti.train.forgetting import Forgetting

KEY = "metrics/eval/old/bits_per_byte"


class Events:
    def __init__(self) -> None:
        self.steps: list[int] = []

    def write(self, kind: str, **fields: Any) -> None:
        assert kind == "forgetting"
        self.steps.append(fields["step"])


def _watched(values: list[float], hook: Forgetting | None = None, first: int = 0) -> list[int]:
    """The steps with a warning of the hook, if step i measured values[i]."""
    hook, events = hook or Forgetting({"old": 0.1}), Events()
    for step, value in enumerate(values, start=first):
        job: Any = SimpleNamespace(state=SimpleNamespace(step=step), is_first=True, events=events)
        hook.on_eval(job, {KEY: value, "metrics/eval/new/bits_per_byte": 9.0 + step})
    return events.steps


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ([1, 1.05, 1.09, 0.5], []),
        ([1, 1.15, 1.18, 1.12], [1]),
        ([1, 1.15, 1.25, 1.15, 1.29, 1.31], [1, 2, 5]),
        ([1, 1.15, 1.05, 1.15], [1, 3]),
        ([1, 1.35, 1.25, 1.35], [1]),
        ([1, float("nan"), 9.0], [1]),
        ([1, float("inf"), 1.0, 1.2], [1, 3]),
    ],
)
def test_it_warns_once_for_each_bound_and_again_after_recovery(values: list[float], told: list[int]) -> None:
    assert _watched(values) == told


def _resumed(rank: int, folder: Path, eval_tokens: int) -> list[int] | str:
    """The steps with a warning after a resume at step 2 of a run whose first three values are recorded."""
    config = {"data": {"seq_len": 8, "heldout": {"old": "x"}}, "train": {"eval_tokens": 64}}
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    metrics, events = LineFile(folder / "metrics.jsonl"), LineFile(folder / "events.jsonl")
    for step, value in enumerate((1.0, 1.15, 1.25)):
        metrics.write({"step": step, KEY: value})
        events.write({"event": "eval", "step": step, "attempt": 0})
    config["train"] = {"eval_tokens": eval_tokens}
    job: Any = SimpleNamespace(
        state=SimpleNamespace(step=2),
        folder=SimpleNamespace(path=folder),
        config=SimpleNamespace(model_dump=lambda mode: config),
        evaluate=lambda model, step: {},
    )
    hook = Forgetting({"old": 0.1})
    try:
        hook.on_start(job)
    except UserError as error:
        return str(error)
    return _watched([1.28, 1.35], hook, first=3)


@pytest.mark.slow
def test_a_resumed_run_has_the_values_of_step_0_and_the_past_warnings(tmp_path: Path) -> None:
    assert run_ranks(1, _resumed, tmp_path, 64) == [[4]]


@pytest.mark.slow
def test_a_resume_that_would_measure_otherwise_is_refused(tmp_path: Path) -> None:
    assert "train.eval_tokens 64 -> 128" in run_ranks(1, _resumed, tmp_path, 128)[0]


def test_without_anything_that_measures_it_is_refused() -> None:
    job: Any = SimpleNamespace(state=SimpleNamespace(step=0), evaluate=None)
    with pytest.raises(UserError, match=r"data\.retain has no effect: nothing measures") as caught:
        Forgetting({"old": 0.1}).on_start(job)
    assert "heldout_hook" in str(caught.value.hint)
