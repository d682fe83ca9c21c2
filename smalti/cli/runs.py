"""``smalti runs``: what runs there are, and a page about one."""

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(
    add_completion=False,
    rich_markup_mode=None,
    no_args_is_help=True,
    help="Runs on this machine: list, look at, report.",
)

_Run = Annotated[str, typer.Argument(metavar="RUN", help="A run folder, or its name in runs/.")]
_Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@app.command(epilog="Example: smalti runs ls --json")
def ls(
    folder: Annotated[str, typer.Argument(help="The folder that holds run folders.")] = "runs",
    as_json: _Json = False,
) -> None:
    """List the runs in a folder, newest heartbeat first."""
    from smalti.cli.tables import print_json, print_table
    from smalti.track.listing import list_runs

    runs = list_runs(folder)
    if as_json:
        print_json([run.to_json() for run in runs])
        return
    rows = [
        (run.name, run.state, _text(run.step), _loss(run.loss), _text(run.attempt), run.heartbeat or "-")
        for run in runs
    ]
    print_table(("run", "state", "step", "loss", "attempt", "heartbeat"), rows, empty=f"no run in {folder}")


@app.command(epilog="Example: smalti runs show runs/demo")
def show(run: _Run, as_json: _Json = False) -> None:
    """Show one run: state, newest metrics, held-out results, evals."""
    from smalti.cli.tables import print_json, print_pairs
    from smalti.track.listing import describe
    from smalti.track.run import resolve

    found = describe(resolve(run))
    if as_json:
        print_json(found.to_json())
        return
    print_pairs(
        [
            ("run", found.name),
            ("folder", found.folder),
            ("state", found.state + (f" ({found.reason})" if found.reason else "")),
            ("step", _text(found.step)),
            ("attempt", _text(found.attempt)),
            ("heartbeat", found.heartbeat or "-"),
            *((name, _with_unit(name, value)) for name, value in found.metrics.items()),
            *((f"evals/{suite}", time) for suite, time in found.evals.items()),
        ]
    )


@app.command(epilog="Example: smalti runs report runs/demo")
def report(run: _Run) -> None:
    """Write report.html into the run folder, one page to open in a browser, and print its path."""
    from smalti.track.report import write_report
    from smalti.track.run import resolve

    folder = str(resolve(run))
    print(write_report(folder, parameters=_parameters(folder)))


def _parameters(run: str) -> tuple[int, int] | None:
    """(total, active) by the run's config; None where it has none that is a run of ``smalti train``."""
    from smalti.base.errors import UserError
    from smalti.config.load import load
    from smalti.config.run import RunConfig
    from smalti.plan.params import count

    path = Path(run) / "config.yaml"
    if not path.is_file():
        return None
    try:
        params = count(load(RunConfig, str(path)).config.model)
    except UserError as error:
        # A run of another kind of training, or of another version: the page is still worth writing, without the count.
        typer.echo(f"parameters are not counted: {error.message}", err=True)
        return None
    return params.total, params.active


def _text(value: int | None) -> str:
    return "-" if value is None else str(value)


def _with_unit(name: str, value: float) -> str:
    """The value of a metric as a person reads it; metrics.jsonl and --json have the plain number."""
    from smalti.base.units import format_count, format_frac, format_seconds

    if name == "time/train":  # hours, as the table of names says
        return f"{format_seconds(value * 3600)} in training steps"
    if name == "time/token":
        return f"{format_count(value)} tokens"
    if name == "throughput/tokens_per_sec":
        return f"{format_count(value)} tokens/s"
    if name == "throughput/device/mfu":
        return format_frac(value)
    if name.endswith("/bits_per_byte"):
        return f"{value:.6g} bits per byte"
    if name.endswith(("/LanguageCrossEntropy", "loss/train/total")):
        return f"{value:.6g} nats per token"
    return f"{value:.6g}"


def _loss(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"
