"""Splits a batch into the rows of a rank and its microbatches, for memory, time and network alike.

The trainer splits whole rows in the same way; a rank short of rows runs empty ones, so every rank counts as the
fullest.
"""

from dataclasses import dataclass

from smalti.config.run import RunConfig

MICROBATCH_LIMIT_TOKENS = 16_384
"""Limit of ``microbatch_tokens: auto`` if no GPU's memory is known."""


@dataclass(frozen=True)
class Rows:
    """Rows of one rank in one step."""

    seq_len: int
    """Tokens of a row."""
    per_rank: int
    """Rows in the step."""
    per_microbatch: int
    """Most rows in one forward pass."""

    @property
    def passes(self) -> int:
        """Microbatches of the step; the last may be smaller."""
        return split(self.per_rank, self.per_microbatch)


def rows_per_rank(batch_tokens: int, seq_len: int, data_ranks: int, microbatch_tokens: int) -> Rows:
    """Split a batch among ranks that read different rows."""
    rows = max(1, split(batch_tokens // seq_len, data_ranks))
    return Rows(seq_len, rows, max(1, min(microbatch_tokens // seq_len, rows)))


def usual_microbatch(config: RunConfig, data_ranks: int) -> int:
    """Return the tokens in one forward pass of one rank, from the config alone.

    ``auto`` is the rank's share, at most ``MICROBATCH_LIMIT_TOKENS``, in whole sequences; ``cost.microbatch.choose``
    also uses the memory of a rank. If batches or sequence lengths change, it is the maximum over all steps.
    """
    tokens = config.train.microbatch_tokens
    if isinstance(tokens, int):
        return tokens
    return max(
        min(split(batch // seq_len, data_ranks), max(1, MICROBATCH_LIMIT_TOKENS // seq_len)) * seq_len
        for batch, seq_len in config.batches_and_lengths
    )


def split(amount: int, shares: int) -> int:
    """Return the largest of ``shares`` parts of ``amount``: the quotient, rounded up."""
    return -(-amount // shares)
