"""Writes ``report.html``, one page about a run, from the files of its folder alone.

The page is one file without scripts, fonts or external addresses, and everything from the folder is escaped. A run that
was killed, or has no metrics or evals, has a page too. The page does not follow a running run: write it again.
"""

from pathlib import Path

from smalti.base import store
from smalti.track.report.page import page
from smalti.track.report.read import read_run

__all__ = ["write_report"]

FILE_NAME = "report.html"


def write_report(
    run_folder: str | Path, *, parameters: tuple[int, int] | None = None, output: str | Path | None = None
) -> str:
    """Write ``<run_folder>/report.html`` (or ``output``); returns its path. Raises DataError if it is not a run folder.

    parameters: (total, active), counted from the config by the caller (``cost.params``). Without it the page shows
    those of the run's events (``params_total``, ``params_active``), if there are any.
    """
    run = read_run(run_folder)
    path = str(output or store.join(run_folder, FILE_NAME))
    store.write_text(path, page(run, parameters))
    return path
