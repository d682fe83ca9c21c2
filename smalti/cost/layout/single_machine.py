"""The step of ranks that share one machine: their work, and what they send each other through its memory.

Promises: the collectives are those of ``cost/layout/collectives.py``, one after another at the measured latency and
rate of an all-reduce between two processes; gloo has one thread, and the work waits for most of them.
"""

from dataclasses import replace

from smalti.config.hardware import Hardware
from smalti.config.run import RunConfig
from smalti.cost.layout.collectives import collectives
from smalti.cost.step_time.step import PartTime, StepTime, step_time


def single_machine_step_time(config: RunConfig, machine: Hardware, *, batch_tokens: int, seq_len: int) -> StepTime:
    """The time of a step of the config's ranks, on a measured CPU with a part ``network``."""
    alone = step_time(config, machine, batch_tokens=batch_tokens, seq_len=seq_len)
    measured = machine.measured.collective if machine.measured else None
    made = collectives(config, batch=(batch_tokens, seq_len))
    if measured is None or not made or machine.kind != "cpu":
        return alone
    # An all-reduce is a reduce-scatter and an all-gather: each takes half of its time.
    through_s = sum(one.total_bytes * (1 if one.op == "all_reduce" else 0.5) for one in made) / measured.bytes_per_s
    moved, calls = sum(one.total_bytes for one in made), sum(one.count for one in made)
    network = PartTime("network", 0, moved, calls, calls * measured.latency_s + through_s, "network")
    return replace(alone, parts=(*alone.parts, network))
