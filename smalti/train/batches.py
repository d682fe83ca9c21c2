"""The stream's numpy rows as tensors on a device.

``Batches`` is the interface: any object with ``batch(step)``, a list of this rank's microbatches (the same number on
every rank), and ``state(step)``, a small JSON value that a checkpoint keeps and ``check`` compares on resume.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from smalti.base.errors import DataError
from smalti.data.sources.vocabulary import require_below, without_vocabulary
from smalti.data.stream.batch import Batch

if TYPE_CHECKING:
    from smalti.data.stream.stream import Stream

IGNORE = -100
"""Target value of a token that does not count, as in ``torch.nn.functional.cross_entropy``."""


class Batches(Protocol):
    """The data of a run."""

    def batch(self, step: int) -> Sequence[Any]:
        """This rank's microbatches of update ``step``; a pure function of ``step``."""

    def state(self, step: int) -> dict[str, Any]:
        """State that identifies the data and its order; saved in the checkpoint after ``step`` updates."""

    def check(self, state: dict[str, Any], step: int) -> None:
        """Raise a UserError that names the difference where ``state``, saved after ``step`` updates, belongs to other
        data or another order."""


class Microbatch(NamedTuple):
    """Rows of one forward pass; S sequences of T tokens."""

    inputs: Tensor
    """(S, T) int64 token ids."""
    targets: Tensor
    """(S, T) int64 next token ids, IGNORE where nothing is predicted."""
    positions: Tensor
    """(S, T) int64 position inside the document."""
    documents: Tensor | None
    """(S, T) int64 number of the document inside the row; None: attention sees the whole row. Of the whole row, also
    where the rest is this rank's part of it."""
    n_documents: int | None = None
    """Runs of equal numbers in ``documents``, where it is on a device that would have to be asked."""


class TokenBatches:
    """The stream as tensors on a device."""

    def __init__(
        self,
        stream: "Stream",
        device: torch.device,
        *,
        mask_documents: bool,
        vocab_size: int | None = None,
        own_part: Callable[[Tensor], Tensor] = lambda rows_ST: rows_ST,
    ) -> None:
        """``vocab_size``: of the model; ids of sources that do not say their vocabulary are checked against it.
        ``own_part``: the tokens of each row that are this rank's, where several share a row."""
        self._own_part = own_part
        self._stream = stream
        self._vocab_size = vocab_size if vocab_size is not None and without_vocabulary(stream.opened) else None
        if self._vocab_size is not None and (stream.eod_id or 0) >= self._vocab_size:
            raise DataError(
                f"eod_id={stream.eod_id} of a source is no token of the model, model.vocab_size={self._vocab_size}",
                allowed=f"0 to {self._vocab_size - 1:,}",
            )
        self._device = device
        self._mask_documents = mask_documents

    def batch(self, step: int) -> list[Microbatch]:
        """This rank's microbatches of update ``step``."""
        return self.place(self.read(step))

    def read(self, step: int) -> list[Batch]:
        """The same as rows in memory; may be called from several threads at a time."""
        batches = self._stream.batch(step)
        for batch in batches:
            if self._vocab_size is not None and int(batch.tokens.max()) >= self._vocab_size:
                self._refuse(batch, self._vocab_size, step)
        return batches

    def place(self, rows: Sequence[Batch]) -> list[Microbatch]:
        """Rows as tensors on the device."""
        return [self._to_device(batch) for batch in rows]

    def close(self) -> None:
        """End reads that are under way."""
        self._stream.close()

    def state(self, step: int) -> dict[str, Any]:
        """The stream's digests."""
        return self._stream.state(step)

    def check(self, state: dict[str, Any], step: int) -> None:
        """Raise UserError where the state is of another stream."""
        self._stream.check(state, step)

    def seq_len(self, step: int) -> int:
        """Tokens of a row of update ``step``, those of all ranks that share it."""
        return self._stream.schedule.seq_len(step)

    @property
    def microbatch_tokens(self) -> int:
        """Tokens in a microbatch, in whole rows."""
        return self._stream.microbatch_tokens

    def use_microbatch(self, tokens: int) -> None:
        """Split the same batches into other microbatches; call it before the first is read."""
        self._stream.microbatch_tokens = tokens

    def fullest(self, rows: int, seq_len: int, *, vocab_size: int) -> Microbatch:
        """A synthetic microbatch that takes as much memory as any: all targets count; where rows are divided into
        documents, a long one and many of one token."""
        stream, ids = self._stream, np.arange(rows * (seq_len + 1)) % vocab_size
        tokens = ids.reshape(rows, seq_len + 1).astype(np.uint32 if vocab_size > 2**16 else np.uint16)
        if stream.eod_id is not None:
            tokens[tokens == stream.eod_id] = 1 if stream.eod_id == 0 else stream.eod_id - 1
            tokens[:, seq_len // 2 :] = stream.eod_id
        batch = Batch(tokens, np.zeros(rows, dtype=np.int16), 0, stream.eod_id, self._mask_documents)
        return self._to_device(batch)

    def tokens_by_source(self, step: int) -> dict[str, int]:
        """Tokens of each source in the first ``step`` updates."""
        return self._stream.tokens_by_source(step)

    def fetch_counts(self) -> dict[str, float]:
        """Return the costs of reading the sources, by the names of ``data/fetch/counts.py``."""
        return self._stream.fetch_counts.as_dict()

    def epochs(self, step: int) -> float:
        """Tokens of the largest source in the first ``step`` updates, over those that it has."""
        name, largest = max(self._stream.opened.items(), key=lambda item: item[1].n_tokens)
        return self._stream.tokens_by_source(step).get(name, 0) / largest.n_tokens

    def _refuse(self, batch: Batch, vocab_size: int, step: int) -> None:
        """A DataError about the first row with an id that the model does not have."""
        row = int((batch.tokens >= vocab_size).any(axis=1).argmax())
        name = self._stream.sources[int(batch.source[row])]
        place = f"position {batch.first_position + row:,} (step {step:,}; {self._stream.opened[name].where})"
        require_below(batch.tokens[row], vocab_size, name, place)

    def _to_device(self, rows: Batch) -> Microbatch:
        """Copy the tokens as they are on disk, 2 bytes each; all else is computed on the device."""

        def tensor(array: Any) -> Tensor:
            return torch.from_numpy(array).to(self._device, non_blocking=True)

        tokens = tensor(rows.tokens).to(torch.int64)
        inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
        # nothing is changed in place: inputs and targets of a single row are one piece of memory
        if rows.masked is not None:
            targets = targets.masked_fill(tensor(rows.masked), IGNORE)
        begins = None
        if rows.joints is not None:
            row, column, token = (tensor(array) for array in rows.joints)
            inputs = inputs.index_put((row, column), token)
            begins = torch.zeros_like(inputs, dtype=torch.bool)
            begins[row, column] = True
        elif rows.eod_id is not None:
            begins = inputs == rows.eod_id
        positions, documents = _numbered(inputs, begins if self._mask_documents else None)
        n_documents = rows.runs if documents is not None and self._device.type != "cpu" else None
        own_part = self._own_part
        return Microbatch(own_part(inputs), own_part(targets), own_part(positions), documents, n_documents)


def _numbered(inputs: Tensor, begins: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Where documents begin (S, T), or None: rows are not divided -> positions (S, T), documents (S, T) or None."""
    along = torch.arange(inputs.shape[1], device=inputs.device).expand_as(inputs)
    if begins is None:
        return along.contiguous(), None
    started = torch.where(begins, along, 0).cummax(dim=1).values
    return along - started, begins.cumsum(dim=1)
