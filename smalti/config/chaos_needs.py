"""What a fault of ``chaos`` needs of the run and of this machine, so that one without an effect is not begun."""

import os
from pathlib import Path

from smalti.base import store
from smalti.base.errors import UserError
from smalti.config.chaos import FaultConfig
from smalti.config.run import JobConfig, RunConfig

_ROOT = ("read_only_disk", "half_open_tcp", "cut_line")
_AGENT = ("agent_death", "store_death")


def require_possible(config: JobConfig, *, by_agent: bool, one_machine: bool) -> None:
    """Raise UserError for a fault of the list that cannot be injected, or could have no effect.

    The mix has none of them. by_agent: Smalti's agent starts the ranks. one_machine: all ranks are on this machine.
    """
    for fault in config.chaos.faults if config.chaos is not None else ():
        problem = _problem(fault, config, by_agent=by_agent, one_machine=one_machine)
        if problem is not None:
            reason, hint = problem
            raise UserError(
                f"chaos: {fault.kind} cannot be injected: {reason}",
                allowed="the faults of docs/guides/faults.md whose needs this run and this machine meet",
                hint=hint,
            )


def _problem(fault: FaultConfig, config: JobConfig, *, by_agent: bool, one_machine: bool) -> tuple[str, str] | None:
    """Return why not, and a hint; None where it can be injected."""
    kind = fault.kind
    if kind in _AGENT and not by_agent:
        return "the ranks were not started by Smalti's agent", "start them with 'smalti train' itself"
    if kind in _ROOT and os.geteuid() != 0:
        return "it needs root", f"run it as root, or take {kind} out of chaos.faults"
    if kind == "cut_line" and not _in_named_network():
        reason = "this process is in no network namespace of 'ip netns', so the whole machine would lose its network"
        return reason, "ip netns exec NAME ..."
    if kind == "cut_line" and one_machine and not _uses_store(config):
        reason = "all ranks are on one machine and the run uses no object store, so there is no line to cut"
        return reason, "half_open_tcp or deadlock, or torchrun on several nodes"
    if kind == "store_503":
        save_to = config.train.checkpoint.save_to
        if save_to is None or store.is_local(save_to):
            reason = "the run copies no checkpoint to an object store (train.checkpoint.save_to)"
            return reason, "train.checkpoint.save_to=s3://BUCKET/FOLDER"
        if fault.rank != 0:
            return f"rank {fault.rank} sends no requests: rank 0 alone copies checkpoints", "rank=0"
    return None


def _in_named_network() -> bool:
    named = Path("/run/netns")
    return named.is_dir() and any(each.samefile("/proc/self/ns/net") for each in named.iterdir())


def _uses_store(config: JobConfig) -> bool:
    paths = [config.train.checkpoint.save_to]
    if isinstance(config, RunConfig):
        paths += config.data.heldout.values()
        paths += [path for source in config.data.sources.values() for path in (source.path, *source.mirrors)]
    return any(path is not None and not store.is_local(path) for path in paths)
