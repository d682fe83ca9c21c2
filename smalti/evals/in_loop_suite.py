"""Tasks during training: the questions of a suite, scored by all ranks on any mesh.

Questions are made once, before the first step, so a wrong file or task is reported there. Tasks with generated answers
are left to ``in_loop_generation``; held-out loss has a cadence of its own (``train.eval_every``). Scores are those of
``smalti eval run`` on an export of the same step, up to the rounding of ``train.precision.compute``.
"""

from dataclasses import dataclass
from typing import Any

from torch import nn

from smalti.base import log
from smalti.base.errors import UserError
from smalti.config.eval import EvalConfig, InLoopConfig, suites
from smalti.config.run import RunConfig
from smalti.data.tokenizer.encode import Tokenizer, load_tokenizer
from smalti.distributed.group.mesh import Mesh
from smalti.evals import in_loop_generation, mesh_scores
from smalti.evals.gauntlet.averages import averages
from smalti.evals.gauntlet.files import missing, require_folder
from smalti.evals.in_loop_generation import Generation, task_metrics
from smalti.evals.likelihood import Scores
from smalti.evals.suite import GENERATED
from smalti.evals.tasks.find import GAUNTLET, FileTask, find_tasks
from smalti.evals.tasks.generated import context_of
from smalti.evals.tasks.items import read_items
from smalti.evals.tasks.ranked import RankedTask, file_task, generated_task
from smalti.evals.tasks.settings import without_effect
from smalti.evals.tasks.windows import TooLong
from smalti.train.hooks import Hook
from smalti.train.loop import Evaluate


@dataclass
class _Encoder:
    tokenizer: Tokenizer
    begin_id: int


def suite_hook(config: RunConfig, mesh: Mesh | None = None) -> tuple[Evaluate | None, list[Hook]]:
    """Return the function that runs the tasks of ``evals`` that are ranked by likelihood, and the hook of the others.

    None and no hook if the run has none. The metrics of a task are ``icl/metrics/<group>/<task>`` (accuracy), its
    ``/stderr``, ``/low`` and ``/high`` (the 95 % interval), ``/gold_probability`` and ``/bits_per_byte``, and
    ``/truncated_frac`` of generated answers; for the Gauntlet also those of categories and ``core_average`` of tasks
    ranked by likelihood, with ``/n_missing``, the number of their benchmarks that are not among these. ``<group>`` is
    ``eval_gauntlet`` for the suite ``gauntlet``, else the name of the suite. ``mesh``: of the job; None is allowed if
    every rank reads different rows.
    """
    evals = config.evals
    if evals is None:
        return None, []
    if config.data.tokenizer is None:
        raise UserError(
            "evals needs a tokenizer, and data.tokenizer is not set", hint="data.tokenizer=FOLDER, or remove evals"
        )
    tokenizer = load_tokenizer(config.data.tokenizer)
    seq_len = evals.seq_len or config.data.seq_len
    longest = config.model.max_position_embeddings
    tasks, generated, reasons = _tasks(evals, _Encoder(tokenizer, tokenizer.eod_id), seq_len, longest)
    group = "eval_gauntlet" if evals.suite == GAUNTLET else evals.suite
    hooks: list[Hook] = [Generation(config, generated, seq_len, group)] if generated else []
    return _evaluation(config, evals, tasks, reasons, group, mesh) if tasks else None, hooks


def _evaluation(
    config: RunConfig,
    evals: InLoopConfig,
    tasks: list[RankedTask],
    reasons: dict[str, str],
    group: str,
    mesh: Mesh | None,
) -> Evaluate:
    windows = [window for task in tasks for window in task.windows]
    shard = mesh_scores.shard_of(config.train.parallel, mesh)

    def evaluate(model: nn.Module, step: int) -> dict[str, float]:
        was_training = model.training
        model.eval()
        try:
            scores = mesh_scores.score(model, windows, shard, batch_tokens=evals.batch_tokens)
        finally:
            model.train(was_training)
        results = _results(tasks, scores)
        if GAUNTLET in evals.tasks:
            means = averages(results, reasons, evals.mode)
            results |= means["categories"]
            results |= {"core_average": means["core_average"]} if means["core_average"] is not None else {}
        return task_metrics(group, results)

    return evaluate


def _tasks(
    evals: InLoopConfig, encoder: _Encoder, seq_len: int, longest: int
) -> tuple[list[RankedTask], list[FileTask], dict[str, str]]:
    """Return the tasks ranked by likelihood, those with generated answers, and the benchmarks of the Gauntlet that are
    not among the first, each with the reason."""
    reasons = missing(require_folder(evals.data)) if GAUNTLET in evals.tasks else {}
    tasks, generated = [], []
    for task in find_tasks(evals):
        if isinstance(task, str):
            if task != "heldout":
                tasks.append(generated_task(task, encoder, evals, context_of(task, seq_len, longest)))
            continue
        try:
            if task.config.kind in GENERATED:
                in_loop_generation.check(task, evals, encoder, seq_len)
                generated.append(task)
            else:
                tasks.append(_of_file(task, evals, encoder, seq_len))
        except TooLong as error:
            if GAUNTLET not in evals.tasks:
                raise TooLong(f"{task.name}: {error.message}", hint=error.hint) from error
            reasons[task.name] = error.message
    if not (tasks or generated):
        raise UserError(
            f"evals has no task that runs during training: {', '.join(map(str, evals.tasks))}",
            allowed="all tasks but held-out text, which train.eval_every measures",
            hint="'evals.tasks=[arithmetic, brackets]', or remove evals",
        )
    _require_effect(evals, generated)
    if reasons:
        log.get("evals").info(
            "not run during training: %s", "; ".join(f"{name} ({reason})" for name, reason in reasons.items())
        )
    return tasks, generated, reasons | {task.name: "its answers are generated" for task in generated}


def _require_effect(evals: InLoopConfig, generated: list[FileTask]) -> None:
    """Raise UserError for a field that no task reads during training, and that differs from its suite's."""
    for name in ("threads", "priority", "chat"):
        value = getattr(evals, name)
        if not generated and value != InLoopConfig.model_fields[name].default:
            raise UserError(
                f"evals.{name}={value} has no effect: no task generates answers",
                hint=f"remove evals.{name}, or add a task of the kind generation or ifeval",
            )
    suite = suites().get(evals.suite, EvalConfig())
    changed = [name for name in EvalConfig.model_fields if getattr(evals, name) != getattr(suite, name)]
    in_loop = tuple(task for task in evals.tasks if task != "heldout")
    unread, tasks = without_effect(changed, evals.model_copy(update={"tasks": in_loop}))
    if unread:
        raise UserError(
            f"evals.{unread[0]} has no effect on the tasks during training: {', '.join(tasks)}",
            allowed="fields that these tasks read; train.eval_every measures held-out text",
            hint=f"remove evals.{unread[0]}",
        )


def _of_file(task: FileTask, evals: InLoopConfig, encoder: _Encoder, seq_len: int) -> RankedTask:
    return file_task(task.name, task.config, read_items(task.config), encoder, evals, seq_len)


def _results(tasks: list[RankedTask], scores: Scores) -> dict[str, dict[str, Any]]:
    parts = scores.split(len(task.windows) for task in tasks)
    return {task.name: task.result(part).score for task, part in zip(tasks, parts, strict=True)}
