"""The interface of a run's data, ``Batches``, and the stream's rows as tensors on a device.

Data is any object with ``batch(step)``, a list of this rank's microbatches (the same number on every rank), and
``state(step)``, a small JSON value that is saved in a checkpoint and that ``check`` compares on resume.
"""

from collections.abc import Callable, Mapping, Sequence
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
        """Return this rank's microbatches of update ``step``: a pure function of ``step``."""

    def state(self, step: int) -> dict[str, Any]:
        """Return the state that identifies the data and its order, for the checkpoint after ``step`` updates."""

    def check(self, state: dict[str, Any], step: int) -> None:
        """Raise UserError with the difference if ``state``, saved after ``step`` updates, is of other data or another
        order."""


class Microbatch(NamedTuple):
    """Rows of one forward pass; S sequences of T tokens."""

    inputs: Tensor
    """(S, T) int64 token ids."""
    targets: Tensor
    """(S, T) int64 next token ids, IGNORE where nothing is predicted."""
    positions: Tensor
    """(S, T) int64 position inside the document."""
    documents: Tensor | None
    """(S, T) int64 number of the document inside the row; None: attention sees the whole row. If ranks share a row, it
    covers the whole row, and the other fields this rank's part."""
    n_documents: int | None = None
    """Number of runs of equal values in ``documents`` on a GPU, where counting them would wait for the device."""
    values: Mapping[str, Tensor] = {}
    """Name -> a number for each document of each row (S, most documents of a row), of examples (``data/examples``):
    column d belongs to document d + 1. Whole rows, as ``documents``."""


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
        """Raises DataError if the stream's end-of-document id is not a token of the model.

        vocab_size: that of the model, a bound for ids of sources without one. own_part: returns this rank's tokens of
        rows that ranks share.
        """
        self._own_part = own_part
        self._stream = stream
        self._vocab_size = vocab_size if vocab_size is not None and without_vocabulary(stream.opened) else None
        if self._vocab_size is not None and (stream.eod_id or 0) >= self._vocab_size:
            raise DataError(
                f"eod_id={stream.eod_id} of a source is not a token of the model, model.vocab_size={self._vocab_size}",
                allowed=f"0 to {self._vocab_size - 1:,}",
            )
        self._device = device
        self._mask_documents = mask_documents

    def batch(self, step: int) -> list[Microbatch]:
        """Return this rank's microbatches of update ``step``."""
        return self.place(self.read(step))

    def read(self, step: int) -> list[Batch]:
        """Return the microbatches of update ``step`` as rows in memory; may be called from several threads."""
        batches = self._stream.batch(step)
        for batch in batches:
            if self._vocab_size is not None and int(batch.tokens.max()) >= self._vocab_size:
                self._raise_unknown_id(batch, self._vocab_size, step)
        return batches

    def place(self, rows: Sequence[Batch]) -> list[Microbatch]:
        """Return rows as tensors on the device."""
        return [self._to_device(batch) for batch in rows]

    def close(self) -> None:
        """Cancel running reads."""
        self._stream.close()

    def state(self, step: int) -> dict[str, Any]:
        """Return the digests of the stream."""
        return self._stream.state(step)

    def check(self, state: dict[str, Any], step: int) -> None:
        """Raise UserError if the state is of another stream."""
        self._stream.check(state, step)

    def seq_len(self, step: int) -> int:
        """Return the length of the rows of update ``step``, over all ranks that share them."""
        return self._stream.schedule.seq_len(step)

    @property
    def microbatch_tokens(self) -> int:
        """Tokens in a microbatch, in whole rows."""
        return self._stream.microbatch_tokens

    def use_microbatch(self, tokens: int) -> None:
        """Split the same batches into other microbatches; call it before the first is read."""
        self._stream.microbatch_tokens = tokens

    def fullest(self, rows: int, seq_len: int, *, vocab_size: int) -> Microbatch:
        """Return a synthetic microbatch of maximal memory: all targets count, and rows of several documents have a long
        one and many of one token."""
        stream = self._stream
        ids = np.arange(rows * (seq_len + 1)) % vocab_size
        tokens = ids.reshape(rows, seq_len + 1).astype(np.uint32 if vocab_size > 2**16 else np.uint16)
        if stream.eod_id is not None:
            tokens[tokens == stream.eod_id] = 1 if stream.eod_id == 0 else stream.eod_id - 1
            tokens[:, seq_len // 2 :] = stream.eod_id
        batch = Batch(
            tokens,
            np.zeros(rows, dtype=np.int16),
            0,
            stream.eod_id,
            self._mask_documents,
            values=stream.empty_values(rows),
        )
        return self._to_device(batch)

    def tokens_by_source(self, step: int) -> dict[str, int]:
        """Return the tokens of each source in the first ``step`` updates."""
        return self._stream.tokens_by_source(step)

    def metrics(self, step: int) -> dict[str, float]:
        """Return the tokens of each source, the epochs of the largest, and the counts of fetching."""
        fetched = self.fetch_counts()
        if not fetched["requests"] + fetched["cache_hits"]:
            fetched = {}
        return {
            "time/epoch": self.epochs(step),
            **{f"data/mix/{name}/tokens": float(n) for name, n in self.tokens_by_source(step).items()},
            **{f"data/fetch/{name}": amount for name, amount in fetched.items()},
        }

    def fetch_counts(self) -> dict[str, float]:
        """Return the costs of reading the sources, by the names of ``data/fetch/counts.py``."""
        return self._stream.fetch_counts.as_dict()

    def epochs(self, step: int) -> float:
        """Return the tokens of the largest source in the first ``step`` updates / the tokens that it has."""
        name = max(self._stream.opened, key=lambda name: self._stream.opened[name].n_tokens)
        return self._stream.tokens_by_source(step).get(name, 0) / self._stream.epoch_tokens(name)

    def _raise_unknown_id(self, batch: Batch, vocab_size: int, step: int) -> None:
        """Raise DataError for the first row with an id that the model does not have."""
        row = int((batch.tokens >= vocab_size).any(axis=1).argmax())
        name = self._stream.sources[int(batch.source[row])]
        place = f"position {batch.first_position + row:,} (step {step:,}; {self._stream.opened[name].where})"
        require_below(batch.tokens[row], vocab_size, name, place)

    def _to_device(self, rows: Batch) -> Microbatch:
        return to_microbatch(rows, self._device, mask_documents=self._mask_documents, own_part=self._own_part)


def to_microbatch(
    rows: Batch,
    device: torch.device,
    *,
    mask_documents: bool,
    own_part: Callable[[Tensor], Tensor] = lambda rows_ST: rows_ST,
) -> Microbatch:
    """Return rows as tensors on a device. Tokens are copied as stored, 2 bytes each; the rest is computed there."""

    def tensor(array: Any) -> Tensor:
        return torch.from_numpy(array).to(device, non_blocking=True)

    tokens = tensor(rows.tokens).to(torch.int64)
    inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    # no in-place changes: inputs and targets of a single row share memory
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
    positions, documents = _numbered(inputs, begins if mask_documents else None)
    n_documents = rows.runs if documents is not None and device.type != "cpu" else None
    values = {name: tensor(table) for name, table in rows.values.items()}
    return Microbatch(own_part(inputs), own_part(targets), own_part(positions), documents, n_documents, values)


def _numbered(inputs: Tensor, begins: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Return positions and numbers of documents, (S, T), from the mask of documents' first tokens.

    None for rows of one document: positions run over the whole row, and there are no numbers.
    """
    along = torch.arange(inputs.shape[1], device=inputs.device).expand_as(inputs)
    if begins is None:
        return along.contiguous(), None
    started = torch.where(begins, along, 0).cummax(dim=1).values
    return along - started, begins.cumsum(dim=1)
