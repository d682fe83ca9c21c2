"""``smalti fleet``: launches runs, and queues them on this machine."""

import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from smalti.cli.fleet import messages, nodes, secret
from smalti.cli.options import Json, Overrides, Recipe

if TYPE_CHECKING:
    import sqlite3

    from smalti.fleet.queue.runs import Run

app = typer.Typer(
    add_completion=False,
    rich_markup_mode=None,
    no_args_is_help=True,
    help="Launch runs in the background: a queue with priorities, preemption, retries and dependencies.",
)

app.add_typer(secret.app, name="secret")

_Id = Annotated[str, typer.Argument(metavar="ID", help="Id of a run, as 'smalti fleet ls' lists it; or its number.")]
_After = Annotated[
    list[str] | None, typer.Option("--after", metavar="ID", help="Start after this run is completed; may be repeated.")
]
_Sweep = Annotated[
    list[str] | None,
    typer.Option("--sweep", metavar="KEY=V1,V2", help="A run for each value; repeated, for each combination."),
]
_Pack = Annotated[
    bool, typer.Option("--pack", help="Run a copy of Smalti's files as they are now; needed if they are not committed.")
]
_Yes = Annotated[bool, typer.Option("--yes", help="Do it; without it, print what would be done.")]


@app.command(epilog="Example: smalti fleet launch demo ranks=2 train.parallel.threads=1 priority=low --yes")
def launch(
    recipe: Recipe,
    overrides: Overrides = None,
    on: Annotated[
        str,
        typer.Option("--on", metavar="CLUSTER", help="Where it runs: this machine, or one of clusters.yaml."),
    ] = "local",
    clusters: Annotated[
        str | None, typer.Option(metavar="FILE", help="File of clusters; absent: clusters.yaml in SMALTI_HOME.")
    ] = None,
    after: _After = None,
    sweep: _Sweep = None,
    pack: _Pack = False,
    yes: Annotated[bool, typer.Option("--yes", help="No effect on local, which costs nothing.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check the run and print its config, and exit.")] = False,
    as_json: Json = False,
) -> None:
    """Append a run to the queue, and return at once; 'smalti fleet wait ID' waits for its end.

    The recipe is checked and resolved now; later changes of the file have no effect. Keys of the section launch may be
    given without it: gpus=2 priority=low preemptible=true max_duration=2h; ranks=2 is train.parallel.ranks=2.

    The run gets the environment of the queue's controller, which the first launch of an empty queue starts.

    With --sweep all runs are checked before the first one is queued. Their names have the values: demo-lr-1e-4-seed-2.
    """
    if sweep:
        _launch_sweep(recipe, overrides or [], sweep, on, clusters, after or [], pack, dry_run, as_json)
        return
    from smalti.cli.fleet.launch import launch as append
    from smalti.cli.fleet.launch import target_of
    from smalti.cli.tables import print_json
    from smalti.config.load import dump
    from smalti.config.run import RunConfig
    from smalti.config.tune import TuneRecipe

    target = target_of(on, clusters)
    run = append(recipe, overrides or [], on=target, after=after or [], pack=pack, add=not dry_run)
    if isinstance(run, RunConfig | TuneRecipe):
        print_json(run.model_dump(mode="json")) if as_json else print(dump(run), end="")
        return
    if as_json:
        print_json({"id": run.id, "state": run.state, "folder": run.folder})
        return
    print(f"{run.id} is queued; its run folder is {run.folder}")
    nodes.warn_if_cordoned()
    typer.echo(f"follow it: smalti fleet logs {run.id} -f; wait for it: smalti fleet wait {run.id}", err=True)


def _launch_sweep(
    recipe: str,
    overrides: list[str],
    sweep: list[str],
    on: str,
    clusters: str | None,
    after: list[str],
    pack: bool,
    dry_run: bool,
    as_json: bool,
) -> None:
    from smalti.cli.fleet.launch import launch_sweep, target_of
    from smalti.cli.tables import print_json, table

    runs = launch_sweep(recipe, overrides, sweep, on=target_of(on, clusters), after=after, pack=pack, add=not dry_run)
    if as_json:
        print_json(runs)
        return
    print(table(("run", "values"), [(run.get("id") or run["name"], " ".join(run["values"])) for run in runs]))
    print(f"{len(runs)} runs {'would be' if dry_run else 'are'} queued")
    if not dry_run:
        nodes.warn_if_cordoned()


