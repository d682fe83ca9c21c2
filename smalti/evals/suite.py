"""Runs a suite of tasks on one model and writes the results."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from smalti import __version__
from smalti.base import clock, store
from smalti.base.errors import DataError, UserError
from smalti.base.hashing import sha256_bytes
from smalti.config.eval import EvalConfig
from smalti.data.tokenizer.chat import ChatFormat
from smalti.evals import results
from smalti.evals.cache import Cache
from smalti.evals.gauntlet.averages import averages
from smalti.evals.gauntlet.files import missing, require_folder
from smalti.evals.gauntlet.table import BY_NAME
from smalti.evals.graders.ifeval.rows import load_rows
from smalti.evals.likelihood import Progress, score_greedy
from smalti.evals.lm_eval import tasks as lm_eval_tasks
from smalti.evals.lm_eval.samples import group_scores
from smalti.evals.results import TaskResult
from smalti.evals.tasks import generation, heldout, instructions, ranked
from smalti.evals.tasks.find import GAUNTLET, LM_EVAL, FileTask, find_tasks
from smalti.evals.tasks.generated import context_of
from smalti.evals.tasks.items import read_items
from smalti.evals.tasks.settings import settings_of
from smalti.evals.tasks.text_files import is_text_file
from smalti.evals.tasks.windows import TooLong
from smalti.serve.engine.engine import Engine

_LONGEST_DEFAULT_TOKENS = 2048
GENERATED = {"generation": generation.run, "ifeval": instructions.run}
"""Kinds of tasks whose answers are generated; the others are ranked by likelihood."""


def run(
    engine: Engine,
    config: EvalConfig,
    output: str | None = None,
    *,
    about: dict[str, Any] | None = None,
    announce: Callable[[str], None] = lambda name: None,
    progress: Callable[[str, int, int], None] = lambda name, done, total: None,
    try_bf16: bool = False,
    chat: ChatFormat | None = None,
    cache: Cache | None = None,
) -> dict[str, Any]:
    """Run all tasks of ``config``; returns what ``results.json`` holds.

    ``output``: a run folder (or any folder), into which ``evals/<suite>/<UTC time>/`` is written, and named as
    ``folder`` in what is returned; None writes nothing. ``about`` is added to the results (step, folder of the model
    ...). ``announce`` is called with the name of each task before it runs, ``progress`` with the tokens that it has
    read, of all. ``try_bf16``: held-out text is scored in bfloat16 where that gives the same figure. All folders are
    checked before anything is scored. ``chat``: the model's chat format; tasks of files are asked in it
    if it has a template. ``cache``: has the results of finished tasks, which do not run again.
    """
    check_folders(config)
    seq_len = context_tokens(engine, config)
    tasks: list[TaskResult] = []
    too_long: dict[str, str] = {}
    if chat is not None and not (config.chat and config.mode == "fixed" and chat.source):
        chat = None
    parts = _parts(engine, config, seq_len, try_bf16, chat)
    for number, part in enumerate(parts, 1):
        name = part.name
        announce(name)
        compute = partial(_timed, part.run, partial(progress, f"{name} (task {number} of {len(parts)})"))
        try:
            description = part.description
            task = compute() if cache is None or description is None else cache.result(description, compute)
        except TooLong as error:
            if len(parts) == 1:
                raise TooLong(f"{name}: {error.message}", hint=error.hint) from error
            too_long[name] = error.message
            continue
        tasks.append(task)
    report = _report(engine.name, config, about or {}, seq_len, tasks, too_long)
    if output is not None:
        report["folder"] = results.write(store.join(output, "evals", config.suite), report, tasks)
    return report


def _report(
    model: str,
    config: EvalConfig,
    about: dict[str, Any],
    seq_len: int,
    tasks: list[TaskResult],
    too_long: dict[str, str],
) -> dict[str, Any]:
    """Return what ``results.json`` holds. ``too_long``: the tasks that did not run, each with the reason."""
    report: dict[str, Any] = {
        "suite": config.suite,
        "model": model,
        **about,
        "time": clock.utc_text(),
        "smalti_version": __version__,
        "seq_len": seq_len,
        "config": config.model_dump(mode="json"),
        "tasks": {task.name: task.score for task in tasks},
    }
    of_gauntlet = {name: reason for name, reason in too_long.items() if GAUNTLET in config.tasks and name in BY_NAME}
    if not_run := {name: reason for name, reason in too_long.items() if name not in of_gauntlet}:
        report["not_run"] = not_run
    if groups := group_scores(report["tasks"]):
        report["groups"] = groups
    if GAUNTLET in config.tasks:
        reasons = missing(require_folder(config.data)) | of_gauntlet
        report["gauntlet"] = averages(report["tasks"], reasons, config.mode)
    return report


def context_tokens(engine: Engine, config: EvalConfig) -> int:
    """The longest context that tasks may use: ``config.seq_len``, or the model's own up to 2048."""
    longest = engine.limit_tokens
    if config.seq_len is not None and config.seq_len > longest:
        raise UserError(
            f"seq_len={config.seq_len} is longer than the model's {longest}",
            allowed=f"2 to {longest}",
            hint=f"seq_len={longest}",
        )
    return config.seq_len or min(longest, _LONGEST_DEFAULT_TOKENS)


