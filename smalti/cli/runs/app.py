"""``smalti runs``: lists, shows, compares, profiles and reports runs."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from smalti.cli.options import Json, Run
from smalti.cli.runs import checkpoints

app = typer.Typer(
    add_completion=False,
    rich_markup_mode=None,
    no_args_is_help=True,
    help="List, show, compare and report the runs on this machine.",
)

app.add_typer(checkpoints.app, name="checkpoints")

_Runs = Annotated[list[str], typer.Argument(metavar="RUN", help="Run folders, or their names in runs/.")]


@app.command(epilog="Example: smalti runs ls --where state=done --sort loss --columns +train.optimizer.lr")
def ls(
    folder: Annotated[str, typer.Argument(help="Folder with run folders.")] = "runs",
    where: Annotated[
        list[str] | None,
        typer.Option(metavar="COLUMN=VALUE", help="Only matching runs, such as state=done, 'loss<2' or 'run=lr-*'."),
    ] = None,
    sort: Annotated[str | None, typer.Option(metavar="COLUMN", help="Sort by a column, ascending.")] = None,
    reverse: Annotated[bool, typer.Option("--reverse", help="Reverse the order.")] = False,
    columns: Annotated[
        str | None,
        typer.Option(metavar="A,B", help="Show these columns; with a leading +, besides the default ones."),
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Show at most this many.")] = None,
    as_json: Json = False,
) -> None:
    """List the runs in a folder, newest heartbeat first.

    Columns: run, state, step, loss, eval, tokens, speed, mfu, time, attempt, heartbeat, reason, folder; any metric
    (loss/train/total); any key of the config (train.optimizer.lr). --where compares stored values: mfu is 0 to 1, time
    is in seconds; 'mfu>30%' and 'time>1h' work too.
    """
    from smalti.cli.runs import columns as run_columns
    from smalti.cli.tables import print_json, print_table
    from smalti.track.listing import list_runs

    names = _column_names(columns, run_columns.DEFAULT)
    shown, wanted = run_columns.columns(names), run_columns.conditions(where or [])
    if sort is not None:
        run_columns.column(sort)  # reject a wrong name before reading the folder
    all_runs = list_runs(folder, metrics=run_columns.metrics([*names, *([sort] if sort else [])], where or []))
    selected = [run for run in all_runs if wanted(run)]
    if sort is not None:
        selected = run_columns.ordered(selected, sort, reverse=reverse)
    elif reverse:
        selected.reverse()
    selected = selected[:limit]
    if as_json:
        requested = dict(zip(names, shown, strict=True)) if columns else {}
        print_json([run.to_json() | {name: each.value(run) for name, each in requested.items()} for run in selected])
        return
    if columns is None:  # such as MFU on a machine whose peak is unknown
        shown = [each for each in shown if any(each.value(run) is not None for run in selected)]
    empty = f"no run in {folder}" if not all_runs else f"none of the {len(all_runs)} runs in {folder} matches"
    print_table([each.head for each in shown], [[each.text(run) for each in shown] for run in selected], empty=empty)
    for run in selected:
        if run.problem is not None:
            typer.echo(f"note: {run.folder} is broken: {run.problem}", err=True)


@app.command(epilog="Example: smalti runs show runs/demo")
def show(
    run: Run,
    events: Annotated[int, typer.Option(min=0, help="How many of the last events to show.")] = 10,
    usd_per_hour: Annotated[
        float | None,
        typer.Option(min=0, help="Price of an hour of one rank's device; absent: its usual price, if known."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Show one run: config, attempts, goodput, latest metrics, evals, plan and measurement, last events, sizes.

    Goodput: where the time of the ranks went, the interruptions, and what would have helped.
    """
    from smalti.cli.runs.show import about, about_text
    from smalti.cli.tables import print_json
    from smalti.track.run import resolve

    facts = about(resolve(run), n_events=events, usd_per_hour=usd_per_hour)
    if as_json:
        print_json(facts)
        return
    print(about_text(facts))


