"""The deterministic stream of batches: the same tokens in the same order on any number of ranks, from any step.

Promises: ``batch(step)`` is a pure function of data, config and seed; ranks and microbatch size only cut the same
global batch differently; every rank gets the same number of microbatches; the state is below 1 kB, holds no position
(the step is the position) and is bound to digests of data and schedule; a changed source is refused by name. Does not
promise to fill a rank that is short: it gets an empty microbatch whose targets are all ignored. Does not read ahead:
whoever trains does, from a thread (``batch`` may be called from any).
"""

from dataclasses import dataclass
from hashlib import sha256
from typing import Any

import numpy as np
import numpy.typing as npt

from smalti.base.errors import DataError, UserError
from smalti.config.data import DataConfig
from smalti.data.mixture import build_schedule
from smalti.data.order import Order
from smalti.data.pack import IGNORE, n_sequences, split
from smalti.data.state import Identity
from smalti.data.tokens.reader import TokenSource


@dataclass(frozen=True)
class Batch:
    """One microbatch of one rank: S sequences of L tokens."""

    inputs: npt.NDArray[np.int64]
    """[S, L]"""
    targets: npt.NDArray[np.int64]
    """[S, L]; IGNORE (-100) does not count."""
    positions: npt.NDArray[np.int32]
    """[S, L] within the document."""
    documents: npt.NDArray[np.int32]
    """[S, L] which document of the row."""
    source: npt.NDArray[np.int16]
    """[S] index into ``Stream.sources``; -1 in an empty batch."""
    first_position: int
    """Position of the first sequence in the order of training; the others follow without a gap."""

    @property
    def is_empty(self) -> bool:
        """True for the stand-in that a rank without sequences left gets."""
        return bool(self.source[0] < 0)


