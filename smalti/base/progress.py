"""The callback by which long work reports its progress to the caller."""

from typing import Protocol


class Progress(Protocol):
    """``progress(what, done, total)``, called often; ``unit`` is given where parts are counted instead of bytes."""

    def __call__(self, what: str, done: int, total: int, unit: str | None = None, /) -> None: ...


def no_progress(what: str, done: int, total: int, unit: str | None = None, /) -> None:
    """Report nothing."""