@app.command(epilog="Example: smalti runs diff runs/base runs/lr-low --plot lr.html")
def diff(
    runs: _Runs,
    plot: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Plot their curves into this file (.html or .svg)."),
    ] = None,
    metric: Annotated[str | None, typer.Option(help="Main metric of --plot; absent: loss/train/total.")] = None,
    x: Annotated[str | None, typer.Option(metavar="step|tokens|time", help="X axis of --plot; absent: step.")] = None,
    as_json: Json = False,
) -> None:
    """Print the differences between runs: config, code and machine, metrics at the same step and at the end (of a
    run that has not ended: the newest), evals.

    Differences within the measured noise are marked. The noise is that of batches and of questions; two seeds of one
    config may differ by more.
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
            "one run cannot be compared", allowed="two runs or more", hint=f"smalti runs diff {runs[0]} RUN"
        )
    if plot is None and (metric or x):
        raise UserError("--metric and --x are options of --plot", hint="--plot curves.html")
    records = [read_run(resolve(run)) for run in runs]
    comparison = compare(records)
    if plot is not None:
        write_plot(records, plot, metric=metric, x=x)
    if as_json:
        print_json(comparison.to_json())
        return
    print(comparison_text(comparison))
    if plot is not None:
        print(f"\ncurves: {plot}")


@app.command(epilog="Example: smalti runs compare runs/base runs/lr-low --plot losses.svg")
def compare(
    runs: _Runs,
    plot: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Plot their losses into this file (.html or .svg)."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Print one table of runs, a row for each: its newest metrics, as in 'smalti runs ls'; 'runs diff' says why."""
    from smalti.cli.runs import columns as run_columns
    from smalti.cli.tables import print_json, print_table
    from smalti.track.compare.page import write_plot
    from smalti.track.listing import summary
    from smalti.track.report.read import read_run
    from smalti.track.run import resolve

    folders = [resolve(run) for run in runs]
    records = [read_run(folder) for folder in folders]  # raises for what is no run
    summaries = [summary(folder) for folder in folders]
    if plot is not None:
        write_plot(records, plot, metric=None, x=None)
    if as_json:
        print_json([run.to_json() for run in summaries])
        return
    shown = run_columns.columns([name for name in run_columns.DEFAULT if name != "heartbeat"])
    print_table([each.head for each in shown], [[each.text(run) for each in shown] for run in summaries], empty="")
    if plot is not None:
        print(f"\ncurves: {plot}")


@app.command(epilog="Example: smalti runs report runs/demo")
def report(
    runs: _Runs,
    output: Annotated[
        Path | None,
        typer.Option(help="File to write; absent: report.html in the run folder, for several runs next to the first."),
    ] = None,
    upload: Annotated[
        bool, typer.Option(help="Upload the page of one run to its MLflow run, if it has one.", show_default=False)
    ] = True,
) -> None:
    """Write an HTML report and print its path; several runs share a page with their curves overlaid."""
    from smalti.track.compare.page import write_comparison
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
    print(write_comparison(folders, output=output))


@app.command("profile", epilog="Example: smalti runs profile runs/demo")
def profile_(run: Run, as_json: Json = False) -> None:
    """Show where the time of profiled steps went: the bottleneck and the gain of removing it, operators, collectives.

    Profile steps with: smalti train RECIPE 'profile.steps=[10,12]' profile.ranks=all. The folder of the summaries also
    has a trace (open it at ui.perfetto.dev), the log of collectives and, on a GPU, a memory snapshot
    (pytorch.org/memory_viz).
    """
    from smalti.cli.runs.profile import profile_text
    from smalti.cli.tables import print_json
    from smalti.track.profiles import read
    from smalti.track.run import resolve

    summaries = read(resolve(run))
    if as_json:
        print_json([summary.to_json() for summary in summaries])
        return
    print("\n\n".join(profile_text(summary) for summary in summaries))


@app.command("send", epilog="Example: smalti runs send runs/demo 'track.sinks=[mlflow]'")
def send_(
    run: Run,
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="A.B=VALUE", help="Changes to the run's track section.")
    ] = None,
) -> None:
    """Send the metrics, parameters, tags and state that the run's trackers lack. The run must not be training.

    Use it after an outage that outlasted the run, or for a run that had no tracker. There is no time limit.
    """
    from smalti.track.run import resolve
    from smalti.track.trackers import send

    left = send(resolve(run), overrides or [])
    for name, lines in left.items():
        print(f"{name}: {'complete' if not lines else f'{lines} lines are missing'}")
    if any(left.values()):
        raise typer.Exit(3)


def _column_names(option: str | None, default: Sequence[str]) -> list[str]:
    if option is None:
        return list(default)
    names = [name.strip() for name in option.removeprefix("+").split(",") if name.strip()]
    return [*default, *names] if option.startswith("+") else names


def _parameters(run: Path) -> tuple[int, int] | None:
    """Return (total, active) parameters by the run's config; None where it has no config of ``smalti train``."""
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
        # A run of another kind of training or of another version: the page is written without the count.
        typer.echo(f"parameters are not counted: {error.message}", err=True)
        return None
    return params.total, params.active
