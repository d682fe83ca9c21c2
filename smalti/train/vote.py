"""Votes of all ranks on what happens between steps: stop, save, evaluate.

Whatever one rank sees alone (a signal, a clock) is voted on, because a collective that only some ranks enter hangs. The
vote is an asynchronous all-reduce of CPU tensors while the step computes, so it costs the device nothing.
"""

import torch
import torch.distributed as dist


class Vote:
    """One vote a step: ``start`` with this rank's wishes, ``result`` is the maximum over all ranks."""

    def __init__(self, wishes: int) -> None:
        self._ballot = torch.zeros(wishes, dtype=torch.int32)
        self._work: dist.Work | None = None
        self._group = dist.new_group(backend="gloo") if dist.get_world_size() > 1 else None

    def start(self, *wishes: int) -> None:
        """Send this rank's wishes (0 for none)."""
        self._ballot.copy_(torch.tensor(wishes, dtype=torch.int32))
        if self._group is not None:
            self._work = dist.all_reduce(self._ballot, op=dist.ReduceOp.MAX, group=self._group, async_op=True)

    def result(self) -> list[int]:
        """The maximum of each wish over all ranks; the same list on every rank."""
        if self._work is not None:
            self._work.wait()
        return [int(value) for value in self._ballot]
