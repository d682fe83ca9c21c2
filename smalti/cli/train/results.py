"""What ``smalti train`` prints when a run is done."""

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from smalti.config.run import RunConfig
    from smalti.track.run import RunFolder


def done_text(folder: "RunFolder", seconds: float | None, *, following: str | None) -> str:
    """Return ``runs/x: done, 40 steps in 2m03s; next: ...``; ``seconds`` of this attempt, None if it did nothing.

    ``following``: the next command, if there is one."""
    from smalti.base.units import format_seconds

    rows = folder.metrics()
    steps = max(int(row["step"]) for row in rows) if rows else folder.saved_step() or 0
    text = f"{folder.path}: done, {steps} {'step' if steps == 1 else 'steps'}"
    text += " (already finished)" if seconds is None else f" in {format_seconds(seconds)}"
    resumed = f" (attempt {folder.attempt})" if folder.attempt else ""
    return text + resumed + (f"; next: {following}" if following else "")


def show(folder: "RunFolder", config: "RunConfig") -> None:
    """Print what became worse, and how the run changed the model that it started from."""
    warn_of_worse(folder)
    if config.init_from is not None:
        _show_continued(folder)


def warn_of_worse(folder: "RunFolder") -> None:
    """Warn of held-out sets that a stage has made worse."""
    from smalti.track.report.read import read_run
    from smalti.track.report.worse import worse_in_stages

    for each in worse_in_stages(read_run(folder.path)):
        print(f"warning: {each.words()}", file=sys.stderr)


def _show_continued(folder: "RunFolder") -> None:
    """Print how the run changed the model that it started from."""
    from smalti.cli.tables import table
    from smalti.track.report.continued import COLUMNS, continued
    from smalti.track.report.read import read_run

    result = continued(read_run(folder.path))
    if result is not None:
        print(f"\n{result.title()}\n{table(COLUMNS, result.table_rows())}", file=sys.stderr)
