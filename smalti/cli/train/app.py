"""``smalti train``: as a person's command it starts the ranks, as a rank (RANK is set) it trains."""

import signal
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from collections.abc import Mapping

    from smalti.config.fork import Fork
    from smalti.config.load import Loaded
    from smalti.config.run import RunConfig
    from smalti.distributed.parallel.mesh import Mesh
    from smalti.track.run import RunFolder
    from smalti.train.loop import Evaluate

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command(epilog="Example: smalti train recipe.yaml train.optimizer.lr=3e-4 train.parallel.ranks=2 --dry-run")
def train(
    recipe: Annotated[str, typer.Argument(metavar="RECIPE", help="A .yaml file, a run folder, or a recipe's name.")],
    overrides: Annotated[list[str] | None, typer.Argument(metavar="A.B=VALUE", help="Changes to the recipe.")] = None,
    print_config: Annotated[
        bool, typer.Option("--print-config", help="Print the config with where each value came from; start nothing.")
    ] = False,
    fork: Annotated[
        bool, typer.Option("--fork", help="Go on from the newest checkpoint with another future: data, length, rate.")
    ] = False,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Check config, data and mesh, rehearse a step of a rank, print; start nothing."),
    ] = False,
    trial: Annotated[
        int | None, typer.Option("--try", min=1, help="Train so many first steps, as a trial in runs/.try/NAME.")
    ] = None,
    gpu: Annotated[
        str | None, typer.Option(help="With --dry-run: for ranks on this device, a name of 'smalti plan hardware'.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="With --dry-run: print what was rehearsed as JSON.")] = False,
) -> None:
    """Train a model. The same command again resumes from the newest checkpoint, on any number of ranks.

    Ctrl-C saves and leaves (exit 130), a second one leaves at once. SIGTERM saves and leaves (exit 75).

    train.parallel.ranks processes are started on this machine, with a log of each in the run's logs/attempt-N. Several
    machines are started by torchrun or srun: the world that they made is joined, its number of ranks counts, not the
    recipe's, and what the ranks print goes where the launcher sends it.

    A run folder goes on where it is, also moved or copied; name= or folder= makes another run of its config. --try 2
    trains two steps as the run would, measures and saves, in a folder that the next trial replaces; no run begins.

    --fork keeps what the run has learned, in the same folder, and changes what comes next: sources, stages, sequence
    length, skips, duration, batch or learning rate. The changes are printed, and kept in the events of the run.

    --dry-run builds the run of any number of ranks in this process, without a tensor, and tells what a rank would hold
    and send. With --json token files in an object store are not asked for.
    """
    from smalti.base.env import inside_world
    from smalti.cli.train import preflight, trials
    from smalti.cli.working_directory import enter, load_run
    from smalti.config.show import show

    _check_options(gpu, trial, as_json=as_json, dry_run=dry_run, print_config=print_config, fork=fork)
    if inside_world():  # until the loop listens, Ctrl-C ends a rank by the signal, not by 130, which means "saved"
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    recipe, overrides = enter(recipe, overrides or [])
    loaded = trials.of(load_run(recipe, overrides), trial)
    if print_config:
        print(show(loaded), end="")
        return
    if inside_world() and not dry_run:
        raise typer.Exit(_as_rank(loaded, fork=fork, trial=trial))
    loaded, planned = _checked(loaded, fork=fork)
    if dry_run:
        ranks = loaded.config.train.parallel.ranks
        preflight.dry_run(loaded.config, ranks=ranks, fork=planned, gpu=gpu, as_json=as_json)
        return
    _warn(*preflight.check_here(loaded.config))
    raise typer.Exit(_as_agent(loaded, ["train", recipe, *overrides, *trials.arguments(trial)], fork=planned))


def _check_options(
    gpu: str | None, trial: int | None, *, as_json: bool, dry_run: bool, print_config: bool, fork: bool
) -> None:
    """UserError for options that have no effect together."""
    from smalti.base.errors import UserError

    if (gpu is not None or as_json) and not dry_run:
        raise UserError(f"{'--json' if as_json else '--gpu'} is for what --dry-run prints", hint="--dry-run")
    if print_config and fork:
        raise UserError("--print-config prints the recipe, which --fork does not change", hint="--fork --dry-run")
    other = "--fork" if fork else "--dry-run" if dry_run else "--print-config" if print_config else None
    if trial is not None and other is not None:
        raise UserError(f"--try trains from step 0, and {other} does not", hint=f"leave --try or {other} out")


def _checked(loaded: "Loaded[RunConfig]", *, fork: bool) -> "tuple[Loaded[RunConfig], Fork | None]":
    """The config with the launcher's ranks and what the run's folder knows of earlier futures, and the new one; raises
    for what can be known to be wrong with it before a process starts."""
    from smalti.base.env import inside_world, world
    from smalti.cli.train import preflight
    from smalti.track.run import RunFolder

    if inside_world():
        loaded = _of_world(loaded, world().world_size)
    planned = _planned_fork(loaded.config) if fork else None
    config = planned.after if planned else RunFolder(loaded.config.run_folder).with_history(loaded.config)
    preflight.check(config, ranks=config.train.parallel.ranks, fork=planned)
    return replace(loaded, config=config), planned


def _planned_fork(config: "RunConfig") -> "Fork | None":
    from smalti.data.stream.fork import plan_fork

    planned = plan_fork(config)
    if planned is None:
        print(f"{config.run_folder} has this future already; it goes on", file=sys.stderr)
    return planned


def _as_agent(loaded: "Loaded[RunConfig]", arguments: list[str], *, fork: "Fork | None") -> int:
    """Open the run folder, run one attempt, say how it ended."""
    from smalti.base import clock, log
    from smalti.base.env import log_level
    from smalti.base.errors import ExitCode
    from smalti.cli.train import preflight
    from smalti.fleet import agent
    from smalti.track import trackers
    from smalti.track.run import RunFolder

    log.setup(log_level())
    _warn(_left_out())
    started_s, why_not = clock.now_s(), preflight.not_exportable(loaded.config)
    _warn(why_not)
    parallel = loaded.config.train.parallel
    argv = ["smalti", *arguments, *(["--fork"] if fork else [])]
    folder = RunFolder.open(loaded.config, loaded.origins, argv=argv, fork=fork)

    if fork:
        lines = [f"{folder.path}: another future from step {fork.at_step:,} on", *fork.lines()]
        print("\n  ".join(lines), file=sys.stderr)

    before = folder.saved_step()
    finished = before is not None and before >= loaded.config.length.total_steps
    count = _count(parallel.ranks)
    where = " at step 0" if before is None else f" from step {before:,}"
    rest = ": all steps are done, only the last checkpoint is verified" if finished else ""
    print(f"{folder.path}: starting {count}{where}{rest}", file=sys.stderr)

    def ended(outcome: agent.Outcome) -> None:
        agent.announce(outcome)
        trackers.complete(folder)

    def again() -> RunFolder:
        nonlocal folder
        folder.close()
        folder = RunFolder.open(loaded.config, loaded.origins, argv=argv[: len(arguments) + 1])  # it is forked already
        return folder

    try:
        command = [sys.executable, "-m", "smalti", *arguments]
        outcome = agent.run(
            command, ranks=parallel.ranks, folder=folder, threads=parallel.threads, at_end=ended, again=again
        )
    finally:
        folder.close()
    if outcome.code == ExitCode.DONE:
        seconds = None if finished else clock.now_s() - started_s
        print(_done_text(folder, seconds, exportable=why_not is None), file=sys.stderr)
        _warn_of_worse(folder)
        if loaded.config.init_from is not None:
            _show_continued(folder)
    return int(outcome.code)


def _warn_of_worse(folder: "RunFolder") -> None:
    """Held-out sets that a stage has made worse."""
    from smalti.track.report.read import read_run
    from smalti.track.report.worse import worse_in_stages

    for one in worse_in_stages(read_run(folder.path)):
        _warn(one.words())


def _show_continued(folder: "RunFolder") -> None:
    """What the run has made of the model that it began with."""
    from smalti.cli.tables import table
    from smalti.track.report.continued import HEAD, continued
    from smalti.track.report.read import read_run

    found = continued(read_run(folder.path))
    if found is not None:
        print(f"\n{found.title()}\n{table(HEAD, found.words())}", file=sys.stderr)


def _warn(*texts: str | None) -> None:
    for text in texts:
        if text is not None:
            print(f"warning: {text}", file=sys.stderr)


def _left_out() -> str | None:
    """That ranks are started here alone, although Slurm has given more nodes."""
    from smalti.base.env import nodes_left_out

    count = nodes_left_out()
    if not count:
        return None
    nodes = "1 other node" if count == 1 else f"{count} other nodes"
    return (
        f"this starts ranks on this node alone; {nodes} of the Slurm job stay idle: 'srun smalti train' uses them all"
    )


def _done_text(folder: "RunFolder", seconds: float | None, *, exportable: bool) -> str:
    """``runs/x: done, 40 steps in 2m03s; next: ...``; the time is that of this attempt, None: it had nothing to do."""
    from smalti.base.units import format_seconds

    rows = folder.metrics()
    steps = int(rows[-1]["step"]) if rows else folder.saved_step() or 0
    text = f"{folder.path}: done, {steps} {'step' if steps == 1 else 'steps'}"
    text += " (it was finished already)" if seconds is None else f" in {format_seconds(seconds)}"
    resumed = f" (attempt {folder.attempt})" if folder.attempt else ""
    return text + resumed + (f"; next: smalti export {folder.path}" if exportable else "")


def _as_rank(loaded: "Loaded[RunConfig]", *, fork: bool, trial: int | None) -> int:
    """Train as one rank of the world that this process was started in."""
    from smalti.base import log
    from smalti.base.env import attempt_is_open, log_level, world
    from smalti.cli.main import leave_at_once
    from smalti.fleet.launch.local import LOST_PEER
    from smalti.track.run import RunFolder

    place, file = world(), None
    if attempt_is_open():
        config = loaded.config
        folder = RunFolder.join(config.run_folder, place.attempt)
        folder.require_identity(config)
        file = str(folder.rank_log(place.rank))
    else:
        loaded = _of_world(loaded, place.world_size)
        config = loaded.config
        if place.rank == 0:  # of a foreign launcher: no agent has said it
            from smalti.cli.train import preflight

            _warn(preflight.not_exportable(config))
            print(f"{config.run_folder}: joining {_count(place.world_size)} of {place.launcher}", file=sys.stderr)
    log.setup(log_level(), file=file, rank=place.rank)
    from smalti.distributed.group.lost import LostPeer
    from smalti.distributed.group.world import may_leave
    from smalti.train import job

    try:
        job.run(config, loaded.origins, evaluation=_evaluation, fork=fork, trial_steps=trial)
    except LostPeer as error:
        # The agent has seen who died, and says so: under it this rank is only a consequence.
        leave_at_once(error, LOST_PEER if attempt_is_open() else None)
    except BaseException as error:
        if may_leave(error):
            raise
        leave_at_once(error)
    return 0


def _evaluation(
    config: "RunConfig", indexes: "Mapping[str, bytes] | None" = None, mesh: "Mesh | None" = None
) -> "Evaluate | None":
    """``heldout_hook``; and of data that no agent has looked at before (``preflight.check_data_here``), because it is
    in a store or a launcher started the ranks, rank 0 warns now that it is open."""
    from smalti.base import log
    from smalti.base.env import attempt_is_open, world
    from smalti.cli.plan.data import repeat_warnings
    from smalti.cli.train import preflight
    from smalti.data.stream.opening import open_sources
    from smalti.evals.in_loop import heldout_hook

    if world().rank == 0 and indexes and not (attempt_is_open() and preflight.lies_here(config)):
        for line in repeat_warnings(config, open_sources(config.data, indexes).sources):
            log.get("data").warning("%s", line)
    return heldout_hook(config, indexes, mesh)


def _of_world(loaded: "Loaded[RunConfig]", ranks: int) -> "Loaded[RunConfig]":
    """The config with the number of ranks that a launcher has made: that is what is run, and put on record."""
    from smalti.base.env import world

    config, place = loaded.config, world()
    wanted = config.train.parallel.ranks
    if wanted == ranks:
        return loaded
    if place.is_first and "train.parallel.ranks" in loaded.origins:
        print(
            f"warning: {place.launcher} has started {_count(ranks)}, the recipe says train.parallel.ranks={wanted}; "
            f"{ranks} it is: with a launcher, the launcher's number counts",
            file=sys.stderr,
        )
    parallel = config.train.parallel.model_copy(update={"ranks": ranks})
    train = config.train.model_copy(update={"parallel": parallel})
    origins = {**loaded.origins, "train.parallel.ranks": place.launcher}
    return replace(loaded, config=config.model_copy(update={"train": train}), origins=origins)


def _count(ranks: int) -> str:
    return f"{ranks} {'rank' if ranks == 1 else 'ranks'}"
