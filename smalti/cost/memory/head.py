"""Memory of the loss: the output head in tiles, as ``smalti/train/cross_entropy.py`` splits it.

Counts the peak bytes besides the hidden states, and what remains for the backward pass. The gradient is computed in the
forward pass, so both of its parts exist from there on.
"""

from dataclasses import dataclass

from smalti.config.train import LossConfig
from smalti.cost.memory.tape import Tape


def resolved_tile_bytes(loss: LossConfig) -> int:
    """Return ``chunk_bytes`` of a config that was resolved for a device."""
    assert loss.chunk_bytes != "auto", "train.loss.chunk_bytes is auto: call config.on(device) first"
    return loss.chunk_bytes


@dataclass(frozen=True)
class Head:
    """The output matrix [vocabulary, hidden] over a number of tokens."""

    tokens: float
    hidden: int
    vocabulary: float
    """Entries on this rank: the tensor axis splits them."""
    compute_bytes: int
    soft_cap: bool
    chunk_bytes: int
    frozen: bool = False
    """True if the matrix has no gradient."""

    @property
    def bytes_each(self) -> int:
        """Bytes per logit: itself, in fp32 too, and its probability; with a soft cap three numbers in fp32."""
        return 12 if self.soft_cap else 8 if self.compute_bytes == 4 else 10

    def cut(self) -> tuple[float, float]:
        """Return the tokens and vocabulary entries of a tile, as ``cross_entropy._cut`` does."""
        logits = self.chunk_bytes // self.bytes_each
        if self.tokens * self.vocabulary <= logits:
            return self.tokens, self.vocabulary
        if self.compute_bytes != 4 and not self.frozen:
            sum_bytes = self.vocabulary * self.hidden * (4 + self.compute_bytes)
            if 2 * sum_bytes > self.chunk_bytes:
                entries = max(64, logits // self.tokens // 64 * 64)
                return self.tokens, min(entries, self.vocabulary)
            logits = int(self.chunk_bytes - sum_bytes) // self.bytes_each
        return max(1, logits // self.vocabulary), self.vocabulary

    def forward(self, tape: Tape) -> None:
        """Record the loss, after which ``d.hidden`` and ``d.head``, in the compute format, are left."""
        (tokens, entries), c = self.cut(), self.compute_bytes
        wide_hidden, wide_weight = c != 4 and entries < self.vocabulary, c != 4 and tokens < self.tokens
        row, weight, tile = self.tokens * self.hidden, self.vocabulary * self.hidden, tokens * entries
        tape.new("d.hidden wide" if wide_hidden else "d.hidden", row * (4 if wide_hidden else c))
        tape.new("d.head wide" if wide_weight else "d.head", weight * (4 if wide_weight else c))
        with tape.during(tile=tile * self.bytes_each):
            pass
        tape.new("tile.rows", tokens * self.hidden * c)
        with tape.during(tile=tile * (4 + c % 4 + 4 * self.soft_cap)):
            pass
        tape.new("tile", tile * c)
        with tape.during(tile_product=tokens * self.hidden * c if wide_hidden else 0):
            pass
        with tape.during(tile_product=entries * self.hidden * c if wide_weight else 0):
            pass
        tape.drop("tile", "tile.rows")
        if wide_hidden:
            tape.new("d.hidden", row * c)
        if wide_weight:
            tape.new("d.head", weight * c)
        tape.drop("d.hidden wide", "d.head wide")
