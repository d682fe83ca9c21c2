"""Which requests bring which ranges: neighbours together, long ones in pieces."""

from collections.abc import Sequence
from typing import NamedTuple

from smalti.data.fetch.files import Range

GAP_BYTES = 16 << 10
"""Two ranges with no more between them come in one request: reading the gap costs less than asking again."""
PIECE_BYTES = 8 << 20
"""No request is for more, so that its time-out means the same everywhere and long files come in parallel."""


class Piece(NamedTuple):
    """One request."""

    name: str
    start: int
    length: int


class Plan:
    """Requests for some ranges, and how their answers are put together again."""

    def __init__(self, wanted: Sequence[Range]) -> None:
        self.pieces: list[Piece] = []
        self._where: list[tuple[int, int]] = [(0, 0)] * len(wanted)
        """Of each range: its first piece and where it begins in it; (-1, 0) for an empty one."""
        self._wanted = wanted
        order = sorted(range(len(wanted)), key=lambda index: wanted[index][:2])
        start = end = 0
        name: str | None = None
        for index in order:
            one = wanted[index]
            if one.length == 0:
                self._where[index] = (-1, 0)
                continue
            stop = one.start + one.length
            apart = one.name != name or one.start > end + GAP_BYTES or max(stop, end) - start > PIECE_BYTES
            if apart:
                self._cut(name, start, end)
                name, start, end = one.name, one.start, stop
            end = max(end, stop)
            self._where[index] = (len(self.pieces), one.start - start)
        self._cut(name, start, end)

    def _cut(self, name: str | None, start: int, end: int) -> None:
        if name is not None:
            self.pieces += [Piece(name, at, min(PIECE_BYTES, end - at)) for at in range(start, end, PIECE_BYTES)]

    def parts(self, answers: Sequence[memoryview]) -> list[memoryview]:
        """The bytes of each range, in the order asked."""
        found = []
        for (piece, begin), one in zip(self._where, self._wanted, strict=True):
            if piece < 0:
                found.append(memoryview(b""))
            elif begin + one.length <= len(answers[piece]):
                found.append(answers[piece][begin : begin + one.length])
            else:  # longer than a piece; such a range begins its first one
                last = piece + -(-(begin + one.length) // PIECE_BYTES)
                found.append(memoryview(b"".join(answers[piece:last]))[begin : begin + one.length])
        return found
