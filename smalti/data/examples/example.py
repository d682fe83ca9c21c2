"""``Example``: the tokens of one row of tuning data."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Example:
    """One sequence (supervised tuning), or two with a common prompt: the chosen, then the rejected answer."""

    sequences: tuple[tuple[Sequence[int], Sequence[int]], ...]
    """(ids, mask) of each sequence; mask 1 on tokens in the loss, never on the first token."""
    values: Mapping[str, float] = field(default_factory=dict)
    """Name -> number that the loss reads (``label``, ``margin``); the same names in all examples of a folder."""
    id: str = ""
    """Id of the example: its ``id`` column, or file and line."""
    n_loss_bytes: int = 0
    """UTF-8 bytes of the text in the loss, the denominator of bits per byte; 0: unknown."""
