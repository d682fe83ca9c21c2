"""``smalti eval calibrate``: which tasks and shots tell runs apart, from their scores over steps."""

from typing import TYPE_CHECKING, Annotated

import typer

from smalti.cli.options import Json
from smalti.cli.tables import print_json, table

if TYPE_CHECKING:
    from smalti.evals.calibration.calibrate import Calibration


def calibrate(
    runs: Annotated[list[str], typer.Argument(metavar="RUN...", help="Runs, by folder or by name in runs/.")],
    suite: Annotated[str | None, typer.Option(help="Scores of this suite alone; absent: of all.")] = None,
    last: Annotated[int, typer.Option(help="Checkpoints at the end of a run whose spread is its noise.")] = 3,
    html: Annotated[
        str | None, typer.Option(metavar="FILE", help="Write a page with plots, which needs no server.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Show which tasks, shots and measures tell runs apart: signal, noise and order by training FLOPs.

    Scores are those of tasks during training (evals: in the recipe), and of all results of 'smalti eval run'. Signal is
    the spread of the last scores between runs, noise the spread over the last checkpoints of a run and between seeds.
    The class of a row needs runs of 4 different FLOPs and --last scores of a run.
    """
    from smalti.base import store
    from smalti.evals.calibration.calibrate import calibrate as of_runs
    from smalti.evals.calibration.page import page

    calibration = of_runs(runs, suite=suite, last=last)
    if html is not None:
        store.write_text(html, page(calibration))
    if as_json:
        return print_json(calibration.to_json())
    print(_text(calibration))
    if html is not None:
        print(f"\nwritten: {html}")


def _text(calibration: "Calibration") -> str:
    from smalti.evals.calibration import words

    lines = [table(words.COLUMNS, [words.cells(calibration, row) for row in calibration.rows]), ""]
    lines += words.notes(calibration)
    lines += ["", table(("task", "measure", "shots", "group"), words.group_rows(calibration))]
    lines += ["", table(("use from FLOPs", "measure", "tasks"), words.recommendation_rows(calibration))]
    return "\n".join(lines)
