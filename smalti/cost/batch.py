"""How a batch is cut: the rows of a rank, in passes of one microbatch. The same for memory, time and network.

Promises: what the trainer does with whole rows; a rank that is short of rows passes empty ones, so
every rank counts as the fullest.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Rows:
    """Of one rank in one step."""

    seq_len: int
    """Tokens of a row."""
    of_rank: int
    """In the step."""
    of_pass: int
    """In one forward pass, at most."""

    @property
    def passes(self) -> int:
        """Microbatches of the step; the last may hold less."""
        return split(self.of_rank, self.of_pass)


def rows_of(batch_tokens: int, seq_len: int, data_ranks: int, microbatch_tokens: int) -> Rows:
    """Cut a batch for ranks that read different rows."""
    rows = max(1, split(batch_tokens // seq_len, data_ranks))
    return Rows(seq_len, rows, max(1, min(microbatch_tokens // seq_len, rows)))


def split(amount: int, shares: int) -> int:
    """The largest share."""
    return -(-amount // shares)
