"""Groups byte ranges into requests: neighbouring ranges share one, long ranges are split."""

from collections.abc import Sequence
from typing import NamedTuple

from smalti.data.fetch.files import Range

GAP_BYTES = 16 << 10
"""Two ranges at most this far apart share a request: reading the gap costs less than a second request."""
MAX_REQUEST_BYTES = 8 << 20
"""Longer requests are split, so that one timeout suits all and long files are read in parallel."""


class Request(NamedTuple):
    """A range of bytes of a file that is sent as one request."""

    name: str
    start: int
    length: int


class RequestPlan:
    """The requests for a list of ranges, and the place of each range in their responses."""

    def __init__(self, ranges: Sequence[Range]) -> None:
        self.requests: list[Request] = []
        self._ranges = ranges
        self._where: list[tuple[int, int]] = [(0, 0)] * len(ranges)
        """(first request, offset in it) of each range; (-1, 0) for an empty one."""
        order = sorted(range(len(ranges)), key=lambda index: ranges[index][:2])
        start = end = 0
        name: str | None = None
        for index in order:
            wanted = ranges[index]
            if wanted.length == 0:
                self._where[index] = (-1, 0)
                continue
            stop = wanted.start + wanted.length
            is_near = wanted.name == name and wanted.start <= end + GAP_BYTES
            if not is_near or max(stop, end) - start > MAX_REQUEST_BYTES:
                self._add(name, start, end)
                name = wanted.name
                start = wanted.start
                end = stop
            end = max(end, stop)
            self._where[index] = (len(self.requests), wanted.start - start)
        self._add(name, start, end)

    def _add(self, name: str | None, start: int, end: int) -> None:
        if name is not None:
            step = MAX_REQUEST_BYTES
            self.requests += [Request(name, at, min(step, end - at)) for at in range(start, end, step)]

    def parts(self, responses: Sequence[memoryview]) -> list[memoryview]:
        """Return the bytes of each range, in the order given."""
        parts = []
        for (first, begin), wanted in zip(self._where, self._ranges, strict=True):
            end = begin + wanted.length
            if first < 0:
                parts.append(memoryview(b""))
            elif end <= len(responses[first]):
                parts.append(responses[first][begin:end])
            else:  # a range longer than a request starts at the beginning of its first request
                last = first + -(-end // MAX_REQUEST_BYTES)
                parts.append(memoryview(b"".join(responses[first:last]))[begin:end])
        return parts
