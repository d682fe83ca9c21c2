"""Prepares a run for the queue: resolves the recipe, computes what it needs, and refuses what cannot run."""

import os
import secrets
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from smalti.base.errors import DataError, UserError

if TYPE_CHECKING:
    from smalti.config.clusters import ClusterConfig
    from smalti.config.launch import LaunchConfig
    from smalti.config.nodes import NodesConfig
    from smalti.config.parallel import ParallelConfig
    from smalti.config.run import RunConfig
    from smalti.config.tune import TuneRecipe
    from smalti.fleet.queue.runs import Run
    from smalti.fleet.queue.schedule import Room

_PLANNED = {
    "kubernetes": "start a pod that runs smalti train RECIPE",
}
"""Engines that are planned, with what to do today."""


@dataclass(frozen=True)
class Target:
    """A cluster, with its name."""

    name: str
    cluster: "ClusterConfig"


def target_of(name: str, file: str | None = None) -> Target:
    """Return the cluster of a name, from ``clusters.yaml`` in ``SMALTI_HOME`` or another file.

    Raises UserError for a cluster that does not exist, or whose engine is not built yet.
    """
    from smalti.fleet.clusters import clusters, clusters_file

    listed = clusters(file)
    if name in listed:
        return Target(name, listed[name])
    if name in _PLANNED:
        raise UserError(
            f"--on {name}: this engine is not implemented yet", allowed=", ".join(listed), hint=_PLANNED[name]
        )
    hint = f"list it in {file or clusters_file()}: 'clusters: {{{name}: {{engine: slurm}}}}'; or --on local"
    raise UserError(f"--on {name}: there is no cluster of this name", allowed=", ".join(listed), hint=hint)


def with_sections(overrides: Sequence[str]) -> list[str]:
    """Return overrides with short names completed: ``priority=low`` is ``launch.priority=low``, ``ranks=2`` is
    ``train.parallel.ranks=2``."""
    from smalti.config.launch import LaunchConfig

    completed = []
    for override in overrides:
        key = override.partition("=")[0]
        section = "launch." if key in LaunchConfig.model_fields else "train.parallel." if key == "ranks" else ""
        completed.append(section + override)
    return completed


def _with_address(overrides: Sequence[str], on: Target) -> list[str]:
    """Return overrides with the address of a run on several hosts of ssh, whose host is known when it is started."""
    is_new = on.cluster.engine == "ssh" and any(each.startswith("train.nodes.count=") for each in overrides)
    return [*overrides, f"train.nodes.listen='{{host}}:{20000 + secrets.randbelow(10000)}'"] if is_new else [*overrides]


def launch(
    recipe: str,
    overrides: Sequence[str],
    *,
    on: Target,
    after: Sequence[str] = (),
    pack: bool = False,
    add: bool = True,
) -> "Run | RunConfig | TuneRecipe":
    """Check a run, and append it to the queue of this machine unless ``add`` is false: then its config is returned.

    What is queued of a recipe with a section ``tune`` is that recipe: its examples are tokenized now, and found again
    when it starts. If it tunes the model of a run that it depends on, they are tokenized when it starts.
    """
    from smalti.cli.train import preflight
    from smalti.cli.working_directory import enter, load_run
    from smalti.config.load import dump

    recipe, overrides = enter(recipe, _with_address(with_sections(overrides), on))
    tuning = _tune_recipe(recipe, overrides)
    if tuning is not None and _is_awaited(tuning.init_from, _settings(tuning, after).depends_on):
        tuning = placed(tuning, _settings(tuning, after))
        need = room_for(parallel_of(tuning), _settings(tuning, ()), on, nodes_of(tuning))
        return _add(tuning, need, dump(tuning), on=on, pack=pack) if add else tuning
    config = load_run(recipe, overrides).config
    config = placed(config, _settings(config, after))
    need = room_for(config.train.parallel, _settings(config, ()), on, nodes_of(config))
    preflight.check(config, ranks=config.train.parallel.ranks)
    if not add:
        return config
    queued = config if tuning is None else placed(tuning, _settings(tuning, after))
    return _add(queued, need, dump(queued), on=on, pack=pack)


def launch_sweep(
    recipe: str,
    overrides: Sequence[str],
    sweeps: Sequence[str],
    *,
    on: Target,
    after: Sequence[str] = (),
    pack: bool = False,
    add: bool = True,
) -> list[dict[str, Any]]:
    """Check a run for each combination of values, then append them all to the queue, unless ``add`` is false.

    Returns of each its name and values, and if it was queued its id, state and folder.
    """
    from smalti.cli.fleet.sweep import combinations, name_of

    options = [each for each in overrides if not each.startswith("name=")]
    named = [each.removeprefix("name=") for each in overrides if each.startswith("name=")]
    runs: list[tuple[str, tuple[str, ...]]] = []
    for values in combinations(sweeps):
        checked: Any = launch(recipe, [*overrides, *values], on=on, after=after, pack=pack, add=False)
        runs.append((name_of((named or [checked.name])[-1], values), values))
    twice = next((name for name, _ in runs if [other for other, _ in runs].count(name) > 1), None)
    if twice is not None:
        raise UserError(f"two runs of the sweep would be named '{twice}'", hint="launch them by themselves, with name=")
    rows: list[dict[str, Any]] = []
    for name, values in runs:
        row: dict[str, Any] = {"name": name, "values": list(values)}
        if add:
            run: Any = launch(recipe, [*options, *values, f"name={name}"], on=on, after=after, pack=pack)
            row |= {"id": run.id, "state": run.state, "folder": run.folder}
        rows.append(row)
    return rows


