"""A ledger of what is alive, event after event, and the moment of the most; and what one microbatch is to it."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal


class Tape:
    """Bytes by name. ``keeps``: autograd holds what ``save`` is told of, as in a pass that is not recomputed."""

    def __init__(self, *, keeps: bool = True) -> None:
        self.keeps = keeps
        self.alive: dict[str, float] = {}
        self.saved: set[str] = set()
        self.most_bytes = 0.0
        self.at_most: dict[str, float] = {}
        self._total = 0.0

    def new(self, name: str, size: float) -> None:
        """A tensor comes into being."""
        assert name not in self.alive, f"{name} is alive"
        if size <= 0:
            return
        self.alive[name] = size
        self._total += size
        if self._total > self.most_bytes:
            self.most_bytes, self.at_most = self._total, dict(self.alive)

    def save(self, *names: str) -> None:
        """Autograd keeps these tensors for the backward pass."""
        if self.keeps:
            self.saved.update(name for name in names if name in self.alive)

    def drop(self, *names: str) -> None:
        """Nothing but autograd holds these tensors any longer."""
        for name in names:
            if name in self.alive and name not in self.saved:
                self._total -= self.alive.pop(name)

    def used(self, *names: str) -> None:
        """The backward pass has read what autograd kept."""
        self.saved.difference_update(names)
        self.drop(*names)

    @contextmanager
    def during(self, **sizes: float) -> Iterator[None]:
        """Tensors that are gone at the end."""
        for name, size in sizes.items():
            self.new(name, size)
        yield
        self.drop(*sizes)

    def begin(self) -> None:
        """Forget the moment of the most so far: a new phase begins with what is alive."""
        self.most_bytes, self.at_most = self._total, dict(self.alive)


@dataclass(frozen=True)
class MicrobatchShape:
    """One microbatch on one rank."""

    rows: int
    """Sequences."""
    seq_len: int
    """Tokens of each."""
    compute_bytes: int
    """Of an activation: 2 or 4."""
    device: Literal["cpu", "cuda"]
    documents: bool = False
    """Rows are packed, and attention stays inside documents."""
    tensor: int = 1
    """Ranks that share each matrix."""
    sequence: int = 1
    """Ranks that share each row."""
    expert: int = 1
    """Ranks that share the experts."""
    compiled: bool = False
    """By ``torch.compile``, on CUDA."""

    @property
    def tokens(self) -> float:
        """On this rank, outside attention."""
        return self.rows * self.seq_len / self.sequence
