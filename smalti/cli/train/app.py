"""``smalti train``: started by a user it starts the ranks; started as a rank (RANK is set) it trains."""

import re
import signal
import sys
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from smalti.cli.options import Overrides, Recipe

if TYPE_CHECKING:
    from collections.abc import Mapping

    from smalti.config.fork import Fork
    from smalti.config.load import Loaded
    from smalti.config.run import RunConfig
    from smalti.distributed.group.mesh import Mesh
    from smalti.fleet.nodes.lead import Nodes
    from smalti.track.run import RunFolder
    from smalti.train.job import MakeEvaluate
    from smalti.train.loop import Evaluate

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command(epilog="Example: smalti train recipe.yaml train.optimizer.lr=3e-4 train.parallel.ranks=2 --dry-run")
def train(
    recipe: Recipe,
    overrides: Overrides = None,
    print_config: Annotated[
        bool, typer.Option("--print-config", help="Print the config with the origin of each value, and exit.")
    ] = False,
    fork: Annotated[
        bool,
        typer.Option("--fork", help="Continue from the newest checkpoint with other data, length or learning rate."),
    ] = False,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Check config, data and mesh, rehearse a step of one rank, print, and exit."),
    ] = False,
    trial: Annotated[
        int | None, typer.Option("--try", min=1, help="Train only this many steps, as a trial in runs/.try/NAME.")
    ] = None,
    gpu: Annotated[
        str | None, typer.Option(help="With --dry-run: plan for this device, a name of 'smalti plan hardware'.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="With --dry-run: print the rehearsal as JSON.")] = False,
) -> None:
    """Train a model. The same command again resumes from the newest checkpoint, on any number of ranks.

    Ctrl-C saves and exits (code 130), a second one exits at once. SIGTERM saves and exits (code 75).

    train.parallel.ranks processes are started on this machine, each with a log in the run's logs/attempt-N. For several
    machines use train.nodes and 'smalti fleet join' on the others; or torchrun or srun: each process that they start
    trains as one rank, and they handle the output.

    A run folder resumes in place, also when moved or copied; name= or folder= makes another run of its config. --try 2
    trains, evaluates and saves two steps of the run in a folder that the next trial replaces, without starting the run.

    --fork continues in the same folder with the weights of the run and changes what follows: sources, stages, sequence
    length, skips, duration, batch or learning rate. The changes are printed and recorded in the events of the run.

    --dry-run builds a run of any number of ranks in this process, without allocating tensors, and prints what a rank
    would hold and send. With --json, token files in an object store are not read.
    """
    from smalti.base.env import inside_world
    from smalti.cli.train import preflight, trials
    from smalti.cli.working_directory import enter, load_run

    _check_options(gpu, trial, as_json=as_json, dry_run=dry_run, print_config=print_config, fork=fork)
    if inside_world():  # until the loop handles it, Ctrl-C kills a rank; exit code 130 would mean "saved"
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    recipe, overrides = enter(recipe, overrides or [])
    loaded = trials.of(load_run(recipe, overrides, tokenize=not print_config), trial)
    if print_config:
        _print_config(loaded)
        return
    if inside_world() and not dry_run:
        raise typer.Exit(_as_rank(loaded, fork=fork, trial=trial))
    loaded, planned = _checked(loaded, fork=fork)
    if dry_run:
        ranks = loaded.config.train.parallel.ranks
        preflight.dry_run(loaded.config, ranks=ranks, fork=planned, gpu=gpu, as_json=as_json)
        return
    _warn(*preflight.check_machine(loaded.config))
    raise typer.Exit(_as_agent(loaded, ["train", recipe, *overrides], fork=planned, trial=trial))


def _print_config(loaded: "Loaded[RunConfig]") -> None:
    from smalti.config.show import show

    print(show(loaded), end="")
    if re.fullmatch(r"[\d.]+ep", loaded.config.train.duration):  # not 600step
        note = "the examples are not tokenized yet, so the number of their rows, and of steps, is not known"
        print(f"{note}; --dry-run tokenizes them", file=sys.stderr)


def _check_options(
    gpu: str | None, trial: int | None, *, as_json: bool, dry_run: bool, print_config: bool, fork: bool
) -> None:
    """Raise UserError for options that have no effect together."""
    from smalti.base.errors import UserError

    if (gpu is not None or as_json) and not dry_run:
        raise UserError(f"{'--json' if as_json else '--gpu'} is an option of --dry-run", hint="--dry-run")
    if print_config and fork:
        raise UserError("--print-config prints the recipe, which --fork does not change", hint="--fork --dry-run")
    other = "--fork" if fork else "--dry-run" if dry_run else "--print-config" if print_config else None
    if trial is not None and other is not None:
        raise UserError(f"--try trains from step 0, and {other} does not", hint=f"leave --try or {other} out")


def _checked(loaded: "Loaded[RunConfig]", *, fork: bool) -> "tuple[Loaded[RunConfig], Fork | None]":
    """Return the config with the launcher's ranks and the forks recorded in the run's folder, and the planned fork.

    Raises for problems that can be found before a process starts.
    """
    from smalti.base.env import inside_world, world
    from smalti.cli.train import preflight
    from smalti.track.run import RunFolder

    if inside_world():
        loaded = _of_world(loaded, world().world_size)
    planned = _planned_fork(loaded.config) if fork else None
    config = planned.after if planned else RunFolder(loaded.config.run_folder).with_history(loaded.config)
    preflight.check(config, ranks=config.train.parallel.ranks, fork=planned, origins=loaded.origins)
    return replace(loaded, config=config), planned


def _planned_fork(config: "RunConfig") -> "Fork | None":
    from smalti.data.stream.fork import plan_fork

    planned = plan_fork(config)
    if planned is None:
        print(f"{config.run_folder} is already forked this way; it resumes", file=sys.stderr)
    return planned


def _as_agent(loaded: "Loaded[RunConfig]", arguments: list[str], *, fork: "Fork | None", trial: int | None) -> int:
    """Wait for the other nodes of the run, if it has any, and run its attempts; returns the exit code."""
    from smalti.base import log
    from smalti.base.env import log_level
    from smalti.base.errors import ExitCode
    from smalti.cli.train import trials
    from smalti.cli.train.done import finished, report_done
    from smalti.fleet.agent.memory import memory_bytes
    from smalti.fleet.nodes import lead
    from smalti.track import trackers

    arguments = [*arguments, *trials.arguments(trial)]
    log.setup(log_level())
    config = loaded.config
    done = None if fork or trial else finished(config)
    if done is not None:
        trackers.complete(done)
        return report_done(done, config, None, trial=trial)
    ranks = config.train.parallel.ranks
    memory = memory_bytes(config)
    with lead.opened(config.train.nodes, ranks=ranks, run=config.run_folder, memory_bytes=memory) as nodes:
        if nodes is None:
            _warn(_idle_nodes())
        elif nodes.wait(ranks) is None:
            return int(ExitCode.RETRY)
        code = _run_attempts(loaded, arguments, nodes, fork=fork, trial=trial)
        if nodes is not None:
            nodes.end(code)
        return code


def _run_attempts(
    loaded: "Loaded[RunConfig]", arguments: list[str], nodes: "Nodes | None", *, fork: "Fork | None", trial: int | None
) -> int:
    """Open the run folder, run attempts until the run is done or may not continue, and report how each ended."""
    from smalti.base import clock
    from smalti.base.errors import ExitCode
    from smalti.cli.train import preflight
    from smalti.cli.train.done import report_done, trained_again
    from smalti.fleet import agent
    from smalti.fleet.agent.memory import peer_memory
    from smalti.fleet.neighbour.client import neighbour
    from smalti.track import trackers
    from smalti.track.attempts import record_failure
    from smalti.track.run import RunFolder

    started_s = clock.now_s()
    _warn(preflight.not_exportable(loaded.config), preflight.only_merged(loaded.config))
    parallel, tune = loaded.config.train.parallel, loaded.config.tune
    verb = ["train"] if tune is None or fork or trial else ["tune", tune.kind]  # how a user starts it
    argv = ["smalti", *verb, *arguments[1:], *(["--fork"] if fork else [])]
    folder = RunFolder.open(loaded.config, loaded.origins, argv=argv, fork=fork)
    resumes_done = _announce_start(folder, loaded.config, fork)

    def ended(outcome: agent.Outcome) -> None:
        agent.announce(outcome)
        trackers.complete(folder)

    def again(ranks: int) -> tuple[list[str], RunFolder]:
        nonlocal folder
        folder.close()
        following, overrides = _restarted(loaded, ranks)
        folder = RunFolder.open(following.config, following.origins, argv=argv[:-1] if fork else argv)  # already forked
        return [*command, *overrides], folder

    def fits(ranks: int) -> bool:
        return preflight.fits(loaded.config, ranks) and (nodes is None or nodes.divides(ranks))

    command = [sys.executable, "-m", "smalti", *arguments]
    try:
        with peer_memory(loaded.config) as memory, neighbour(loaded.config, folder, memory):
            memory = memory if nodes is None else nodes.use_memory(memory)
            outcome = agent.run(
                command, ranks=parallel.ranks, folder=folder, threads=parallel.threads, at_end=ended, again=again,
                restart=loaded.config.train.restart, fits=fits, limits=preflight.limits(loaded.config), memory=memory,
                health=loaded.config.train.health, nodes=nodes,
            )  # fmt: skip
    except Exception as error:
        record_failure(folder, error)
        raise
    finally:
        folder.close()
    if outcome.code == ExitCode.DONE:
        did_nothing = resumes_done and not trained_again(folder)
        report_done(folder, loaded.config, None if did_nothing else clock.now_s() - started_s, trial=trial)
    return int(outcome.code)


def _announce_start(folder: "RunFolder", config: "RunConfig", fork: "Fork | None") -> bool:
    """Print where the run starts; return whether all of its steps are done."""
    if fork:
        lines = [f"{folder.path}: forked at step {fork.at_step:,}", *fork.lines()]
        print("\n  ".join(lines), file=sys.stderr)
    before = folder.saved_step()
    is_done = before is not None and before >= config.length.total_steps
    where = " at step 0" if before is None else f" from step {before:,}"
    rest = ": all steps are done; only what follows the last one is left" if is_done else ""
    print(f"{folder.path}: starting {_count(config.train.parallel.ranks)}{where}{rest}", file=sys.stderr)
    return is_done


def _warn(*texts: str | None) -> None:
    for text in texts:
        if text is not None:
            print(f"warning: {text}", file=sys.stderr)


def _idle_nodes() -> str | None:
    """Return a warning where ranks are started on this node only although the Slurm job has more."""
    from smalti.base.env import nodes_left_out

    count = nodes_left_out()
    if not count:
        return None
    nodes = "1 other node" if count == 1 else f"{count} other nodes"
    return f"ranks are started on this node only; {nodes} of the Slurm job stay idle: 'srun smalti train' uses them all"


def _as_rank(loaded: "Loaded[RunConfig]", *, fork: bool, trial: int | None) -> int:
    """Train as one rank of the world that this process was started in."""
    from smalti.base import log
    from smalti.base.env import attempt_is_open, log_level, world
    from smalti.base.errors import Preempted
    from smalti.cli.main import to_log
    from smalti.cli.train.leave import log_and_exit, report_and_exit, write_stacks_on_signal
    from smalti.fleet.launch.local import LOST_PEER
    from smalti.track.progress import open_slot
    from smalti.track.run import RunFolder

    place = world()
    file = progress = None
    if attempt_is_open():
        config = loaded.config
        folder = RunFolder.join(config.run_folder, place.attempt)
        folder.require_identity(config)
        file = str(folder.rank_log(place.rank))
        write_stacks_on_signal(folder.log_folder(), place.rank)
        progress = open_slot(folder.log_folder(), place)  # before torch is imported, so that its time is seen
    else:
        loaded = _of_world(loaded, place.world_size)
        config = loaded.config
        if place.rank == 0:  # under another launcher no agent has printed it
            from smalti.cli.train import preflight

            _warn(preflight.not_exportable(config), preflight.only_merged(config))
            print(f"{config.run_folder}: joining {_count(place.world_size)} of {place.launcher}", file=sys.stderr)
    log.setup(log_level(), file=file, rank=place.rank)
    from smalti.distributed.group.lost import LostPeer
    from smalti.distributed.group.world import may_leave
    from smalti.evals.in_loop_suite import suite_hook
    from smalti.train import job

    try:
        job.run(
            config,
            loaded.origins,
            **_of_loss(config),
            tasks=suite_hook,
            fork=fork,
            trial_steps=trial,
            progress=progress,
        )
    except LostPeer as error:
        if attempt_is_open():  # the agent reports the rank that died, the cause of this error
            log_and_exit(error, LOST_PEER)
        report_and_exit(error)
    except Preempted as error:
        if not attempt_is_open():
            raise
        to_log(error)  # the agent reports it, or why the next attempt follows by itself
        return int(error.exit_code)
    except BaseException as error:
        if may_leave(error):
            raise
        report_and_exit(error)
    return 0


def _of_loss(config: "RunConfig") -> "dict[str, Any]":
    """Return the arguments of ``job.run`` for the loss of the config: ``evaluation`` and ``make_loss``."""
    from smalti.evals.in_loop import heldout_hook

    if config.tune is None or not config.tune.has_own_loss:
        return {"evaluation": partial(_evaluation, heldout_hook)}
    from smalti.tune.run import Tuning

    tuning = Tuning()
    return {"evaluation": partial(_evaluation, tuning.evaluation), "make_loss": tuning.loss}


def _evaluation(
    make: "MakeEvaluate", config: "RunConfig", indexes: "Mapping[str, bytes]", mesh: "Mesh"
) -> "Evaluate | None":
    """Return the result of ``make``. Rank 0 first warns of too many epochs if no agent has
    (``preflight.check_local_data``), because data is in a store or another launcher started the ranks."""
    from smalti.base import log
    from smalti.base.env import attempt_is_open, world
    from smalti.cli.plan.data import repeat_warnings
    from smalti.cli.train import preflight
    from smalti.data.stream.open import open_sources

    if world().rank == 0 and indexes and not (attempt_is_open() and preflight.data_is_local(config)):
        for line in repeat_warnings(config, open_sources(config.data, indexes).sources):
            log.get("data").warning("%s", line)
    return make(config, indexes, mesh)


def _of_world(loaded: "Loaded[RunConfig]", ranks: int) -> "Loaded[RunConfig]":
    """Return the config with the launcher's number of ranks, which is run and recorded."""
    from smalti.base.env import world
    from smalti.base.errors import UserError

    config = loaded.config
    place = world()
    if config.train.nodes is not None:
        raise UserError(
            f"train.nodes has no effect here: {place.launcher} has started the ranks",
            allowed="'smalti train' on one node and 'smalti fleet join' on the others, or another launcher",
            hint="train.nodes=null",
        )
    wanted = config.train.parallel.ranks
    if wanted == ranks:
        return loaded
    if place.is_first and "train.parallel.ranks" in loaded.origins:
        print(
            f"warning: {place.launcher} has started {_count(ranks)}, the recipe says train.parallel.ranks={wanted}; "
            "the launcher's number is used",
            file=sys.stderr,
        )
    return _with_ranks(loaded, ranks, by=place.launcher)


def _with_ranks(loaded: "Loaded[RunConfig]", ranks: int, by: str = "train.restart.min_ranks") -> "Loaded[RunConfig]":
    """Return the config with so many ranks, whose origin is ``by``; unchanged if it has them."""
    config = loaded.config
    if config.train.parallel.ranks == ranks:
        return loaded
    parallel = config.train.parallel.model_copy(update={"ranks": ranks})
    train = config.train.model_copy(update={"parallel": parallel})
    origins = {**loaded.origins, "train.parallel.ranks": by}
    return replace(loaded, config=config.model_copy(update={"train": train}), origins=origins)


def _restarted(loaded: "Loaded[RunConfig]", ranks: int) -> "tuple[Loaded[RunConfig], list[str]]":
    """Return the config of an attempt on so many ranks, without faults of ranks that it lacks; and its overrides."""
    import json

    config, overrides = loaded.config, []
    if ranks != config.train.parallel.ranks:
        overrides.append(f"train.parallel.ranks={ranks}")
    chaos = config.chaos and config.chaos.without_ranks_from(ranks)
    if chaos is not None and chaos != config.chaos:
        faults = [fault.model_dump(mode="json", exclude_none=True) for fault in chaos.faults]
        overrides.append(f"chaos.faults={json.dumps(faults)}")
    following = replace(loaded, config=config.model_copy(update={"chaos": chaos}))
    return _with_ranks(following, ranks), overrides


def _count(ranks: int) -> str:
    return f"{ranks} {'rank' if ranks == 1 else 'ranks'}"
