"""``smalti eval compare``: two models on the same items, and which differences exceed the noise."""

from typing import TYPE_CHECKING, Annotated

import typer

from smalti.cli.options import Json
from smalti.cli.tables import print_json, table

if TYPE_CHECKING:
    from smalti.evals.compare import Comparison, Row


def compare(
    a: Annotated[str, typer.Argument(metavar="A", help="A run, or a folder of results.")],
    b: Annotated[str, typer.Argument(metavar="B", help="Another one, on the same items.")],
    suite: Annotated[
        str | None, typer.Option(help="Compare results of this suite; absent: that of the newest results of A.")
    ] = None,
    task: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Compare this task alone; may be repeated.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Compare two models item by item: difference, 95 % interval, smallest detectable difference, verdict.

    The newest results of each run are compared, on the tasks that both have; also the categories and the core average
    of the Gauntlet. A model is called better only where the difference exceeds the noise of the items, after Holm's
    correction for the number of rows.
    """
    from smalti.evals.compare import compare as compare_results

    comparison = compare_results(a, b, suite=suite, tasks=task or [])
    if as_json:
        print_json(comparison.to_json())
        return
    print(_text(comparison))


def _text(comparison: "Comparison") -> str:
    from smalti.evals.statistics.paired import LEVEL

    head = ("task", "measure", "n", "A", "B", "B - A", "95 % interval", "detectable", "verdict")
    rows = comparison.rows
    lines = [f"{side}: {each.model} ({each.folder})" for side, each in (("A", comparison.a), ("B", comparison.b))]
    versions = [each.about.get("smalti_version") for each in (comparison.a, comparison.b)]
    if versions[0] != versions[1]:
        lines.append(f"note: A was evaluated by Smalti {versions[0]}, B by {versions[1]}")
    lines += ["", table(head, [_cells(row) for row in rows]), ""]
    lines += [
        "detectable: the smallest true difference for which a model is called better in 80 % of comparisons",
        f"verdict: the better model where p is at most {LEVEL}"
        + (f"; both are corrected for {len(rows)} comparisons (Holm)" if len(rows) > 1 else ""),
    ]
    for side, names in (("A", comparison.only_a), ("B", comparison.only_b)):
        if names:
            lines.append(f"only in {side}, not compared: {', '.join(names)}")
    return "\n".join(lines)


def _cells(row: "Row") -> tuple[str, ...]:
    difference = row.difference
    interval = difference.interval
    return (
        row.name,
        row.metric.replace("_", " "),
        f"{difference.n:,}",
        f"{difference.a:.3f}",
        f"{difference.b:.3f}",
        f"{difference.value:+.3f}",
        "(n too small)" if interval is None else f"{interval[0]:+.3f} to {interval[1]:+.3f}",
        "-" if row.detectable is None else f"{row.detectable:.3f}",
        row.verdict,
    )
