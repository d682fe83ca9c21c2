"""``report.html``: one page about a run, for a browser, a mail or a paper's appendix.

Guarantees: made from the run folder alone (config.yaml, provenance.json, status.json, metrics.jsonl, events.jsonl,
evals/, samples.jsonl); one file without a script, a font or any address outside itself; everything from the folder is
escaped; a run that was killed, has no metrics or no evals still gets its page. Does not follow a run: write it again.
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
    """Write ``<run_folder>/report.html`` (or ``output``); returns its path. DataError if the folder holds no run.

    ``parameters`` are (total, active), which the caller counts from the config (``cost.params``); without them the
    page takes what an event of the run says (``params_total``, ``params_active``), or says nothing.
    """
    run = read_run(run_folder)
    path = str(output or store.join(run_folder, FILE_NAME))
    store.write_text(path, page(run, parameters))
    return path
