"""Loads tasks of lm-evaluation-harness by name or YAML file, and runs them on the engine."""

import logging
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

from smalti.base.errors import DataError, SmaltiError, UserError, missing_extra, nearest
from smalti.config.eval import EvalConfig
from smalti.evals.likelihood import Progress
from smalti.evals.lm_eval.samples import sample_of, score_of
from smalti.evals.results import TaskResult
from smalti.serve.engine.engine import Engine

_SUFFIXES = (".yaml", ".yml")


def require() -> None:
    """Raise UserError where lm-evaluation-harness is not installed."""
    try:
        import lm_eval  # noqa: F401
    except ImportError as error:
        raise missing_extra("lm_eval", "lm-eval", "the suite lm-eval", error) from error


def parts(engine: Engine, config: EvalConfig, seq_len: int) -> list[tuple[str, Callable[[Progress], TaskResult]]]:
    """Return the tasks of a suite, a group's as its members, each with the function that runs it."""
    require()
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    from lm_eval.tasks import TaskManager

    from smalti.evals.lm_eval.model import SmaltiLM

    names = [entry if isinstance(entry, str) else entry.file for entry in config.tasks]
    manager = TaskManager(include_defaults=not all(name.endswith(_SUFFIXES) for name in names))
    _check_names(names, manager.all_tasks)
    model = SmaltiLM(engine, seq_len, batch_tokens=config.batch_tokens)
    try:
        loaded = manager.load(names)
    except Exception as error:  # whatever a task's own code and its data set raise
        raise DataError(
            f"lm-evaluation-harness cannot load {', '.join(names)}: {type(error).__name__}: {error}",
            hint="most tasks download their data set from the Hugging Face hub at the first use",
        ) from error
    groups = groups_of(loaded["groups"].values())
    return [
        (name, partial(_run, name, task, model, manager, config, groups.get(name, {})))
        for name, task in loaded["tasks"].items()
    ]


def groups_of(groups: Iterable[Any]) -> dict[str, dict[str, bool]]:
    """Return for each task the groups with a score that it is in, and whether its number of items is its weight."""
    memberships: dict[str, dict[str, bool]] = {}
    for group in groups:
        metrics = [each for each in group.aggregate_metric_list or () if each.metric in ("acc", "exact_match")]
        for metric in metrics[:1]:
            for task in group.get_all_tasks():
                memberships.setdefault(task.task_name, {})[group.name] = bool(metric.weight_by_size)
    return memberships


def _check_names(names: Sequence[str], known: Sequence[str]) -> None:
    for name in names:
        if not name.endswith(_SUFFIXES) and name not in known:
            close = nearest(name, known)
            raise UserError(
                f"lm-evaluation-harness has no task '{name}'",
                allowed="a task, group or tag of its, or the path of its YAML file",
                hint=f"did you mean {close}?" if close else "lm-eval ls tasks",
            )


def _run(
    name: str, task: Any, model: Any, manager: Any, config: EvalConfig, groups: dict[str, bool], progress: Progress
) -> TaskResult:
    import lm_eval

    model.progress = progress
    model.truncated.clear()
    try:
        results = lm_eval.simple_evaluate(
            model, tasks=[task], limit=config.limit, bootstrap_iters=0, log_samples=True, task_manager=manager
        )
    except SmaltiError:
        raise
    except Exception as error:  # whatever a task's own code raises
        raise DataError(f"the task {name} of lm-evaluation-harness: {type(error).__name__}: {error}") from error
    rows = results["samples"][name]
    rows = [row for row in rows if row["filter"] == rows[0]["filter"]]
    kind = task.OUTPUT_TYPE
    samples = [sample_of(row, kind, _gold(task, row)) for row in rows]
    if kind == "generate_until":
        for sample in samples:
            sample["truncated"] = sample["prompt"] in model.truncated
    reported = {key: value for key, value in results["results"][name].items() if isinstance(value, int | float)}
    score = score_of(samples, [str(row["arguments"][0][0]) for row in rows], kind, reported)
    if task.higher_is_better().get(score["metric"]) is False:
        score["higher_is_better"] = False
    about = {"version": lm_eval.__version__, "task_version": results["versions"].get(name), "reported": reported}
    about |= {"groups": groups} if groups else {}
    return TaskResult(name, {**score, "shots": results["n-shot"].get(name), "lm_eval": about}, samples)


def _gold(task: Any, row: dict[str, Any]) -> Any:
    """Return the number of the right option, or the right answers."""
    if task.OUTPUT_TYPE != "multiple_choice":
        return row["target"]
    gold = task.doc_to_text(row["doc"]) if getattr(task, "multiple_input", 0) else row["target"]
    choices = task.doc_to_choice(row["doc"])
    return choices.index(gold) if isinstance(gold, str) and gold in choices else gold