@app.command(epilog="Example: smalti fleet ls --state RUNNING --json")
def ls(
    state: Annotated[str | None, typer.Option(help="Only runs in this state: QUEUED, RUNNING ...")] = None,
    as_json: Json = False,
) -> None:
    """List the runs, newest first; 'smalti fleet show ID' lists the hosts of a run on several."""
    from smalti.base.errors import UserError, nearest
    from smalti.cli.fleet.text import HEAD, row
    from smalti.cli.tables import print_json, print_table
    from smalti.fleet.queue.states import STATES

    if state is not None and state.upper() not in STATES:
        close = nearest(state.upper(), STATES)
        hint = f"did you mean '{close}'?" if close else "smalti fleet ls"
        raise UserError(f"'{state}' is not a state", allowed=", ".join(STATES), hint=hint)
    listed = [value for value in _values() if state is None or value["state"] == state.upper()]
    if as_json:
        print_json(listed)
        return
    empty = "no run was launched; smalti fleet launch RECIPE launches one" if state is None else f"no run is {state}"
    print_table(HEAD, [row(value) for value in listed], empty=empty)


@app.command(epilog="Example: smalti fleet show demo-1")
def show(run: _Id, as_json: Json = False) -> None:
    """Show one run: state and cause, what it needs, its folder, its attempts."""
    from smalti.cli.fleet.text import about
    from smalti.cli.tables import print_json

    value = _values(run)[0]
    print_json(value) if as_json else print(about(value))


