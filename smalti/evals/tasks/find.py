"""Finds the tasks of a suite: generated ones, held-out text and the Gauntlet's by name, others of files by path."""

from dataclasses import dataclass
from pathlib import Path

from smalti.base import store
from smalti.base.errors import DataError, UserError, nearest
from smalti.config.eval import EvalConfig, task_lines
from smalti.config.load import load
from smalti.config.task import TaskConfig
from smalti.evals.gauntlet.files import NEEDS_SANDBOX, SOURCE, path_of, require_folder
from smalti.evals.gauntlet.table import BENCHMARKS, BY_NAME, Benchmark
from smalti.evals.tasks.generated import generator

GAUNTLET = "gauntlet"
"""The name of all benchmarks of the Gauntlet whose files are there."""
LM_EVAL = "lm-eval"
"""The suite whose tasks are those of lm-evaluation-harness."""
_SUFFIXES = (".yaml", ".yml")


@dataclass(frozen=True)
class FileTask:
    """A task of a file, and its name in the results."""

    name: str
    config: TaskConfig


def find_tasks(config: EvalConfig) -> list[str | FileTask]:
    """Return the tasks of a suite, in order. Raises UserError for an unknown name or two of one name."""
    if config.suite == LM_EVAL:
        raise UserError("the suite lm-eval is for 'smalti eval run' alone", hint="name another suite")
    tasks: list[str | FileTask] = []
    for entry in config.tasks:
        if entry == GAUNTLET:
            tasks += _gauntlet(require_folder(config.data))
        elif isinstance(entry, str):
            tasks.append(_named(entry, config))
        else:
            tasks.append(_given(entry, entry.file))
    if config.task_shots is not None:
        tasks = [task if isinstance(task, str) else _with_shots(task, config.task_shots) for task in tasks]
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


def _with_shots(task: FileTask, shots: int) -> FileTask:
    """Return the task with so many shots; one of kind ifeval has none."""
    if task.config.kind == "ifeval":
        return task
    return FileTask(task.name, task.config.model_copy(update={"shots": shots}))


def load_task(path: str) -> FileTask:
    """Load a task from YAML; its ``file`` is relative to the YAML file."""
    if not store.exists(path):
        raise DataError(
            f"there is no task file {path}",
            allowed="the path of a YAML file with kind: and file:",
            hint="docs/guides/write-a-task.md has examples",
        )
    config = load(TaskConfig, path).config
    if store.is_local(config.file):
        config = config.model_copy(update={"file": str(Path(path).parent / config.file)})
    return _given(config, path)


def _given(config: TaskConfig, path: str) -> FileTask:
    return FileTask(config.name or Path(path).name.split(".")[0], config)


def _gauntlet(folder: str) -> list[FileTask]:
    paths = [(benchmark, path_of(benchmark, folder)) for benchmark in BENCHMARKS if benchmark.kind != "code"]
    tasks = [FileTask(benchmark.name, benchmark.task(path)) for benchmark, path in paths if path is not None]
    if not tasks:
        raise DataError(
            f"{folder} has none of the Gauntlet's files",
            allowed="a folder with CATEGORY/FILE.jsonl, such as world_knowledge/arc_easy.jsonl",
            hint=f"get them from {SOURCE}; smalti eval data {folder} --check lists them",
        )
    return tasks


def _benchmark(benchmark: Benchmark, config: EvalConfig) -> FileTask:
    if benchmark.kind == "code":
        raise UserError(f"the task '{benchmark.name}' {NEEDS_SANDBOX}", hint="leave it out")
    folder = require_folder(config.data)
    path = path_of(benchmark, folder)
    if path is None:
        raise DataError(
            f"the task '{benchmark.name}' has no file {store.join(folder, benchmark.path)}",
            hint=f"get it from {SOURCE}; smalti eval data {folder} --check lists what is missing",
        )
    return FileTask(benchmark.name, benchmark.task(path))


def _named(name: str, config: EvalConfig) -> str | FileTask:
    if name.endswith(_SUFFIXES):
        return load_task(name)
    if name in BY_NAME:
        return _benchmark(BY_NAME[name], config)
    if name == "heldout" or generator(name) is not None:
        return name
    if name.endswith(".jsonl"):
        raise UserError(
            f"'{name}' is a file of rows, and a task is a YAML file that names it",
            allowed="kind: and file: in a .yaml file",
            hint=f"write 'kind: choice' and 'file: {name}' into mine.yaml, then 'tasks=[mine.yaml]'",
        )
    close = nearest(name, [*task_lines(), *BY_NAME])
    raise UserError(
        f"there is no task '{name}'",
        allowed=f"{', '.join(task_lines())}, a benchmark of the Gauntlet, or the path of a task's .yaml file",
        hint=f"did you mean {close}?" if close else "smalti eval ls",
    )
