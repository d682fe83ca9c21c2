"""``smalti runs``: what runs there are, a page about one, and what sets several apart."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(
    add_completion=False,
    rich_markup_mode=None,
    no_args_is_help=True,
    help="Runs on this machine: list, look at, compare, report.",
)

_Run = Annotated[str, typer.Argument(metavar="RUN", help="A run folder, or its name in runs/.")]
_Runs = Annotated[list[str], typer.Argument(metavar="RUN...", help="Run folders, or their names in runs/.")]
_Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@app.command(epilog="Example: smalti runs ls --where state=done --sort loss --columns +train.optimizer.lr")
def ls(
    folder: Annotated[str, typer.Argument(help="The folder that holds run folders.")] = "runs",
    where: Annotated[
        list[str] | None,
        typer.Option(metavar="COLUMN=VALUE", help="Only runs like this, as state=done, 'loss<2' or 'run=lr-*'."),
    ] = None,
    sort: Annotated[str | None, typer.Option(metavar="COLUMN", help="Sort by a column, rising.")] = None,
    reverse: Annotated[bool, typer.Option("--reverse", help="The other way round.")] = False,
    columns: Annotated[
        str | None, typer.Option(metavar="A,B", help="Show these columns; with a + before the first, these too.")
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Show at most so many.")] = None,
    as_json: _Json = False,
) -> None:
    """List the runs in a folder, newest heartbeat first.

    A column is one of run, state, step, loss, eval, tokens, speed, mfu, time, attempt, heartbeat, reason and folder; or
    any metric (loss/train/total); or any key of the config (train.optimizer.lr). --where compares what the files
    hold, so mfu is 0 to 1 and time is in seconds; 'mfu>30%' and 'time>1h' are understood too.
    """
    from smalti.cli.runs import columns as run_columns
    from smalti.cli.tables import print_json, print_table
    from smalti.track.listing import list_runs

    names = _column_names(columns, run_columns.DEFAULT)
    shown, wanted = run_columns.columns(names), run_columns.conditions(where or [])
    if sort is not None:
        run_columns.column(sort)  # a wrong name is told before the folder is read
    found = list_runs(folder, metrics=run_columns.metrics([*names, *([sort] if sort else [])], where or []))
    kept = [run for run in found if wanted(run)]
    if sort is not None:
        kept = run_columns.ordered(kept, sort, reverse=reverse)
    elif reverse:
        kept.reverse()
    kept = kept[:limit]
    if as_json:
        asked = dict(zip(names, shown, strict=True)) if columns else {}
        print_json([run.to_json() | {name: one.value(run) for name, one in asked.items()} for run in kept])
        return
    if columns is None:  # as MFU, on a machine whose peak is unknown
        shown = [one for one in shown if any(one.value(run) is not None for run in kept)]
    empty = f"no run in {folder}" if not found else f"none of the {len(found)} runs in {folder} is like that"
    print_table([one.head for one in shown], [[one.text(run) for one in shown] for run in kept], empty=empty)
    for run in kept:
        if run.problem is not None:
            typer.echo(f"note: {run.folder} is broken: {run.problem}", err=True)


@app.command(epilog="Example: smalti runs show runs/demo")
def show(
    run: _Run,
    events: Annotated[int, typer.Option(min=0, help="How many of the last events to show.")] = 10,
    as_json: _Json = False,
) -> None:
    """Show one run: config, attempts, newest metrics, evals, plan against measured, last events, sizes on disk."""
    from smalti.cli.runs.show import about, about_text
    from smalti.cli.tables import print_json
    from smalti.track.run import resolve

    found = about(resolve(run), n_events=events)
    if as_json:
        print_json(found)
        return
    print(about_text(found))


@app.command(epilog="Example: smalti runs diff runs/base runs/lr-low --plot lr.html")
def diff(
    runs: _Runs,
    plot: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Overlay their curves: on a page (.html) or in a picture (.svg)."),
    ] = None,
    metric: Annotated[str | None, typer.Option(help="What --plot draws large; absent: loss/train/total.")] = None,
    x: Annotated[str | None, typer.Option(metavar="step|tokens|time", help="Over what; absent: step.")] = None,
    as_json: _Json = False,
) -> None:
    """Print what differs between runs: config, code and machine, metrics at the same step and at the end, evals.

    A difference that is not larger than the noise of what was measured is said to be so. The noise is that of batches
    and of questions; two seeds of one config may differ by more.
    """
    from smalti.base.errors import UserError
    from smalti.cli.runs.diff import comparison_text
    from smalti.cli.tables import print_json
    from smalti.track.compare.comparison import compare
    from smalti.track.compare.page import write_plot
    from smalti.track.report.read import read_run
    from smalti.track.run import resolve

    if len(runs) < 2:
        raise UserError(
            "one run differs from nothing", allowed="two runs or more", hint=f"smalti runs diff {runs[0]} RUN"
        )
    if plot is None and (metric or x):
        raise UserError("--metric and --x say what --plot draws", hint="--plot curves.html")
    records = [read_run(resolve(run)) for run in runs]
    found = compare(records)
    if plot is not None:
        write_plot(records, plot, metric=metric, x=x)
    if as_json:
        print_json(found.to_json())
        return
    print(comparison_text(found))
    if plot is not None:
        print(f"\ncurves: {plot}")


@app.command(epilog="Example: smalti runs report runs/demo")
def report(
    runs: _Runs,
    output: Annotated[
        Path | None,
        typer.Option(help="The file; absent: report.html in the run folder, for several runs beside the first."),
    ] = None,
    upload: Annotated[
        bool, typer.Option(help="Put the page of one run to its MLflow run, where it has one.", show_default=False)
    ] = True,
) -> None:
    """Write one page to open in a browser, and print its path; several runs share a page, their curves overlaid."""
    from smalti.track.compare.page import write_report_of_several
    from smalti.track.report import write_report
    from smalti.track.run import resolve
    from smalti.track.trackers import publish

    folders = [resolve(run) for run in runs]
    if len(folders) == 1:
        page = write_report(folders[0], parameters=_parameters(folders[0]), output=output)
        print(page)
        for line in publish(folders[0], page, "report.html") if upload and output is None else ():
            typer.echo(line, err=True)
        return
    print(write_report_of_several(folders, output=output))


@app.command("profile", epilog="Example: smalti runs profile runs/demo")
def profile_(run: _Run, as_json: _Json = False) -> None:
    """Where the time of profiled steps went: the bottleneck and what its removal would gain, operators, traffic.

    Profile steps with: smalti train RECIPE 'profile.steps=[10,12]' profile.ranks=all. Beside the summaries lie a trace
    (open it at ui.perfetto.dev), the log of collectives and, on a GPU, a snapshot of memory (pytorch.org/memory_viz).
    """
    from smalti.cli.runs.profile import profile_text
    from smalti.cli.tables import print_json
    from smalti.track.profiles import read
    from smalti.track.run import resolve

    found = read(resolve(run))
    if as_json:
        print_json([summary.to_json() for summary in found])
        return
    print("\n\n".join(profile_text(summary) for summary in found))


@app.command("send", epilog="Example: smalti runs send runs/demo 'track.sinks=[mlflow]'")
def send_(
    run: _Run,
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="A.B=VALUE", help="Changes to the run's track section.")
    ] = None,
) -> None:
    """Send what the run's trackers lack: metrics, parameters, tags, state. For a run that does not train now.

    After an outage that outlasted the run, or for a run that had no tracker. It takes as long as it takes.
    """
    from smalti.track.run import resolve
    from smalti.track.trackers import send

    left = send(resolve(run), overrides or [])
    for name, lines in left.items():
        print(f"{name}: {'all is sent' if not lines else f'{lines} lines are missing'}")
    if any(left.values()):
        raise typer.Exit(3)


def _column_names(given: str | None, default: Sequence[str]) -> list[str]:
    if given is None:
        return list(default)
    names = [name.strip() for name in given.removeprefix("+").split(",") if name.strip()]
    return [*default, *names] if given.startswith("+") else names


def _parameters(run: Path) -> tuple[int, int] | None:
    """(total, active) by the run's config; None where it has none that is a run of ``smalti train``."""
    from smalti.base.errors import UserError
    from smalti.config.load import load
    from smalti.config.run import RunConfig
    from smalti.cost.params import count

    path = run / "config.yaml"
    if not path.is_file():
        return None
    try:
        params = count(load(RunConfig, str(path)).config.model)
    except UserError as error:
        # A run of another kind of training, or of another version: the page is still worth writing, without the count.
        typer.echo(f"parameters are not counted: {error.message}", err=True)
        return None
    return params.total, params.active