@app.command(epilog="Example: smalti fleet logs demo-1")
def logs(
    run: _Id,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Print new lines until the run has ended.")] = False,
    rank: Annotated[
        int | None, typer.Option(min=0, help="The log of this rank, in logs/attempt-N of the run folder.")
    ] = None,
    attempt: Annotated[
        int | None, typer.Option(min=0, help="Of this attempt; absent: the last. With --rank: of the run folder's.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Print the output of a run's last attempt; with --follow also that of the attempts that come."""
    from smalti.base.errors import UserError
    from smalti.cli.fleet import follow as following
    from smalti.cli.tables import print_json
    from smalti.fleet.queue import runs

    _ensure()
    if as_json and follow:
        raise UserError("--json with --follow", allowed="one of them", hint="leave --json out")
    read = runs.read(run)
    if follow:
        following.follow(read, attempt=attempt, rank=rank)
        return
    file = following.log_file(read, attempt=attempt, rank=rank)
    if as_json:
        lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
        print_json({"id": read.id, "file": str(file), "lines": lines})
        return
    following.show(file)


@app.command(epilog="Example: smalti fleet wait demo-1")
def wait(
    run: _Id,
    timeout: Annotated[float | None, typer.Option(metavar="SECONDS", help="Wait no longer; then exit with 3.")] = None,
    as_json: Json = False,
) -> None:
    """Wait until a run has ended, and exit with its exit code; with 143 if it was stopped before it was started."""
    from smalti.cli.fleet.follow import exit_code, until_ended
    from smalti.cli.tables import print_json

    ended = until_ended(run, timeout)
    if as_json:
        print_json(_values(ended.id)[0])
    else:
        print(f"{ended.id}: {ended.state} ({ended.cause})")
    raise typer.Exit(exit_code(ended))


@app.command(epilog="Example: smalti fleet stop demo-1 --yes")
def stop(run: _Id, yes: _Yes = False, as_json: Json = False) -> None:
    """Stop a run: a waiting one at once, a running one after it has saved. 'smalti fleet resume' continues it."""
    from smalti.base.errors import UserError
    from smalti.fleet.queue import changes, runs

    if not yes:
        read = runs.read(run)
        raise UserError(f"{read.id} is {read.state}", allowed="--yes", hint=f"smalti fleet stop {read.id} --yes")
    _print(changes.stop(run), as_json)


@app.command(epilog="Example: smalti fleet resume demo-1")
def resume(run: _Id, as_json: Json = False) -> None:
    """Queue a run again that has failed or was stopped; it continues from its newest checkpoint."""
    from smalti.fleet.queue import changes

    _print(changes.resume(run), as_json)


@app.command(epilog="Example: smalti fleet clone demo-1 name=demo-2 train.optimizer.lr=1e-3")
def clone(
    run: _Id, overrides: Overrides = None, after: _After = None, pack: _Pack = False, as_json: Json = False
) -> None:
    """Launch the recipe of a run again, with changes, from the same directory."""
    from smalti.cli.fleet.launch import clone as append

    _print(append(run, overrides or [], after=after or [], pack=pack), as_json)


@app.command(epilog="Example: smalti fleet update demo-1 priority=high")
def update(run: _Id, overrides: Overrides = None, as_json: Json = False) -> None:
    """Change priority, preemptible, max_duration or retries of a run that has not ended."""
    from smalti.cli.fleet.launch import updated
    from smalti.fleet.queue import changes, runs

    _print(changes.update(run, updated(runs.read(run), overrides or [])), as_json)


@app.command(epilog="Example: smalti fleet events demo-1 --json")
def events(run: _Id, as_json: Json = False) -> None:
    """List every change of a run's state, with its cause and who made it."""
    from smalti.base import database
    from smalti.cli.fleet.text import event_row
    from smalti.cli.tables import print_json, print_table
    from smalti.fleet.queue import runs

    _ensure()
    with database.transaction(write=False) as db:
        listed = runs.events(db, runs.get(db, run).number)
    if as_json:
        print_json(listed)
        return
    print_table(
        ("time", "state", "cause", "source", "attempt", "detail"), [event_row(event) for event in listed], empty="none"
    )


@app.command(epilog="Example: smalti fleet report")
def report(as_json: Json = False) -> None:
    """Sum up all runs: faults by cause with the time that they cost, how attempts ended, time trained and waited."""
    from smalti.cli.fleet.report import text, to_json
    from smalti.cli.tables import print_json
    from smalti.fleet import report as of_fleet

    _ensure()
    read = of_fleet.read()
    print_json(to_json(read)) if as_json else print(text(read))


@app.command(epilog="Example: smalti fleet controller")
def controller() -> None:
    """Run the queue's controller in the foreground; it ends when every run has.

    Every other command starts one in the background if it is needed, so this is for finding faults.
    """
    from smalti.fleet.controller.__main__ import main

    raise typer.Exit(main())


@app.command(epilog="Example: smalti fleet hold --host 0.0.0.0 --port 7390")
def hold(
    host: Annotated[str, typer.Option(help="Address at which runs on other nodes reach this one.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any that is free.")] = 7390,
) -> None:
    """Hold copies of runs of other nodes in the shared memory of this one, until Ctrl-C or SIGTERM.

    A run with train.checkpoint.peer_node=HOST:PORT sends its newest copy here, and fetches it when it is started again
    after its node was lost. Of each run the newest copy is held, until the run is done. Needs SMALTI_PEER_KEY, the same
    as the run has; what is sent is not encrypted, so the network between the nodes must be private.
    """
    from smalti.base import log
    from smalti.base.env import log_level
    from smalti.fleet.neighbour.holder import hold as holding

    log.setup(log_level())
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    with holding(host, port) as address:
        print(f"holding copies at {address}", flush=True)
        signal.pause()


@app.command(epilog="Example: smalti fleet join 10.0.0.1:7400")
def join(
    addresses: Annotated[
        list[str],
        typer.Argument(
            metavar="HOST:PORT", help="train.nodes.listen of the run, or of each node that may be its lead."
        ),
    ],
    name: Annotated[str | None, typer.Option(help="Name of this node; absent: its host name.")] = None,
    once: Annotated[bool, typer.Option("--once", help="End with the first run, with its exit code.")] = False,
) -> None:
    """Start, watch and end the ranks of this node for a run of several machines, until Ctrl-C or SIGTERM.

    'smalti train' with train.nodes on another node is the lead. It uses as many nodes as the run needs; others that
    join are spares. If the lead ends or is silent, the ranks of this node are killed, and it joins again when
    the same run, or another one, is started at one of the addresses. A stop lets the run save and continue without
    this node; a second one kills the ranks at once.

    Needs SMALTI_PEER_KEY, the same on all nodes: who has it can start commands here. What is sent is not encrypted, so
    the network between the nodes must be private. Ranks get the environment of this command.
    """
    import os

    from smalti.base import log
    from smalti.base.env import log_level
    from smalti.base.errors import UserError
    from smalti.config.nodes import ALLOWED, is_address
    from smalti.fleet.nodes import joined

    for address in addresses:
        if not is_address(address):
            raise UserError(f"'{address}' is not the address of a lead", allowed=ALLOWED, hint="10.0.0.1:7400")
    log.setup(log_level())
    raise typer.Exit(joined.join(addresses, name or os.uname().nodename, once=once))


@app.command(epilog="Example: smalti fleet check --save good-node.json")
def check(
    folder: Annotated[Path, typer.Option(help="Where runs are written: its disk is tested.")] = Path("."),
    save: Annotated[Path | None, typer.Option(help="Write the report of this node, a known good one.")] = None,
    against: Annotated[Path | None, typer.Option(help="Compare with the saved report of a known good node.")] = None,
    timeout: Annotated[float, typer.Option(metavar="SECONDS", min=1, help="Wait no longer for another node.")] = 60.0,
    cordon: Annotated[
        bool, typer.Option("--cordon", help="Cordon the nodes that are named, as 'smalti fleet cordon' describes.")
    ] = False,
    own: Annotated[
        bool, typer.Option("--own", help="Exit with 3 only where this node is named: for train.health.command.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Check a node before a run uses it: driver, versions, limits, disk, speed and values of matrix products.

    Several nodes check each other too, with one process on each: srun --ntasks-per-node=1 smalti fleet check, or with
    RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT set. They measure all-reduces between pairs and compare clocks, speeds
    and versions; the node that differs from the others is named. Exits with 3 where something is found.

    The first node records the result of each in its SMALTI_HOME: smalti fleet nodes.
    """
    from smalti.cli.fleet import check as checking
    from smalti.cli.tables import print_json

    result = checking.run(
        folder, save=save, against=against, timeout_s=timeout, report=lambda line: typer.echo(line, err=True)
    )
    for line in checking.record(result, cordon=cordon, is_compared=against is not None):
        typer.echo(line, err=True)
    if as_json:
        print_json(result)
    elif result["node"] == 0:
        print(checking.text(result))
    checking.raise_for(result, own=own)


app.command(name="nodes", epilog="Example: smalti fleet nodes --json")(nodes.nodes)
app.command(epilog="Example: smalti fleet cordon node7 --reason 'fan is loud' --until 2d")(nodes.cordon)
app.command(name="messages", epilog="Example: smalti fleet messages --test")(messages.messages)


def _ensure() -> None:
    from smalti.fleet.controller import start

    start.ensure()
    nodes.warn_if_cordoned()


def _values(reference: str | None = None) -> list[dict[str, Any]]:
    """Return the runs as JSON values, newest first; only the one with this id if there is one."""
    from smalti.base import database
    from smalti.fleet.queue import runs

    _ensure()
    with database.transaction(write=False) as db:
        selected = runs.select(db, "member_of IS NULL") if reference is None else [runs.get(db, reference)]
        return [_value(db, run) for run in reversed(selected)]


def _value(db: "sqlite3.Connection", run: "Run") -> dict[str, Any]:
    from smalti.cli.fleet.text import to_json
    from smalti.fleet.queue import runs

    value = to_json(run, runs.attempts(db, run.number), runs.needed_by(db, run.number))
    members = [_value(db, member) for member in runs.members_of(db, run.number)]
    return value | {"members": members} if run.member_of is None else value


def _print(run: Any, as_json: bool) -> None:
    from smalti.cli.tables import print_json

    _ensure()
    if as_json:
        print_json({"id": run.id, "name": run.name, "state": run.state, "cause": run.cause, "priority": run.priority})
    else:
        print(f"{run.id}: {run.state}")
