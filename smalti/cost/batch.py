"""How a batch is cut: the rows of a rank, in passes of one microbatch. The same for memory, time and network.

The trainer does the same with whole rows; a rank that is short of rows runs empty ones, so every rank counts as the
fullest.
"""

from dataclasses import dataclass

from smalti.config.run import RunConfig

MICROBATCH_LIMIT_TOKENS = 16_384
"""What ``microbatch_tokens: auto`` never goes above where no GPU's memory is known."""


@dataclass(frozen=True)
class Rows:
    """Of one rank in one step."""

    seq_len: int
    """Tokens of a row."""
    per_rank: int
    """In the step."""
    per_microbatch: int
    """In one forward pass, at most."""

    @property
    def passes(self) -> int:
        """Microbatches of the step; the last may hold less."""
        return split(self.per_rank, self.per_microbatch)


def rows_per_rank(batch_tokens: int, seq_len: int, data_ranks: int, microbatch_tokens: int) -> Rows:
    """Cut a batch for ranks that read different rows."""
    rows = max(1, split(batch_tokens // seq_len, data_ranks))
    return Rows(seq_len, rows, max(1, min(microbatch_tokens // seq_len, rows)))


def usual_microbatch(config: RunConfig, data_ranks: int) -> int:
    """Tokens in one forward pass of one rank, as far as the config alone says it: ``auto`` is the rank's share, at most
    ``MICROBATCH_LIMIT_TOKENS``, in whole sequences. ``cost.microbatch.choose`` also looks at the memory of a rank.

    Where batches or lengths of sequences change, it is the most that any step takes.
    """
    given = config.train.microbatch_tokens
    if isinstance(given, int):
        return given
    return max(
        min(split(batch // seq_len, data_ranks), max(1, MICROBATCH_LIMIT_TOKENS // seq_len)) * seq_len
        for batch, seq_len in config.batches_and_lengths
    )


def split(amount: int, shares: int) -> int:
    """The largest share."""
    return -(-amount // shares)
