"""From the stream's numpy rows to device tensors, read ahead in one thread.

``Batches`` is the seam: any object with ``batch(step)``, a list of this rank's microbatches (the same number on every
rank), and ``state()``, a small JSON value that a checkpoint keeps and ``check`` compares on resume.
"""

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor

if TYPE_CHECKING:
    from smalti.data.stream import Stream

IGNORE = -100
"""Target value of a token that does not count, as in ``torch.nn.functional.cross_entropy``."""


class Batches(Protocol):
    """What training asks of its data."""

    def batch(self, step: int) -> Sequence[Any]:
        """This rank's microbatches of update ``step``; a pure function of ``step``."""

    def state(self) -> dict[str, Any]:
        """What identifies the data and its order; saved in each checkpoint."""

    def check(self, state: dict[str, Any]) -> None:
        """Raise a UserError that names the difference where ``state`` belongs to other data or another order."""


class Microbatch(NamedTuple):
    """Rows of one forward pass; S sequences of T tokens."""

    inputs: Tensor
    """(S, T) int64 token ids."""
    targets: Tensor
    """(S, T) int64 next token ids, IGNORE where nothing is predicted."""
    positions: Tensor
    """(S, T) int64 position inside the document."""
    documents: Tensor | None
    """(S, T) int64 number of the document inside the row; None: attention sees the whole row."""


class TokenBatches:
    """The stream as tensors on a device."""

    def __init__(self, stream: "Stream", device: torch.device, *, mask_documents: bool) -> None:
        self._stream = stream
        self._device = device
        self._mask_documents = mask_documents

    def batch(self, step: int) -> list[Microbatch]:
        """This rank's microbatches of update ``step``."""
        return [self._to_device(rows) for rows in self._stream.batch(step)]

    def state(self) -> dict[str, Any]:
        """The stream's digests."""
        return self._stream.state()

    def check(self, state: dict[str, Any]) -> None:
        """Refuse the state of another stream."""
        self._stream.check(state)

    def tokens_by_source(self, step: int) -> dict[str, int]:
        """Tokens of each source in the first ``step`` updates."""
        return self._stream.tokens_by_source(step)

    def _to_device(self, rows: Any) -> Microbatch:
        def tensor(array: Any) -> Tensor:
            return torch.from_numpy(array).to(torch.int64).to(self._device, non_blocking=True)

        documents = tensor(rows.documents) if self._mask_documents else None
        return Microbatch(tensor(rows.inputs), tensor(rows.targets), tensor(rows.positions), documents)


def read_ahead(batches: Batches, first_step: int, last_step: int, depth: int) -> Iterator[Sequence[Any]]:
    """``batches.batch(step)`` for each step of [first_step, last_step), ``depth`` of them read ahead in a thread."""
    if depth == 0:
        for step in range(first_step, last_step):
            yield batches.batch(step)
        return
    with ThreadPoolExecutor(1, thread_name_prefix="read-ahead") as pool:
        waiting: list[Future[Sequence[Any]]] = []
        try:
            for step in range(first_step, last_step):
                while len(waiting) <= depth and step + len(waiting) < last_step:
                    waiting.append(pool.submit(batches.batch, step + len(waiting)))
                yield waiting.pop(0).result()
        finally:
            for future in waiting:
                future.cancel()
