"""``smalti eval read``: shows the samples of an evaluation, and the effect of flags on its scores."""

import sys
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from smalti.cli.options import Json

if TYPE_CHECKING:
    from smalti.evals.reader.reading import Reading

_LIMIT = 20


def read(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run, or a folder of results.")],
    other: Annotated[
        str | None, typer.Option(metavar="RUN", help="A second model's results on the same items.")
    ] = None,
    task: Annotated[str | None, typer.Option(help="Read this task alone.")] = None,
    sort: Annotated[
        Literal["confident", "disagreement", "unparsed", "truncated", "index"] | None,
        typer.Option(help="Default: confident; with --other, disagreement."),
    ] = None,
    limit: Annotated[int, typer.Option(min=0, help="Show at most this many samples.")] = _LIMIT,
    html: Annotated[
        str | None, typer.Option(metavar="FILE", help="Write all samples as one HTML page that needs no server.")
    ] = None,
    flags: Annotated[
        str | None, typer.Option(metavar="FILE", help="The list of flags; default: evals/flags.jsonl of the run.")
    ] = None,
    flag: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TASK:ID=FLAG",
            help="Flag an item: label-wrong or ambiguous (excluded from the score), answer-acceptable (counts as "
            "correct), or none; may be repeated.",
        ),
    ] = None,
    note: Annotated[str | None, typer.Option(metavar="TEXT", help="A note for --flag.")] = None,
    import_file: Annotated[
        str | None,
        typer.Option("--import", metavar="FILE", help="Add the flags that a page exported; '-' reads stdin."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Show the samples of an evaluation, and each score before and after the flags of its items.

    The newest results of RUN are read; RUN/evals/SUITE or RUN/evals/SUITE/TIME selects others. --sort also selects:
    confident shows wrong answers, the most probable first, and held-out text by bits per byte; disagreement shows
    items that two models answer differently; unparsed and truncated show those; index shows all. --html, --flag and
    --import print the scores without samples.
    """
    from smalti.base.errors import UserError
    from smalti.cli.tables import print_json
    from smalti.evals.reader import reading as readings

    if sort == "disagreement" and other is None:
        raise UserError("--sort disagreement needs two models", hint=f"smalti eval read {run} --other RUN")
    if note is not None and not flag:
        raise UserError("--note has no effect without --flag", hint="--flag TASK:ID=ambiguous --note TEXT")
    before = readings.read(run, other=other, task=task, flags=flags)
    reading = _with_flags(before, flag or [], note or "", import_file)
    order = sort or ("disagreement" if other else "confident")
    if html is not None:
        _write_page(reading, html, order)
    if as_json:
        return print_json(reading.to_json(order, limit))
    changes = flag is not None or import_file is not None
    _print_scores(reading, added=len(reading.lines) - len(before.lines) if changes else None)
    if html is not None:
        print(f"\nwritten: {html}")
    elif not changes:
        _print_samples(reading, order, limit)


def _with_flags(reading: "Reading", texts: list[str], note: str, import_file: str | None) -> "Reading":
    """Append the flags of the command line to the list, and return the reading with them."""
    from smalti.evals.reader.flags import append, new_lines, parse_flags

    lines = [reading.line(text, note) for text in texts]
    if import_file is not None:
        lines += new_lines(reading.lines, parse_flags(_text(import_file), import_file))
    if lines:
        append(reading.flags_path, lines)
    return reading.with_lines(lines)


def _write_page(reading: "Reading", path: str, order: str) -> None:
    from smalti.base import store
    from smalti.evals.reader.page import page

    store.write_bytes(path, page(reading, order))


def _text(path: str) -> str:
    from smalti.base import store

    return sys.stdin.read() if path == "-" else store.read_text(path)


def _print_scores(reading: "Reading", *, added: int | None) -> None:
    from smalti.base.units import format_quantity
    from smalti.cli.tables import table
    from smalti.evals.reader.flags import list_version
    from smalti.evals.reader.text import harmless, score_table

    for name, results in zip(reading.names, (reading.results, reading.other), strict=False):
        print(harmless(name if results is None or str(results.folder) in name else f"{name}: {results.folder}"))
    if added is not None:
        print(f"{format_quantity(added, 'line')} added to {reading.flags_path}")
    version = list_version(reading.flags_path)
    if version is not None:
        count = format_quantity(len(reading.applied.flags), "flag")
        print(f"flags: {reading.flags_path} (version {version}), {count} on these items")
    for name in reading.applied.changed:
        print(harmless(f"not applied: the flag of {name}, whose prompt or right answer has changed since"))
    head, rows = score_table([*reading.scores, *reading.other_scores])
    if reading.other is not None:
        names = [reading.names[0]] * len(reading.scores) + [reading.names[1]] * len(reading.other_scores)
        head, rows = ("model", *head), [(harmless(name), *row) for name, row in zip(names, rows, strict=True)]
    if rows:
        print(f"\n{table(head, rows)}")


def _print_samples(reading: "Reading", order: str, limit: int) -> None:
    from smalti.evals.reader.order import TITLES, ordered
    from smalti.evals.reader.text import sample_lines

    samples = ordered(reading.results.samples, order)
    shown = samples[:limit]
    of = f"{len(shown):,} of {len(samples):,}" if len(shown) < len(samples) else f"{len(samples):,}"
    print(f"\n{TITLES[order]}: {of}")
    for sample in shown:
        print()
        for line in sample_lines(sample, reading.applied.flags.get(sample.name), names=reading.names):
            print(line)
    if len(shown) < len(samples):
        print("\nmore: --limit N; all of them as a page: --html FILE")
