"""Votes of all ranks on the actions between steps: stop, save, evaluate.

Conditions that ranks may see differently (a signal, a clock) are voted on, because a collective that only some ranks
enter hangs. The vote is an asynchronous all-reduce of CPU tensors while the step computes, without work for the device.
"""

import torch
import torch.distributed as dist


class Vote:
    """One vote for each step: ``start`` sends this rank's values, ``result`` returns the maximum over all ranks."""

    def __init__(self, count: int) -> None:
        self._ballot = torch.zeros(count, dtype=torch.int32)
        self._work: dist.Work | None = None
        self._group = dist.new_group(backend="gloo") if dist.get_world_size() > 1 else None

    def start(self, *values: int) -> None:
        """Send this rank's values (0 for no); those that are not given are 0."""
        missing = len(self._ballot) - len(values)
        self._ballot.copy_(torch.tensor([*values, *[0] * missing], dtype=torch.int32))
        if self._group is not None:
            self._work = dist.all_reduce(self._ballot, op=dist.ReduceOp.MAX, group=self._group, async_op=True)

    def result(self) -> list[int]:
        """Return the maximum of each value over all ranks, the same list on every rank."""
        if self._work is not None:
            self._work.wait()
        return [int(value) for value in self._ballot]