class Stream:
    """Batches of a run. ``step`` counts from 0: ``batch(0)`` is the first; a run resumed after n steps asks for n."""

    def __init__(
        self,
        config: DataConfig,
        *,
        seed: int,
        total_steps: int,
        global_batch_tokens: int,
        rank: int = 0,
        world_size: int = 1,
        microbatch_sequences: int,
    ) -> None:
        """Opens the sources. Raises DataError when one is missing, damaged, shorter than a sequence, or of another
        tokenizer than the rest; UserError for a batch that is not whole sequences."""
        if global_batch_tokens < config.seq_len or global_batch_tokens % config.seq_len:
            raise UserError(
                f"global_batch_tokens={global_batch_tokens}", allowed=f"a multiple of data.seq_len={config.seq_len}"
            )
        if total_steps < 1 or microbatch_sequences < 1:
            raise UserError(
                f"total_steps={total_steps}, microbatch_sequences={microbatch_sequences}", allowed="1 or more"
            )
        assert 0 <= rank < world_size
        self.config, self.seq_len = config, config.seq_len
        self.total_steps, self.global_batch_sequences = total_steps, global_batch_tokens // config.seq_len
        self.rank, self.world_size, self.microbatch_sequences = rank, world_size, microbatch_sequences
        self.sources = tuple(sorted(config.sources))
        self._tokens = [TokenSource(config.sources[name]) for name in self.sources]
        _check_one_tokenizer(self.sources, self._tokens)
        manifest = self._tokens[0].manifest
        self.eod_id, self.vocab_size = manifest.eod_id, manifest.vocab_size
        self.tokenizer_digest = manifest.tokenizer_digest
        self.schedule = build_schedule(config, total_steps * self.global_batch_sequences, self.global_batch_sequences)
        self.order = Order(self.schedule, _sizes(self.sources, self._tokens, config.seq_len), seed)
        self.identity = Identity.of(
            {name: tokens.manifest for name, tokens in zip(self.sources, self._tokens, strict=True)},
            self.schedule,
            seed=seed,
            seq_len=config.seq_len,
            global_batch_sequences=self.global_batch_sequences,
            mask_documents=config.mask_documents,
        )

    def batch(self, step: int) -> list[Batch]:
        """This rank's microbatches of ``step`` (0 to total_steps - 1).

        Rows of the global batch go to ranks in contiguous, nearly equal parts; each rank chops its part.
        """
        self._check_step(step)
        n, world, micro = self.global_batch_sequences, self.world_size, self.microbatch_sequences
        begin, end = n * self.rank // world, n * (self.rank + 1) // world
        largest_part = -(-n // world)
        first_position = step * n + begin
        rows, source = self.rows(first_position, end - begin)
        inputs, targets, positions, documents = split(rows, self.eod_id, mask_documents=self.config.mask_documents)
        batches = []
        for start in range(0, largest_part, micro):
            if start < end - begin:
                cut = slice(start, start + micro)
                arrays = inputs[cut], targets[cut], positions[cut], documents[cut], source[cut]
                batches.append(Batch(*arrays, first_position=first_position + start))
            else:
                batches.append(self._empty(first_position + end - begin))
        return batches

    def rows(self, first_position: int, n: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int16]]:
        """Sequences at positions [first_position, first_position + n): tokens [n, L+1], source [n]."""
        source, _, sequence = self.order.locate(np.arange(first_position, first_position + n))
        out = np.empty((n, self.seq_len + 1), dtype=np.int64)
        for row, which, index in zip(out, source.tolist(), sequence.tolist(), strict=True):
            self._tokens[which].read_into(index * self.seq_len, row)
        return out, source

    def tokens_by_source(self, steps_done: int) -> dict[str, int]:
        """Tokens that the first ``steps_done`` steps took from each source, over all ranks."""
        counts = self.schedule.counts(steps_done * self.global_batch_sequences)
        return {name: int(count) * self.seq_len for name, count in zip(self.sources, counts, strict=True)}

    def state(self) -> dict[str, Any]:
        """What fixes the order, as JSON below 1 kB. With the number of steps done it is all that a resume needs."""
        return self.identity.state()

    def check(self, state: dict[str, Any]) -> None:
        """Raises UserError, naming every difference, unless ``state`` describes this very stream."""
        self.identity.check(state)

    def order_hash(self, first_step: int, n_steps: int) -> str:
        """SHA-256 of all tokens of these steps in global order (rows [L+1] as int64), whatever the ranks."""
        digest = sha256()
        for step in range(first_step, first_step + n_steps):
            self._check_step(step)
            rows, _ = self.rows(step * self.global_batch_sequences, self.global_batch_sequences)
            digest.update(rows.astype("<i8", copy=False).tobytes())
        return digest.hexdigest()

    def close(self) -> None:
        """Close the files; they open again when read."""
        for tokens in self._tokens:
            tokens.close()

    def _empty(self, first_position: int) -> Batch:
        inputs = np.full((1, self.seq_len), self.eod_id, dtype=np.int64)
        positions = np.arange(self.seq_len, dtype=np.int32)[None]
        documents = np.zeros((1, self.seq_len), dtype=np.int32)
        return Batch(
            inputs, np.full_like(inputs, IGNORE), positions, documents, np.full(1, -1, dtype=np.int16), first_position
        )

    def _check_step(self, step: int) -> None:
        if not 0 <= step < self.total_steps:
            raise UserError(f"step {step:,} of the stream", allowed=f"0 to {self.total_steps - 1:,}")


def _check_one_tokenizer(names: tuple[str, ...], tokens: list[TokenSource]) -> None:
    first = tokens[0].manifest
    for name, source in zip(names, tokens, strict=True):
        other = source.manifest
        for field in ("tokenizer_digest", "vocab_size", "eod_id"):
            if getattr(other, field) != getattr(first, field):
                raise DataError(
                    f"source '{name}' ({source.folder}) has {field}={getattr(other, field)}, "
                    f"source '{names[0]}' ({tokens[0].folder}) has {getattr(first, field)}",
                    allowed="sources made by one tokenizer",
                    hint="run 'smalti data tokenize' for all sources with the same tokenizer",
                )


def _sizes(names: tuple[str, ...], tokens: list[TokenSource], seq_len: int) -> dict[str, int]:
    sizes = {name: n_sequences(source.n_tokens, seq_len) for name, source in zip(names, tokens, strict=True)}
    for name, source in zip(names, tokens, strict=True):
        if sizes[name] == 0:
            raise DataError(
                f"source '{name}' ({source.folder}) has {source.n_tokens:,} tokens, less than one sequence",
                allowed=f"at least data.seq_len + 1 = {seq_len + 1:,} tokens",
                hint="give the source more documents, or make data.seq_len smaller",
            )
    return sizes
