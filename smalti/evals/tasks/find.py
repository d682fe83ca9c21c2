"""Finds the tasks of a suite: generated ones and held-out text by name, tasks of files by path or given as a config."""

from dataclasses import dataclass
from pathlib import Path

from smalti.base import store
from smalti.base.errors import DataError, UserError, nearest
from smalti.config.eval import EvalConfig, task_lines
from smalti.config.load import load
from smalti.config.task import TaskConfig

_SUFFIXES = (".yaml", ".yml")


@dataclass(frozen=True)
class FileTask:
    """A task of a file, and its name in the results."""

    name: str
    config: TaskConfig


def find_tasks(config: EvalConfig) -> list[str | FileTask]:
    """Return the tasks of a suite, in order. Raises UserError for an unknown name or two of one name."""
    tasks = [_named(entry) if isinstance(entry, str) else _given(entry, entry.file) for entry in config.tasks]
    names = [task if isinstance(task, str) else task.name for task in tasks]
    for name in names:
        if names.count(name) > 1:
            raise UserError(
                f"two tasks have the name '{name}'",
                allowed="one task of a name",
                hint="write another one into one of the YAML files: name: NAME",
            )
    for task in tasks:
        if isinstance(task, FileTask) and not store.exists(task.config.file):
            raise DataError(
                f"the task '{task.name}' has no file {task.config.file}",
                allowed="a JSONL file; a relative path starts at the folder of the task's YAML file",
            )
    return tasks


def load_task(path: str) -> FileTask:
    """Load a task from YAML; its ``file`` is relative to the YAML file."""
    config = load(TaskConfig, path).config
    if store.is_local(config.file):
        config = config.model_copy(update={"file": str(Path(path).parent / config.file)})
    return _given(config, path)


def _given(config: TaskConfig, path: str) -> FileTask:
    return FileTask(config.name or Path(path).name.split(".")[0], config)


def _named(name: str) -> str | FileTask:
    if name.endswith(_SUFFIXES):
        return load_task(name)
    if name in task_lines():
        return name
    close = nearest(name, task_lines())
    raise UserError(
        f"there is no task '{name}'",
        allowed=f"{', '.join(task_lines())}, or the path of a task's .yaml file",
        hint=f"did you mean {close}?" if close else "smalti eval ls",
    )
