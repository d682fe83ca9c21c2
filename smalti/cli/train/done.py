"""The end of ``smalti train``: what it prints, and whether a run was done before, so that no rank is started."""

import sys

from smalti.config.identity import placement_difference
from smalti.config.run import RunConfig
from smalti.track.checkpoint_commands import verify
from smalti.track.run import RunFolder


def finished(config: RunConfig) -> RunFolder | None:
    """Return the folder of a run that is done as ``config`` describes it; None where ranks may have something to do.

    They have where the last checkpoint is damaged or only in a store, the end was not recorded, or the placement, such
    as the evaluations, is not that of the last attempt.
    """
    folder = RunFolder(config.run_folder)
    attempts, step = folder.attempts(), folder.saved_step()
    if step is None or step < config.length.total_steps or not attempts or folder.status().get("state") != "done":
        return None
    before = folder.attempt_config(attempts[-1]).model_copy(update={"folder": config.folder})
    if placement_difference(before, config) or verify(folder.checkpoint(step), lambda *_: None) is not None:
        return None
    return RunFolder.join(folder.path, attempts[-1])


def report_done(folder: RunFolder, config: RunConfig, seconds: float | None, *, trial: int | None) -> int:
    """Print that the run is done, the next command and the results; return the exit code."""
    from smalti.cli.train import preflight

    export = f"smalti export {folder.path}{' --merge' if preflight.only_merged(config) else ''}"
    following = None if trial or preflight.not_exportable(config) else export
    print(_done_text(folder, seconds, following=following), file=sys.stderr)
    _show_results(folder, config)
    return 0


def _show_results(folder: RunFolder, config: RunConfig) -> None:
    """Print what became worse, and how the run changed the model that it started from."""
    warn_of_worse(folder)
    if config.init_from is not None:
        _show_continued(folder)


def warn_of_worse(folder: RunFolder) -> None:
    """Warn of held-out sets that a stage has made worse."""
    from smalti.track.report.read import read_run
    from smalti.track.report.worse import worse_in_stages

    for each in worse_in_stages(read_run(folder.path)):
        print(f"warning: {each.words()}", file=sys.stderr)


def _show_continued(folder: RunFolder) -> None:
    """Print how the run changed the model that it started from."""
    from smalti.cli.tables import table
    from smalti.track.report.continued import COLUMNS, continued
    from smalti.track.report.read import read_run

    result = continued(read_run(folder.path))
    if result is not None:
        print(f"\n{result.title()}\n{table(COLUMNS, result.table_rows())}", file=sys.stderr)


def trained_again(folder: RunFolder) -> bool:
    """Return whether a checkpoint was rejected in the newest attempt, which has trained its steps again."""
    last = max(folder.attempts(), default=None)
    return any(event["event"] == "checkpoint_rejected" and event["attempt"] == last for event in folder.events())


def _done_text(folder: RunFolder, seconds: float | None, *, following: str | None) -> str:
    """Return ``runs/x: done, 40 steps in 2m03s; next: ...``; ``seconds`` of this attempt, None if it did nothing.

    ``following``: the next command, if there is one."""
    from smalti.base.units import format_seconds

    rows = folder.metrics()
    steps = max(int(row["step"]) for row in rows) if rows else folder.saved_step() or 0
    text = f"{folder.path}: done, {steps} {'step' if steps == 1 else 'steps'}"
    text += " (already finished)" if seconds is None else f" in {format_seconds(seconds)}"
    resumed = f" (attempt {folder.attempt})" if folder.attempt else ""
    return text + resumed + (f"; next: {following}" if following else "")