C = TypeVar("C", "RunConfig", "TuneRecipe")


def placed(config: C, settings: "LaunchConfig") -> C:
    """Return a config with these settings, and with a rank for each GPU that they name."""
    update: dict[str, Any] = {"launch": settings}
    if settings.gpus is not None and isinstance(config.train, dict):
        update["train"] = {**config.train, "parallel": {**(config.train.get("parallel") or {}), "ranks": settings.gpus}}
    elif settings.gpus is not None:
        parallel = parallel_of(config).model_copy(update={"ranks": settings.gpus})
        update["train"] = config.train.model_copy(update={"parallel": parallel})
    return config.model_copy(update=update)


def parallel_of(config: "RunConfig | TuneRecipe") -> "ParallelConfig":
    """Return the section ``train.parallel``, with its defaults."""
    from smalti.config.parallel import ParallelConfig

    if isinstance(config.train, dict):
        return ParallelConfig.model_validate(config.train.get("parallel") or {})
    return config.train.parallel


def nodes_of(config: "RunConfig | TuneRecipe") -> "NodesConfig | None":
    """Return the section ``train.nodes``."""
    from smalti.config.nodes import NodesConfig

    if isinstance(config.train, dict):
        nodes = config.train.get("nodes")
        return None if nodes is None else NodesConfig.model_validate(nodes)
    return config.train.nodes


def _tune_recipe(recipe: str, overrides: Sequence[str]) -> "TuneRecipe | None":
    from smalti.config.load import load
    from smalti.config.tune import TuneRecipe

    try:
        return load(TuneRecipe, recipe, overrides).config
    except UserError:  # loaded as the recipe of a run it has the better message
        return None


def _is_awaited(model: str, depends_on: Sequence[str]) -> bool:
    """Return whether a run that is not completed yet, and is waited for, has yet to write this model."""
    from smalti.base import database
    from smalti.fleet.queue import runs

    path = Path(os.path.abspath(model))
    if path.exists():
        return False
    with database.transaction(write=False) as db:
        awaited = [runs.get(db, reference) for reference in depends_on]
    return any(path.is_relative_to(run.folder) for run in awaited if run.folder is not None and not run.is_ended)


def _settings(config: "RunConfig | TuneRecipe", after: Sequence[str]) -> "LaunchConfig":
    from smalti.config.launch import LaunchConfig

    settings = config.launch or LaunchConfig()
    return settings.model_copy(update={"depends_on": (*settings.depends_on, *after)})


def room_for(
    parallel: "ParallelConfig", settings: "LaunchConfig", on: Target, nodes: "NodesConfig | None" = None
) -> "Room":
    """Return the cores or GPUs that a run holds on each of its nodes. Raises UserError where this machine has
    less, or the cluster has fewer hosts.

    On GPUs one for each rank; else ranks x train.parallel.threads cores, with ``threads: auto`` all cores of this
    machine, or of a host of ssh; one for each rank in Slurm.
    """
    from smalti.fleet.controller.__main__ import this_room
    from smalti.fleet.queue.schedule import Room

    machine, where, count = this_room(), "this machine", 1 if nodes is None else nodes.count
    if on.cluster.engine == "ssh":
        machine, where = Room(on.cluster.cores_per_host or 0, on.cluster.gpus_per_host or 0), f"each host of {on.name}"
    if settings.gpus is not None and parallel.device == "cpu":
        raise UserError(
            f"launch.gpus={settings.gpus} with train.parallel.device=cpu",
            allowed="one of them",
            hint=f"ranks={settings.gpus}",
        )
    if on.cluster.engine == "slurm":
        if settings.gpus is not None or parallel.device == "cuda":
            return Room(gpus=parallel.ranks)
        return Room(cores=parallel.ranks * (1 if parallel.threads == "auto" else parallel.threads))
    if on.cluster.engine == "ssh" and count > len(on.cluster.hosts):
        raise UserError(
            f"train.nodes.count={count}, and {on.name} has {len(on.cluster.hosts)} hosts",
            allowed=f"up to {len(on.cluster.hosts)}",
            hint=f"train.nodes.count={len(on.cluster.hosts)}",
        )
    ranks = parallel.ranks // count
    on_gpus = settings.gpus is not None or parallel.device == "cuda" or (parallel.device == "auto" and machine.gpus > 0)
    threads = machine.cores // max(1, ranks) if parallel.threads == "auto" else parallel.threads
    need = Room(gpus=ranks) if on_gpus else Room(cores=ranks * max(1, threads))
    if machine.holds(need):
        return need
    has, wants = (machine.gpus, need.gpus) if on_gpus else (machine.cores, need.cores)
    unit = "GPUs" if on_gpus else "cores"
    raise UserError(
        f"the run needs {wants} {unit}{'' if count == 1 else ' on each host'}, and {where} has {has}",
        allowed=f"up to {has} {unit}",
        hint="ranks=2 train.parallel.threads=1 takes two cores" if has == 0 or not on_gpus else f"gpus={has}",
    )


