"""``smalti data explain``: the documents of a batch, and the batches that learn a document."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from smalti.cli.data.arguments import Json

if TYPE_CHECKING:
    from smalti.config.run import RunConfig
    from smalti.data.stream.explain import Explanation
    from smalti.data.tokenizer.encode import Tokenizer

_ROWS, _SIGHTINGS = 32, 50
_TEXT_CHARS = 300
_TEXT_TOKENS = 2_000


def explain(
    recipe: Annotated[
        str, typer.Argument(metavar="RUN_OR_RECIPE", help="A run folder, a .yaml file, or the name of a recipe.")
    ],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[A.B=VALUE]...", help="Changes to the config.")
    ] = None,
    step: Annotated[int | None, typer.Option(min=1, help="Explain the batch of this step.")] = None,
    position: Annotated[int | None, typer.Option(min=0, help="Explain the sequence at this position.")] = None,
    document: Annotated[
        str | None,
        typer.Option(metavar="SOURCE:WHICH", help="List the steps that learn a document: its number, or its id."),
    ] = None,
    row: Annotated[int | None, typer.Option(min=0, help="Only this row of the batch, in full.")] = None,
    rank: Annotated[int | None, typer.Option(min=0, help="Only the rows of this rank.")] = None,
    world_size: Annotated[
        int | None, typer.Option(min=1, help="Number of ranks; absent: train.parallel.ranks.")
    ] = None,
    text: Annotated[bool, typer.Option("--text", help="Print the text of the documents.")] = False,
    as_json: Json = False,
) -> None:
    """List the documents of a batch, or the steps and rows that learn a document; nothing is replayed or written.

    Steps count as in metrics: step N is the N-th update, and its batch is Stream.batch(N - 1) in Python. A document is
    learned where its tokens are targets. WHICH is its number in the source, or its id if the tokens have ids (id=12 for
    an id that looks like a number). For a run folder the steps are marked as done or to come; data or config that
    differ from those of its newest checkpoint are an error.
    """
    from smalti.base.errors import UserError
    from smalti.cli.tables import print_json

    options = {"--step": step, "--position": position, "--document": document}
    used = [name for name, value in options.items() if value is not None]
    if len(used) != 1:
        problem = f"{' and '.join(used)} exclude each other" if used else "nothing to explain is given"
        raise UserError(problem, allowed="one of --step, --position and --document", hint="--step 1")
    if step is None and (row is not None or rank is not None):
        raise UserError("--row and --rank choose rows of a step", hint="give --step too, or leave them out")
    if row is not None and rank is not None:
        raise UserError("--row and --rank both choose rows", allowed="one of them")
    config, present, saved = _config(recipe, overrides or [])
    explanation = _explanation(config, world_size or config.train.parallel.ranks)
    if saved is not None:
        _check_run(explanation, saved, recipe)
    tokenizer = _tokenizer(config, explanation) if text else None
    if document is not None:
        values = _document(explanation, document, present)
        lines = _document_lines
    else:
        values = _step(explanation, step, position, row, rank)
        lines = _step_lines
    if tokenizer is not None:
        _add_text(explanation, values, tokenizer)
    values["present_step"] = present
    if as_json:
        print_json(values)
    else:
        print("\n".join(lines(values)))


def _config(recipe: str, overrides: list[str]) -> "tuple[RunConfig, int | None, tuple[int, dict[str, Any]] | None]":
    """Return the config, the number of finished steps (None for a recipe), and the newest checkpoint's step and state.

    Raises UserError for overrides that change the identity of the run.
    """
    from smalti.base import store
    from smalti.base.errors import UserError
    from smalti.cli.working_directory import enter, load_run
    from smalti.config.identity import difference
    from smalti.track.run import RunFolder, resolve

    path = resolve(recipe)
    if not (path / "config.yaml").is_file():
        return load_run(recipe, overrides).config, None, None
    recipe, overrides = enter(str(path), overrides)
    folder = RunFolder.read(path := Path(recipe))
    config = load_run(recipe, overrides).config
    changes = difference(folder.config(), config)
    if changes:
        raise UserError(
            "\n  ".join([f"{path} is the folder of another run:", *changes]),
            allowed="changes of placement, such as the path of its data",
            hint=f"explain it as a recipe: smalti data explain {path}/config.yaml ...",
        )
    step = folder.saved_step()
    present = max((n for n in (step, folder.status().get("step")) if n is not None), default=0)
    if step is None:
        return config, present, None
    saved = store.read_json(folder.checkpoint(step) / "train_state.json")["stream"]
    return config, present, (step, saved)


def _check_run(explanation: "Explanation", saved: tuple[int, dict[str, Any]], recipe: str) -> None:
    """Raise UserError if the data are no longer those that the run has learned from."""
    from smalti.base.errors import UserError

    try:
        explanation.stream.check(saved[1], saved[0])
    except UserError as error:
        raise UserError(
            error.message, allowed=error.allowed, hint=f"restore what changed: {recipe} learned from it"
        ) from error


def _explanation(config: "RunConfig", world_size: int) -> "Explanation":
    from smalti.data.stream.explain import Explanation
    from smalti.data.stream.open import read_indexes, takedowns_of
    from smalti.data.stream.stream import Stream

    indexes = read_indexes(config.data)
    stream = Stream(config.data, seed=config.seed, length=config.length, microbatch_tokens=1, indexes=indexes)
    return Explanation(stream, world_size=world_size, takedowns=takedowns_of(indexes))


def _tokenizer(config: "RunConfig", explanation: "Explanation") -> "Tokenizer":
    from smalti.base.errors import UserError
    from smalti.data.tokenizer.encode import load_tokenizer

    copy = Path(config.run_folder) / "tokenizer"
    folder = str(copy) if copy.is_dir() else config.data.tokenizer
    if folder is None:
        raise UserError("--text needs the tokenizer that wrote the tokens", hint="data.tokenizer=OUTPUT/tokenizer")
    tokenizer = load_tokenizer(folder)
    digest = explanation.stream.tokenizer_digest
    if digest is not None and tokenizer.digest != digest:
        raise UserError(f"{folder} is not the tokenizer that wrote the tokens", hint="data.tokenizer=OUTPUT/tokenizer")
    return tokenizer


def _step(
    explanation: "Explanation", step: int | None, position: int | None, row: int | None, rank: int | None
) -> dict[str, Any]:
    """Return the chosen rows of a batch; steps count from 1."""
    from smalti.base.errors import UserError

    if step is not None and step > explanation.schedule.total_steps:
        raise UserError(f"step {step:,} is outside the run", allowed=f"1 to {explanation.schedule.total_steps:,}")
    rows: list[int] | None
    if position is not None:
        place = explanation.place(position)
        index = place.step
        rows = [place.row]
    else:
        assert step is not None
        index = step - 1
        rows = [row] if row is not None else None if rank is None else list(explanation.rows_of_rank(index, rank))
    values = explanation.step(index, rows=rows)
    for entry in (values, *values["rows"]):
        entry["step"] = index + 1
    if row is not None or position is not None:
        for part in values["rows"][0]["documents"]:
            whole = explanation.document(part["source"], str(part["number"])) if part["number"] is not None else None
            part |= {"of_begin": whole.begin, "of_end": whole.end} if whole else {}
    values["full"] = row is not None or position is not None
    return values


def _document(explanation: "Explanation", name: str, present: int | None) -> dict[str, Any]:
    """Return a document and the places where it is learned; steps count from 1."""
    from smalti.base.errors import UserError

    source, colon, which = name.partition(":")
    if not colon or not which:
        raise UserError(
            f"--document {name} names no document", allowed="SOURCE:NUMBER or SOURCE:ID", hint="--document code:12"
        )
    document = explanation.document(source, which)
    sightings = explanation.sightings(document)
    for sighting in sightings:
        sighting["step"] += 1
        sighting["done"] = None if present is None else sighting["step"] <= present
    return {
        "document": {**vars(document), "taken_down": explanation.is_taken_down(document)},
        "world_size": explanation.world_size,
        "total_steps": explanation.schedule.total_steps,
        "sightings": sightings,
    }


def _add_text(explanation: "Explanation", values: dict[str, Any], tokenizer: "Tokenizer") -> None:
    import numpy as np

    parts = [part for row in values.get("rows", []) for part in row["documents"]] or [values.get("document")]
    for part in filter(None, parts):
        source = explanation.stream.opened[part["source"]]
        out = np.empty((1, min(part["end"] - part["begin"], _TEXT_TOKENS)), dtype=source.dtype)
        source.read_rows(np.array([part["begin"]], dtype=np.int64), out)
        part["text"] = tokenizer.decode(out[0].tolist())


def _step_lines(values: dict[str, Any]) -> list[str]:
    from smalti.cli.tables import table

    last = values["first_position"] + values["sequences"] - 1
    lines = [
        f"step {values['step']:,}{_when(values['step'], values['present_step'])}: stage {values['stage']}, "
        f"{values['sequences']:,} sequences of {values['seq_len']:,} tokens, "
        f"positions {values['first_position']:,} to {last:,}, on {_ranks(values['world_size'])}",
        "",
    ]
    if values["full"]:
        return lines + _row_lines(values["rows"][0])
    shown = values["rows"][:_ROWS]
    head = ("row", "position", "rank", "source", "epoch", "sequence", "learned tokens", "documents")
    lines.append(table(head, [_row_cells(row) for row in shown]))
    if len(shown) < len(values["rows"]):
        lines.append(f"... and {len(values['rows']) - len(shown):,} more; --rank, --row and --json show them")
    for row in shown:
        for part in row["documents"]:
            if "text" in part:
                lines += ["", f"-- row {row['row']}, {_named(part)}", *_quoted(part["text"])]
    return lines


def _row_cells(row: dict[str, Any]) -> tuple[str, ...]:
    pieces = [f"{begin:,} - {end:,}" for begin, end in row["pieces"]]
    names = [_named(part) for part in row["documents"]]
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return (
        str(row["row"]),
        f"{row['position']:,}",
        str(row["rank"]),
        row["source"],
        str(row["epoch"]),
        f"{row['sequence']:,}",
        pieces[0] + (f" and {len(pieces) - 1} more" if len(pieces) > 1 else ""),
        (", ".join(names[:3]) or "not known") + more,
    )


def _row_lines(row: dict[str, Any]) -> list[str]:
    from smalti.cli.tables import table

    padding = f", {row['padding_tokens']:,} tokens of padding" if row["padding_tokens"] else ""
    lines = [
        f"row {row['row']}: position {row['position']:,}, rank {row['rank']}, source {row['source']}, "
        f"epoch {row['epoch']}, sequence {row['sequence']:,}{padding}"
    ]
    cells = []
    for part in row["documents"]:
        n, of = part["end"] - part["begin"], ""
        if "of_begin" in part:
            a, whole = part["begin"] - part["of_begin"], part["of_end"] - part["of_begin"]
            of = "all of it" if n == whole else f"{a:,} - {a + n:,} of {whole:,}"
        columns = f"{part['column']:,} - {part['column'] + n:,}"
        cells.append((_named(part), columns, of, f"{part['begin']:,} - {part['end']:,}"))
    lines.append(table(("document", "columns of the row", "tokens of the document", "tokens of the source"), cells))
    for part in row["documents"]:
        if "text" in part:
            lines += ["", f"-- {_named(part)}", *_quoted(part["text"])]
    return lines


def _document_lines(values: dict[str, Any]) -> list[str]:
    from smalti.cli.tables import table

    document = values["document"]
    sightings = values["sightings"]
    present = values["present_step"]
    lines = [
        f"document {_named(document)} of {document['source']}: {document['end'] - document['begin']:,} tokens, "
        f"{document['begin']:,} - {document['end']:,} of the source"
    ]
    if "text" in document:
        lines += [*_quoted(document["text"]), ""]
    if document["taken_down"]:
        lines.append("taken down: its tokens are blanked and never learned")
    epochs = len({sighting["epoch"] for sighting in sightings})
    if not sightings:
        return [*lines, f"no sequence of the run's {values['total_steps']:,} steps learns it"]
    counts = f"{len(sightings):,} sequence{'s'[: len(sightings) != 1]} in {epochs:,} epoch{'s'[: epochs != 1]}"
    if present is not None:
        done = sum(sighting["done"] for sighting in sightings)
        counts += f": {done:,} up to step {present:,}, the last one done, and {len(sightings) - done:,} after it"
    lines += [f"it is in {counts}", ""]
    head = ("step", "row", "rank", "position", "epoch", "sequence", "tokens of the document", "")
    rows = []
    for sighting in sightings[:_SIGHTINGS]:
        parts = ", ".join(f"{begin:,} - {end:,}" for begin, end in sighting["tokens"])
        numbers = (f"{sighting[key]:,}" for key in ("step", "row", "rank", "position", "epoch", "sequence"))
        rows.append((*numbers, parts, {None: "", True: "done", False: "to come"}[sighting["done"]]))
    lines.append(table(head, rows))
    if len(sightings) > _SIGHTINGS:
        lines.append(f"... and {len(sightings) - _SIGHTINGS:,} more; --json lists them")
    return lines


def _named(part: dict[str, Any]) -> str:
    number = "?" if part["number"] is None else f"{part['number']:,}"
    name = f"{number} ({part['id']})" if part["id"] is not None else number
    return f"{name} [taken down]" if part.get("taken_down") and "tokens" not in part else name


def _quoted(text: str) -> list[str]:
    return [f"   | {line}" for line in text[:_TEXT_CHARS].splitlines()[:10]]


def _when(step: int, present: int | None) -> str:
    return "" if present is None else " (done)" if step <= present else f" (to come; the run has done {present:,})"


def _ranks(n: int) -> str:
    return f"{n:,} rank" if n == 1 else f"{n:,} ranks"
