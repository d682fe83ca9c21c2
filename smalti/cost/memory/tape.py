"""``Tape``: simulates which tensors are alive in a pass, and records the peak; and the shape of a microbatch."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

from smalti.config.adapter import AdapterConfig


class Tape:
    """Bytes of live tensors by name.

    ``keeps``: autograd holds saved tensors, as without recomputation. ``frozen``: weights have no gradients.
    """

    def __init__(self, *, keeps: bool = True, frozen: bool = False) -> None:
        self.keeps, self.frozen = keeps, frozen
        self.alive: dict[str, float] = {}
        self.saved: set[str] = set()
        self.most_bytes = 0.0
        self.at_most: dict[str, float] = {}
        self._total = 0.0

    def new(self, name: str, size: float) -> None:
        """Allocate a tensor."""
        assert name not in self.alive, f"{name} is alive"
        if size <= 0 or (self.frozen and name.startswith(("w.", "d.head"))):
            return
        self.alive[name] = size
        self._total += size
        if self._total > self.most_bytes:
            self.most_bytes, self.at_most = self._total, dict(self.alive)

    def save(self, *names: str) -> None:
        """Save these tensors for the backward pass."""
        if self.keeps:
            self.saved.update(name for name in names if name in self.alive)

    def drop(self, *names: str) -> None:
        """Release these tensors, except saved ones."""
        for name in names:
            if name in self.alive and name not in self.saved:
                self._total -= self.alive.pop(name)

    def used(self, *names: str) -> None:
        """Release saved tensors, after the backward pass has used them."""
        self.saved.difference_update(names)
        self.drop(*names)

    @contextmanager
    def during(self, **sizes: float) -> Iterator[None]:
        """Allocate tensors for the duration of the context."""
        for name, size in sizes.items():
            self.new(name, size)
        yield
        self.drop(*sizes)

    def begin(self) -> None:
        """Begin a new phase: reset the peak to what is alive now."""
        self.most_bytes, self.at_most = self._total, dict(self.alive)


@dataclass(frozen=True)
class MicrobatchShape:
    """A microbatch on one rank."""

    rows: int
    """Number of sequences."""
    seq_len: int
    """Tokens of a sequence."""
    compute_bytes: int
    """Bytes of one value of an activation: 2 or 4."""
    device: Literal["cpu", "cuda"]
    documents: bool = False
    """True if rows are packed and attention stays within documents."""
    tensor: int = 1
    """Tensor parallel size."""
    sequence: int = 1
    """Sequence parallel size."""
    expert: int = 1
    """Expert parallel size."""
    adapter: AdapterConfig | None = None
    """The adapters that are trained, if not all weights are."""
    compiled: bool = False
    """True under ``torch.compile``, on CUDA."""

    @property
    def tokens(self) -> float:
        """Tokens on this rank, outside attention."""
        return self.rows * self.seq_len / self.sequence
