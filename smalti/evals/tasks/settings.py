"""Which fields of ``EvalConfig`` a task reads: a change of others has no effect on it or on its cached result."""

from collections.abc import Iterable
from typing import Any

from smalti.config.eval import EvalConfig
from smalti.evals.gauntlet.table import BY_NAME
from smalti.evals.tasks import needles
from smalti.evals.tasks.find import GAUNTLET, LM_EVAL, FileTask, find_tasks

_ALL = ("suite", "tasks", "seq_len", "batch_tokens")
_HELDOUT = ("max_bytes", "overlap_frac", "resamples", "seed")
_FILES = ("mode", "chat", "limit", "cut_prompts", "task_shots")


def settings_of(task: str | FileTask, config: EvalConfig) -> dict[str, Any]:
    """Return the settings that the result of a task depends on, besides its data and its context."""
    return config.model_dump(mode="json", include=set(_read_by(task)))


def without_effect(names: Iterable[str], config: EvalConfig) -> tuple[list[str], list[str]]:
    """Return the fields among ``names`` that no task reads, and the names of the tasks."""
    if config.suite == LM_EVAL:
        entries = [entry if isinstance(entry, str) else entry.file for entry in config.tasks]
        return [name for name in names if name not in (*_ALL, "limit")], entries
    tasks = find_tasks(config)
    read = {*_ALL, *(name for task in tasks for name in _read_by(task))}
    read |= {"heldout"} if "heldout" in tasks else set()
    read |= {"data"} if any(entry == GAUNTLET or entry in BY_NAME for entry in config.tasks) else set()
    if config.mode == "v0.3":
        read.discard("chat")
    return [name for name in names if name not in read], [
        task if isinstance(task, str) else task.name for task in tasks
    ]


def _read_by(task: str | FileTask) -> tuple[str, ...]:
    if isinstance(task, FileTask):
        return _FILES
    if task == "heldout":
        return _HELDOUT
    return ("n", "seed") if needles.sized(task) else ("n", "seed", "shots")
