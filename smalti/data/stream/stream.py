"""The deterministic stream of batches: the same tokens in the same order on any number of ranks, from any step.

``batch(step)`` is a pure function of data, config and seed; ranks and microbatches only split the same global batch.
Every rank gets the same number of microbatches, of which the last ones may be empty, with all targets ignored. The
state is below 1 kB and has no position, because the step determines it. ``batch`` is thread-safe, for prefetching.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from smalti.base.errors import UserError
from smalti.data.examples.source import ExampleSource
from smalti.data.fetch.counts import Counts
from smalti.data.order.order import Order
from smalti.data.order.schedule import build_schedule, tokens_before
from smalti.data.pack.rows import Joints, Sequences
from smalti.data.sources.source import Int64s
from smalti.data.stream.batch import Batch
from smalti.data.stream.open import open_sources, pack_digests, read_indexes, sequences_of, takedowns_of
from smalti.data.stream.state import Identity
from smalti.data.stream.takedowns import blank

if TYPE_CHECKING:
    from smalti.config.data import DataConfig
    from smalti.config.durations import RunLength

_HASHED_ROWS = 64


@dataclass(frozen=True)
class Row:
    """The origin of a sequence of a step."""

    position: int
    source: str
    epoch: int
    index: int
    """Index of the sequence in the source."""
    pieces: list[tuple[int, int]]
    """Tokens [begin, end) of the source that are its targets. The first input of a piece is the token before it."""


@dataclass(frozen=True)
class _Rows:
    """Sequences after reading and blanking."""

    tokens: npt.NDArray[Any]
    source: npt.NDArray[np.int16]
    joints: Joints | None
    masked: npt.NDArray[np.bool_] | None
    values: dict[str, npt.NDArray[np.float32]]


class Stream:
    """The batches of a run, by step from 0: a run that resumes after n steps continues with ``batch(n)``."""

    def __init__(
        self,
        config: "DataConfig",
        *,
        seed: int,
        length: "RunLength",
        rank: int = 0,
        world_size: int = 1,
        microbatch_tokens: int,
        indexes: Mapping[str, bytes] | None = None,
        equal_rows: bool = False,
    ) -> None:
        """``indexes``: the result of ``read_indexes(config)``; None: it is read here. ``equal_rows``: pad microbatches
        to the same number of rows on each rank, with rows that do not count. Raises DataError for a source that is
        missing, damaged, shorter than a sequence, of another tokenizer than the others, or without the best-fit index
        that the config requires; UserError for an impossible schedule.
        """
        if microbatch_tokens < 1:
            raise UserError(f"microbatch_tokens={microbatch_tokens} is not valid", allowed="1 or more")
        assert 0 <= rank < world_size
        self.config = config
        self.rank = rank
        self.world_size = world_size
        self.microbatch_tokens = microbatch_tokens
        self._equal_rows = equal_rows
        self.schedule = build_schedule(config, length)
        self.sources = self.schedule.sources
        indexes = read_indexes(config) if indexes is None else indexes
        self.fetch_counts = Counts()
        """Counters of the cost of reading the sources."""
        opened = open_sources(config, indexes, rank, world_size, self.fetch_counts)
        self.opened = opened.sources
        self.eod_id = opened.eod_id
        self.vocab_size = opened.vocab_size
        self.tokenizer_digest = opened.tokenizer_digest
        self._pad_id = opened.pad_id
        self._sequences: list[dict[str, Sequences]] = [
            sequences_of(config, opened, indexes, segment.seq_len) for segment in self.schedule.segments
        ]
        self._takedowns = takedowns_of(indexes)
        # A source that a segment does not read may be shorter than a sequence; its size is not used there.
        sizes = [
            {name: sequences[name].size if name in sequences else 1 for name in self.sources}
            for sequences in self._sequences
        ]
        self.order = Order(self.schedule, sizes, seed, config.shuffle)
        self._dtype = np.dtype(max(source.dtype for source in self.opened.values()))
        self.identity = Identity.of(
            {name: source.digest for name, source in self.opened.items()},
            self.schedule,
            history=config.history,
            packs=pack_digests(config, indexes),
            takedowns=None if self._takedowns is None else self._takedowns.digest,
            seed=seed,
            mask_documents=config.mask_documents,
            tokenizer=self.tokenizer_digest,
            **self._eod_of_config(),
            packing=config.packing,
            shuffle=list(config.shuffle.model_dump().values()),
        )

    def batch(self, step: int) -> list[Batch]:
        """Return this rank's microbatches of ``step`` (0 to total_steps - 1).

        The rows of the global batch are split over the ranks in contiguous, nearly equal parts; each rank splits its
        part into microbatches of as many sequences as fit into ``microbatch_tokens``, at least one.
        """
        self._check_step(step)
        n = self.schedule.rows(step)
        first = self.schedule.first_position(step)
        seq_len = self.schedule.seq_len(step)
        micro = max(1, self.microbatch_tokens // seq_len)
        begin, end = self._part(n, self.rank)
        rows = self._read(step, np.arange(first + begin, first + end))
        batches = []
        max_rows = -(-n // self.world_size)
        for start in range(0, max_rows, micro):
            if start < end - begin:
                batch = self._cut(rows, start, start + micro, first + begin)
            else:
                batch = self._empty(seq_len, first + end)
            batches.append(batch.padded(min(micro, max_rows - start), self._pad_id) if self._equal_rows else batch)
        return batches

    def rows_of(self, step: int, rank: int | None = None) -> list[Row]:
        """Return the origin of each sequence of ``step`` (of one rank, or of all), in order. Reads no token."""
        self._check_step(step)
        n = self.schedule.rows(step)
        first = self.schedule.first_position(step)
        segment = self.schedule.segment(step)
        begin, end = (0, n) if rank is None else self._part(n, rank)
        positions = np.arange(first + begin, first + end)
        source, epoch, index = self.order.locate(positions)
        pieces: list[list[tuple[int, int]]] = [[] for _ in range(end - begin)]
        for which in sorted(set(source.tolist())):
            selected = np.flatnonzero(source == which)
            row, _, start, length = self._sequences[segment][self.sources[which]].pieces(index[selected])
            for number, a, b in zip(selected[row].tolist(), start.tolist(), (start + length).tolist(), strict=True):
                pieces[number].append((a, b))
        names = [self.sources[which] for which in source.tolist()]
        columns = (positions.tolist(), names, epoch.tolist(), index.tolist(), pieces)
        return [Row(*cells) for cells in zip(*columns, strict=True)]

    def sequences_holding(self, source: str, begin: int, end: int, segment: int) -> Int64s:
        """Return the sequences of a segment whose targets include any of the tokens [begin, end) of a source."""
        return self._sequences[segment][source].holding(begin, end)

    def tokens_by_source(self, steps_done: int) -> dict[str, int]:
        """Return the tokens that the first ``steps_done`` steps take from each source, on all ranks, with padding."""
        return tokens_before(self.schedule, steps_done)

    def state(self, step: int) -> dict[str, Any]:
        """Return the identity of the order as JSON below 1 kB, which a resume needs besides the number of steps."""
        return self.identity.state(step)

    def check(self, state: dict[str, Any], step: int) -> None:
        """Raise UserError, with every difference, unless ``state``, saved after ``step`` steps, is of this stream (or
        of one with the same past, whose future a fork has replaced)."""
        self.identity.check(state, step)

    def order_hash(self, first_step: int, n_steps: int) -> str:
        """Return the SHA-256 of all tokens of these steps in global order (rows [L+1] as int64), on any rank."""
        digest = sha256()
        for step in range(first_step, first_step + n_steps):
            self._check_step(step)
            first = self.schedule.first_position(step)
            for start in range(0, self.schedule.rows(step), _HASHED_ROWS):
                end = min(start + _HASHED_ROWS, self.schedule.rows(step))
                rows = self._read(step, np.arange(first + start, first + end))
                digest.update(rows.tokens.astype("<i8").data)
        return digest.hexdigest()

    def close(self) -> None:
        """Close the files, which are opened again by the next read."""
        for source in self.opened.values():
            source.close()
        for by_source in self._sequences:
            for sequences in by_source.values():
                sequences.close()

    def _read(self, step: int, positions: Int64s) -> _Rows:
        """Read the sequences at positions of a step: one call for each source, whose requests are then concurrent."""
        source, _, index = self.order.locate(positions)
        n = positions.size
        segment = self.schedule.segment(step)
        seq_len = self.schedule.seq_len(step)
        tokens = np.empty((n, seq_len + 1), dtype=self._dtype)
        joints: list[Joints] = []
        chopped: list[npt.NDArray[np.intp]] = []
        values: dict[str, npt.NDArray[np.float32]] = {}
        masked: npt.NDArray[np.bool_] | None = None
        for which in sorted(set(source.tolist())):
            selected = np.flatnonzero(source == which)
            name = self.sources[which]
            dtype = self.opened[name].dtype
            is_all = selected.size == n and dtype == self._dtype
            part = tokens if is_all else np.empty((selected.size, seq_len + 1), dtype=dtype)
            info = self._sequences[segment][name].read(index[selected], part)
            if self._takedowns is not None and name in self._takedowns.spans:
                pieces = self._sequences[segment][name].pieces(index[selected])
                info = blank(part, info, pieces, self._takedowns.spans[name], self._pad_id)
            if part is not tokens:
                tokens[selected] = part
            if info.joints is not None:
                joints.append(info.joints._replace(row=selected[info.joints.row]))
            else:
                chopped.append(selected)
            for key, table in info.values.items():
                values[key] = _set_rows(values.get(key), table, selected, n)
            if info.masked is not None:
                masked = np.zeros((n, seq_len), dtype=bool) if masked is None else masked
                masked[selected] = info.masked
        if joints and chopped:  # a row of concat begins its documents after each end-of-document token
            joints += [self._begins(tokens, rows) for rows in chopped]
        return _Rows(tokens, source, Joints.concatenate(joints) if joints else None, masked, values)

    def _begins(self, tokens: npt.NDArray[Any], rows: npt.NDArray[np.intp]) -> Joints:
        """Return the places in rows where an end-of-document token is the input, as joints."""
        row, column = np.nonzero(tokens[rows, :-1] == (-1 if self.eod_id is None else self.eod_id))
        return Joints(rows[row], column, tokens[rows[row], column].astype(np.int64))

    def _cut(self, rows: _Rows, start: int, end: int, first_position: int) -> Batch:
        masked = None if rows.masked is None else rows.masked[start:end]
        return Batch(
            rows.tokens[start:end],
            rows.source[start:end],
            first_position + start,
            eod_id=self.eod_id,
            mask_documents=self.config.mask_documents,
            joints=None if rows.joints is None else rows.joints.slice_rows(start, end),
            masked=masked if masked is not None and masked.any() else None,
            values={name: table[start:end] for name, table in rows.values.items()},
        )

    def _eod_of_config(self) -> dict[str, int]:
        """Return the end-of-document id if no tokenizer digest covers it: masks and positions depend on it."""
        return {} if self.tokenizer_digest is not None or self.eod_id is None else {"eod_id": self.eod_id}

    def _empty(self, seq_len: int, first_position: int) -> Batch:
        return Batch(
            np.full((1, seq_len + 1), self._pad_id, dtype=self._dtype),
            np.full(1, -1, dtype=np.int16),
            first_position,
            eod_id=self.eod_id,
            mask_documents=self.config.mask_documents,
            masked=np.ones((1, seq_len), dtype=bool),
            values=self.empty_values(1),
        )

    def empty_values(self, rows: int) -> dict[str, npt.NDArray[np.float32]]:
        """Return the columns of the examples, zero, for rows without any."""
        sources = [source for source in self.opened.values() if isinstance(source, ExampleSource)]
        return {name: np.zeros((rows, 2), np.float32) for source in sources for name in source.record.columns}

    def epoch_tokens(self, name: str) -> int:
        """Return the tokens of an epoch of a source: of examples those of its rows, with their padding."""
        sizes = [by_source[name] for by_source in self._sequences if name in by_source]
        if isinstance(self.opened[name], ExampleSource) and sizes:
            return sizes[-1].size * sizes[-1].seq_len
        return self.opened[name].n_tokens

    def _part(self, n: int, rank: int) -> tuple[int, int]:
        return n * rank // self.world_size, n * (rank + 1) // self.world_size

    def _check_step(self, step: int) -> None:
        if not 0 <= step < self.schedule.total_steps:
            raise UserError(f"step {step:,} is outside the stream", allowed=f"0 to {self.schedule.total_steps - 1:,}")


def _set_rows(
    table: npt.NDArray[np.float32] | None, values: npt.NDArray[np.float32], rows: npt.NDArray[np.intp], n: int
) -> npt.NDArray[np.float32]:
    """Return ``table`` [n, D], or one of zeros, with ``values`` in these rows; D grows if they are wider."""
    table = np.zeros((n, 0), dtype=np.float32) if table is None else table
    table = np.pad(table, ((0, 0), (0, max(0, values.shape[1] - table.shape[1]))))
    table[rows, : values.shape[1]] = values
    return table
