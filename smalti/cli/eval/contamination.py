"""``smalti eval contamination``: which items of the tasks are in the documents that a run trains on."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from smalti.cli.options import Json, Run
from smalti.cli.progress import ProgressLine
from smalti.cli.tables import print_json, table

if TYPE_CHECKING:
    from collections.abc import Mapping

    from smalti.config.run import RunConfig
    from smalti.data.sources.source import Source
    from smalti.data.tokenizer.encode import Tokenizer
    from smalti.evals.contamination.check import Check
    from smalti.evals.contamination.questions import Question


def contamination(
    run: Run,
    overrides: Annotated[list[str] | None, typer.Argument(metavar="A.B=VALUE", help="Changes to the suite.")] = None,
    suite: Annotated[str, typer.Option(help="Name of the suite; 'smalti eval ls' lists them.")] = "demo",
    results: Annotated[
        str | None,
        typer.Option(
            metavar="FOLDER",
            help="Evaluation (RUN/evals/SUITE/TIME) to whose results.json the scores of clean and dirty items are "
            "added; absent: the newest of the suite with the same files, if there is one.",
        ),
    ] = None,
    documents: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="File for the list of documents; absent: documents.jsonl beside the items."),
    ] = None,
    index: Annotated[
        str | None,
        typer.Option(metavar="FOLDER", help="Folder of the stored index; absent: RUN/evals/contamination/index."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Find the items of tasks of files in the training documents of a run, by their word 8-grams and 13-grams.

    Writes RUN/evals/contamination/TIME/: items.jsonl (clean, dirty or short, with hits and documents), and
    documents.jsonl for data.takedowns, and for drop_documents of 'smalti data curate'. All items of a file are checked,
    whatever the limit. Token files are searched once for the same items: the index has the result.
    """
    from smalti.base.errors import UserError
    from smalti.cli.extras import need
    from smalti.evals.contamination.check import write
    from smalti.evals.contamination.subsets import add_subsets, newest, tasks_of
    from smalti.track.run import no_run, resolve

    need("data", "smalti eval contamination", "pyarrow", "daft", "tokenizers")
    questions, digests, skipped = _questions(suite, overrides or [])
    folder = resolve(run).absolute()
    if not (folder / "config.yaml").is_file():
        raise no_run(run)
    output = folder / "evals" / "contamination"
    evaluation = Path(results).absolute() if results else newest(folder / "evals" / suite, digests)
    evaluated = tasks_of(evaluation, digests) if evaluation else []
    if results and not evaluated:
        raise UserError(
            f"{results} has no accuracy of these files: {', '.join(digests)}",
            allowed="an evaluation of the files that are checked",
            hint="evaluate again: smalti eval run",
        )
    paths = [Path(path).absolute() if path else None for path in (index, documents)]
    result, sources = _check(folder, questions, paths[0] or output / "index")
    record = write(result, sources, output, documents=paths[1], digests=digests)
    scores = {}
    if evaluation:
        judgements = {task: result.judgements[task] for task in evaluated}
        scores = add_subsets(evaluation, judgements, record["folder"])
    record |= {"not_checked": skipped, "results": str(evaluation) if evaluation else None}
    if as_json:
        print_json({**record, "scores": scores})
    else:
        _print(record, scores)


def _questions(suite: str, overrides: list[str]) -> "tuple[dict[str, list[Question]], dict[str, str], list[str]]":
    """Return the questions and the SHA-256 of each task of a file, and the names of the other tasks."""
    from smalti.base import store
    from smalti.base.errors import UserError
    from smalti.base.hashing import sha256_bytes
    from smalti.cli.eval.run import suite_values
    from smalti.config.eval import EvalConfig
    from smalti.config.load import from_dict
    from smalti.evals.contamination.questions import questions_of
    from smalti.evals.tasks.find import FileTask, find_tasks
    from smalti.evals.tasks.items import read_items

    config = from_dict(EvalConfig, suite_values(suite), f"suite {suite}", overrides).config
    tasks = find_tasks(config)
    files = {task.name: task.config for task in tasks if isinstance(task, FileTask)}
    questions = {name: questions_of(read_items(task)) for name, task in files.items()}
    digests = {name: sha256_bytes(store.read_bytes(task.file)) for name, task in files.items()}
    others = [task for task in tasks if isinstance(task, str)]
    if not questions:
        raise UserError(
            f"suite {suite} has no task of a file: {', '.join(others)}",
            allowed="tasks whose items are in a file",
            hint="name some: 'tasks=[my_task.yaml]'",
        )
    return questions, digests, others


def _check(folder: Path, questions: "dict[str, list[Question]]", index: Path) -> "tuple[Check, Mapping[str, Source]]":
    """Check the run in ``folder``; returns the result and the run's sources."""
    from contextlib import ExitStack

    from smalti.cli.working_directory import enter, load_run
    from smalti.data.stream.open import open_sources, read_indexes, takedowns_of
    from smalti.evals.contamination.check import check

    recipe, _ = enter(str(folder), [])
    config = load_run(recipe).config
    indexes = read_indexes(config.data)
    opened = open_sources(config.data, indexes)
    tokenizer = _tokenizer(folder, config, opened.tokenizer_digest)
    with ExitStack() as stack:
        for source in opened.sources.values():
            stack.callback(source.close)
        with ProgressLine("tokens") as progress:
            result = check(
                questions,
                opened.sources,
                tokenizer,
                index,
                takedowns=takedowns_of(indexes),
                progress=progress,
            )
        return result, opened.sources


def _tokenizer(folder: Path, config: "RunConfig", digest: str | None) -> "Tokenizer":
    from smalti.base.errors import UserError
    from smalti.data.tokenizer.encode import load_tokenizer

    copy = folder / "tokenizer"
    place = str(copy) if copy.is_dir() else config.data.tokenizer
    if place is None:
        raise UserError("the run does not name the tokenizer that wrote its tokens", hint=f"copy it to {copy}")
    tokenizer = load_tokenizer(place)
    if digest is not None and tokenizer.digest != digest:
        raise UserError(f"{place} is not the tokenizer that wrote the tokens", hint=f"copy the right one to {copy}")
    return tokenizer


def _print(record: dict[str, Any], scores: dict[str, Any]) -> None:
    from smalti.base.units import format_count

    header = ["task", "items", "dirty", "clean", "short", *(("accuracy", "of dirty", "of clean") if scores else ())]
    rows = []
    for task, counts in record["tasks"].items():
        row = [task, *(f"{counts[name]:,}" for name in ("n", "dirty", "clean", "short"))]
        score = scores.get(task)
        if scores:
            row += [_accuracy(score, name) if score else "" for name in ("all", "dirty", "clean")]
        rows.append(row)
    print(table(header, rows))
    scanned = format_count(record["scanned_tokens"]) if record["scanned_tokens"] else "none"
    print(f"\ntokens: {format_count(record['total_tokens'])}, of which searched now: {scanned}")
    print(f"items: {record['folder']}/items.jsonl")
    print(f"documents that make an item dirty: {record['n_documents']:,}, in {record['documents']}")
    if record["not_checked"]:
        print(f"not checked, because generated or held out: {', '.join(record['not_checked'])}")


def _accuracy(score: dict[str, Any], status: str) -> str:
    part = score if status == "all" else score["contamination"][status]
    return f"{part['accuracy']:.3f} (n {part['n']:,})" if part["n"] else "-"
