"""Tasks during training: the questions of a suite, scored by all ranks on any mesh.

Questions are made once, before the first step, so a wrong file or task is reported there. Only tasks that are ranked by
likelihood run; held-out loss has a cadence of its own (``train.eval_every``). Scores are those of ``smalti eval run``
on an export of the same step, up to the rounding of ``train.precision.compute``.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from smalti.base import log
from smalti.base.errors import UserError
from smalti.config.eval import InLoopConfig
from smalti.config.run import RunConfig
from smalti.data.tokenizer.encode import Tokenizer, load_tokenizer
from smalti.distributed.group.mesh import Mesh
from smalti.evals import mesh_scores
from smalti.evals.gauntlet.averages import averages
from smalti.evals.gauntlet.files import missing, require_folder
from smalti.evals.likelihood import Scores
from smalti.evals.tasks.find import GAUNTLET, FileTask, find_tasks
from smalti.evals.tasks.generated import context_of
from smalti.evals.tasks.items import read_items
from smalti.evals.tasks.ranked import RankedTask, file_task, generated_task
from smalti.evals.tasks.windows import TooLong
from smalti.train.loop import Evaluate

_MEASURES = ("gold_probability", "bits_per_byte", "n_missing")


@dataclass
class _Encoder:
    tokenizer: Tokenizer
    begin_id: int


def suite_hook(config: RunConfig, mesh: Mesh | None = None) -> Evaluate | None:
    """Return the function that runs the tasks of ``evals``; None if the run has none.

    It returns, for each task, ``icl/metrics/<group>/<task>`` (accuracy), its ``/stderr``, ``/low`` and ``/high`` (the
    95 % interval), ``/gold_probability`` and ``/bits_per_byte``; for the Gauntlet also those of categories and
    ``core_average``, with ``/n_missing``, the number of their benchmarks that do not run. ``<group>`` is
    ``eval_gauntlet`` for the suite ``gauntlet``, else the name of the suite. ``mesh``: of the job; None is allowed if
    every rank reads different rows.
    """
    evals = config.evals
    if evals is None:
        return None
    if config.data.tokenizer is None:
        raise UserError(
            "evals needs a tokenizer, and data.tokenizer is not set", hint="data.tokenizer=FOLDER, or remove evals"
        )
    tokenizer = load_tokenizer(config.data.tokenizer)
    seq_len = evals.seq_len or config.data.seq_len
    longest = config.model.max_position_embeddings
    tasks, reasons = _tasks(evals, _Encoder(tokenizer, tokenizer.eod_id), seq_len, longest)
    windows = [window for task in tasks for window in task.windows]
    place = mesh_scores.place_of(config.train.parallel, mesh)
    group = "eval_gauntlet" if evals.suite == GAUNTLET else evals.suite

    def evaluate(model: nn.Module, step: int) -> dict[str, float]:
        was_training = model.training
        model.eval()
        try:
            scores = mesh_scores.score(model, windows, place, batch_tokens=evals.batch_tokens)
        finally:
            model.train(was_training)
        results = _results(tasks, scores)
        if GAUNTLET not in evals.tasks:
            return _metrics(group, results, {})
        return _metrics(group, results, averages(results, reasons, evals.mode))

    return evaluate


def _tasks(
    evals: InLoopConfig, encoder: _Encoder, seq_len: int, longest: int
) -> tuple[list[RankedTask], dict[str, str]]:
    """Return the tasks, and the benchmarks of the Gauntlet that do not run, each with the reason."""
    reasons = missing(require_folder(evals.data)) if GAUNTLET in evals.tasks else {}
    tasks = []
    for task in find_tasks(evals):
        if isinstance(task, str):
            if task != "heldout":
                tasks.append(generated_task(task, encoder, evals, context_of(task, seq_len, longest)))
        elif task.config.kind in ("generation", "ifeval"):
            reasons[task.name] = "needs generation: smalti eval run"
        else:
            try:
                tasks.append(_of_file(task, evals, encoder, seq_len))
            except TooLong as error:
                if GAUNTLET not in evals.tasks:
                    raise
                reasons[task.name] = error.message
    if not tasks:
        raise UserError(
            f"evals has no task that runs during training: {', '.join(map(str, evals.tasks))}",
            allowed="tasks ranked by likelihood; held-out loss is measured by train.eval_every",
            hint="'evals.tasks=[arithmetic, brackets]', or remove evals",
        )
    if reasons:
        log.get("evals").info(
            "not run during training: %s", "; ".join(f"{name} ({reason})" for name, reason in reasons.items())
        )
    return tasks, reasons


def _of_file(task: FileTask, evals: InLoopConfig, encoder: _Encoder, seq_len: int) -> RankedTask:
    return file_task(task.name, task.config, read_items(task.config), encoder, evals, seq_len)


def _results(tasks: list[RankedTask], scores: Scores) -> dict[str, dict[str, Any]]:
    parts = scores.split(len(task.windows) for task in tasks)
    return {task.name: task.result(part).score for task, part in zip(tasks, parts, strict=True)}


def _metrics(group: str, results: Mapping[str, Mapping[str, Any]], means: Mapping[str, Any]) -> dict[str, float]:
    """``means``: the result of ``averages``; empty without the Gauntlet. What a score does not have is left out."""
    metrics: dict[str, float] = {}
    named = {**results, **means.get("categories", {}), "core_average": means.get("core_average")}
    for name, score in named.items():
        if score is None:
            continue
        low, high = score["interval"] or (None, None)
        values = {"": score["value"], "/stderr": score["stderr"], "/low": low, "/high": high}
        values |= {f"/{measure}": score.get(measure) for measure in _MEASURES}
        metrics |= {f"icl/metrics/{group}/{name}{key}": value for key, value in values.items() if value is not None}
    return metrics
