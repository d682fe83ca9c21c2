"""Step time of ranks that share one machine: their work, and their communication through its memory.

Collectives (``cost/layout/collectives.py``) run one after another at the measured latency and rate of an all-reduce
between two processes: gloo has one thread, and the ranks wait for most of them.
"""

from dataclasses import replace

from smalti.config.hardware import Hardware
from smalti.config.run import RunConfig
from smalti.cost.layout.collectives import collectives
from smalti.cost.step_time.step import PartTime, StepTime, step_time


def single_machine_step_time(config: RunConfig, machine: Hardware, *, batch_tokens: int, seq_len: int) -> StepTime:
    """Return the time of a step of the config's ranks; on a measured CPU with a part ``network``."""
    compute = step_time(config, machine, batch_tokens=batch_tokens, seq_len=seq_len)
    measured = machine.measured.collective if machine.measured else None
    calls = collectives(config, batch=(batch_tokens, seq_len))
    if measured is None or not calls or machine.kind != "cpu":
        return compute
    # An all-reduce is a reduce-scatter and an all-gather: each takes half of its time.
    through_s = (
        sum(collective.total_bytes * (1 if collective.op == "all_reduce" else 0.5) for collective in calls)
        / measured.bytes_per_s
    )
    moved, n_calls = sum(collective.total_bytes for collective in calls), sum(collective.count for collective in calls)
    network = PartTime("network", 0, moved, n_calls, n_calls * measured.latency_s + through_s, "network")
    return replace(compute, parts=(*compute.parts, network))