def check_folders(config: EvalConfig) -> None:
    """Raise DataError that names every file and held-out folder that is missing; UserError for an unknown task."""
    if config.suite == LM_EVAL:
        lm_eval_tasks.require()
        return
    find_tasks(config)
    if "heldout" not in config.tasks:
        return
    if not config.heldout:
        raise UserError(
            "the task 'heldout' has no held-out token files",
            allowed="a run with data.heldout, or folders named here",
            hint="smalti eval run MODEL heldout.code=data/tokens/code/heldout, or leave the task out: "
            "'tasks=[arithmetic, brackets]'",
        )
    missing = [
        f"heldout.{source} = {folder}"
        for source, folder in config.heldout.items()
        if not store.exists(_index_of(folder))
    ]
    if missing:
        raise DataError(
            f"no held-out text in {', '.join(missing)}",
            allowed="folders that 'smalti data tokenize' wrote, or .txt, .md or .jsonl files, seen from here",
            hint="name where they are: heldout.NAME=FOLDER; or leave the task out: 'tasks=[arithmetic, brackets]'",
        )


def _index_of(heldout: str) -> str:
    """Return the file that determines a held-out text: itself, or the manifest of token files."""
    return heldout if is_text_file(heldout) else store.join(heldout, "manifest.json")


@dataclass(frozen=True)
class _Part:
    """A task, or the held-out text of a source."""

    name: str
    run: Callable[[Progress], TaskResult]
    description: dict[str, Any] | None
    """All that the result depends on, besides the model and the code; None where it is not known."""


def _parts(engine: Engine, config: EvalConfig, seq_len: int, try_bf16: bool, chat: ChatFormat | None) -> list[_Part]:
    if config.suite == LM_EVAL:
        return [_Part(name, run_task, None) for name, run_task in lm_eval_tasks.parts(engine, config, seq_len)]
    parts: list[_Part] = []

    def add(name: str, settings: dict[str, Any], run_task: Callable[[Progress], TaskResult], **about: Any) -> None:
        parts.append(_Part(name, run_task, {"name": name, **settings, "seq_len": seq_len, **about}))

    for task in find_tasks(config):
        settings = settings_of(task, config)
        if isinstance(task, FileTask):
            run_task, about = _file_part(task, engine, config, seq_len, chat)
            add(task.name, settings, run_task, **about)
        elif task != "heldout":
            context = context_of(task, seq_len, engine.limit_tokens)
            make = partial(ranked.generated_task, task, engine, config, context)
            add(task, settings, partial(_score, make, engine, config))
        else:
            for source, folder in config.heldout.items():
                digest = sha256_bytes(store.read_bytes(_index_of(folder)))
                run_heldout = partial(heldout.run, source, folder, engine, config, seq_len, try_bf16=try_bf16)
                add(f"heldout/{source}", settings, run_heldout, digest=digest, try_bf16=try_bf16)
    return parts


def _timed(run_task: Callable[[Progress], TaskResult], progress: Progress) -> TaskResult:
    begin_s = clock.now_s()
    task = run_task(progress)
    return TaskResult(task.name, {**task.score, "wall_s": clock.now_s() - begin_s}, task.samples)


def _score(make: Callable[[], ranked.RankedTask], engine: Engine, config: EvalConfig, progress: Progress) -> TaskResult:
    """Make the questions of a ranked task and score them."""
    task = make()
    scores = score_greedy(engine.model, task.windows, batch_tokens=config.batch_tokens, progress=progress)
    return task.result(scores)


def _file_part(
    task: FileTask, engine: Engine, config: EvalConfig, seq_len: int, chat: ChatFormat | None
) -> tuple[Callable[[Progress], TaskResult], dict[str, Any]]:
    """Return the function that runs a task of a file, and what describes the task in its score.

    The rows are read here, before anything is scored.
    """
    if task.config.kind == "ifeval":
        load_rows(task.config.file)  # raises for an instruction that no verifier knows
    arguments = (task.name, task.config, read_items(task.config), engine, config, seq_len)
    about = {
        "task": task.config.model_dump(mode="json", exclude_defaults=True),
        "sha256": sha256_bytes(store.read_bytes(task.config.file)),
    } | ({} if chat is None else {"chat": chat.source.rsplit("/", 1)[-1]})

    def run_and_describe(progress: Progress) -> TaskResult:
        if task.config.kind in GENERATED:
            result = GENERATED[task.config.kind](*arguments, progress, chat=chat)
        else:
            result = _score(partial(ranked.file_task, *arguments, chat=chat), engine, config, progress)
        return TaskResult(result.name, {**result.score, **about}, result.samples)

    return run_and_describe, about