def _add(config: "RunConfig | TuneRecipe", need: "Room", recipe: str, *, on: Target, pack: bool) -> "Run":
    import smalti
    from smalti.fleet.controller import start
    from smalti.fleet.launch import slurm
    from smalti.fleet.launch.code import code_of
    from smalti.fleet.queue import changes, runs

    if not Path(os.getcwd()).is_dir():
        raise DataError("the current directory was deleted", hint="cd to the directory of the recipe's data")
    command = [sys.executable, "-m", "smalti", "train", "{recipe}"]
    if on.cluster.engine == "slurm":
        command = slurm.command_of(
            on.cluster, command, ranks=parallel_of(config).ranks, cores=need.cores, gpus=need.gpus
        )
    hosts, joining, nodes = None, [], nodes_of(config) if on.cluster.engine == "ssh" else None
    if nodes is not None:
        port = nodes.listen.rpartition(":")[2]
        joining = [*command[:-2], "fleet", "join", f"{{lead}}:{port}", "--once", "--name", "{host}"]
        command.append(f"train.nodes.listen={{host}}:{port}")
    if on.cluster.engine == "ssh":
        room = (on.cluster.cores_per_host or 0, on.cluster.gpus_per_host or 0)
        hosts = runs.Hosts(on.cluster.hosts, *room, on.cluster.options)
    run = changes.add(
        config.name,
        command,
        _settings(config, ()),
        need,
        directory=os.getcwd(),
        folder=os.path.abspath(config.folder or f"runs/{config.name}"),
        recipe=recipe,
        code=code_of(Path(smalti.__file__).parent, runs.place() / "code", pack=pack),
        cluster=on.name,
        engine=on.cluster.engine,
        hosts=hosts,
        members=0 if nodes is None else nodes.count - 1,
        member_command=joining,
    )
    start.ensure()
    return run


def clone(reference: str, overrides: Sequence[str], *, after: Sequence[str] = (), pack: bool = False) -> "Run":
    """Launch the recipe of a run again, with changes, from the directory that it was launched in."""
    import tempfile

    from smalti.fleet.queue import runs

    source = runs.read(reference)
    on = target_of(source.cluster)
    if source.recipe is None:
        raise UserError(f"{source.id} has no recipe", hint="smalti fleet launch RECIPE")
    if not os.path.isdir(source.directory):
        raise DataError(
            f"{source.directory}, where {source.id} was launched, does not exist", hint="smalti fleet launch RECIPE"
        )
    with tempfile.NamedTemporaryFile("w", suffix=".yaml", encoding="utf-8") as file:
        file.write(source.recipe)
        file.flush()
        os.chdir(source.directory)
        launched = launch(
            file.name, [*_of_the_folder(source.name, overrides), *overrides], on=on, after=after, pack=pack
        )
    from smalti.fleet.queue.runs import Run

    assert isinstance(launched, Run)
    return launched


def _of_the_folder(name: str, overrides: Sequence[str]) -> list[str]:
    """Return the override that leaves a stated folder to the source, where the clone has another name."""
    keys = {override.partition("=")[0] for override in overrides}
    return ["folder=null"] if "name" in keys and "folder" not in keys else []


def updated(run: "Run", overrides: Sequence[str]) -> "LaunchConfig":
    """Return the settings of a launched run with changes."""
    from smalti.config.launch import LaunchConfig
    from smalti.config.load import from_dict

    allowed = ("priority", "preemptible", "max_duration", "retries", "retries_by_cause")
    short = [override.removeprefix("launch.") for override in overrides]
    for override in short:
        key = override.partition("=")[0]
        if key.partition(".")[0] not in allowed:
            raise UserError(
                f"'{key}' of a launched run cannot change",
                allowed=", ".join(allowed),
                hint=f"smalti fleet clone {run.id} name=NEW_NAME {override}",
            )
    before = {
        "priority": run.priority,
        "preemptible": run.preemptible,
        "max_duration": None if run.max_duration_s is None else f"{run.max_duration_s:g}s",
        "retries": run.retries,
        "retries_by_cause": run.retries_by_cause,
    }
    return from_dict(LaunchConfig, before, run.id, short).config
