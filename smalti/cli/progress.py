"""Progress of a command on stderr: one line, rewritten in place on a terminal, else new lines at growing intervals.

Short work prints nothing, and a terminal is left as it was.
"""

import sys

from smalti.base.clock import now_s
from smalti.base.env import plain_output
from smalti.base.units import format_byte_rate, format_bytes, format_count, format_frac, format_seconds

_LIVE_S = 0.2
_PLAIN_S = (5.0, 60.0)
"""Seconds to the first plain line; each next takes twice as long, to a minute at most."""


class ProgressLine:
    """A line of progress: ``with ProgressLine("tokens") as progress: progress("code", done, total)``.

    Values of the unit ``bytes`` get a prefix (MB, GB).

    Work counted in other pieces names them: ``progress("writing", done, total, "source")``.
    """

    def __init__(self, unit: str = "bytes", *, rate: bool = False) -> None:
        """``rate``: add the rate since the work began, and the time left at that rate."""
        self._unit = unit
        self._rate = rate
        self._began: tuple[str, int, float] | None = None
        self._live = sys.stderr.isatty() and not plain_output()
        self._wait_s = _LIVE_S if self._live else _PLAIN_S[0]
        self._last_s = now_s()
        self._shown = False

    def __enter__(self) -> "ProgressLine":
        return self

    def __exit__(self, *error: object) -> None:
        self._clear()

    def __call__(self, what: str, done: int, total: int, piece: str | None = None) -> None:
        """Report that ``done`` of ``total`` are done; when all are, the live line is removed.

        ``piece`` names one of few large pieces: the line then says which of them is being worked on.
        """
        if self._began is None or self._began[0] != what:
            self._began = (what, done, now_s())
        if done == total:
            self._clear()
            return
        if now_s() - self._last_s < self._wait_s:
            return
        if not self._live:
            self._wait_s = min(2 * self._wait_s, _PLAIN_S[1])
        self._last_s = now_s()
        self._shown = True
        frac = min(1.0, done / max(total, 1))  # an estimated total may be exceeded
        line = f"{what}: {self._amount(done)} of {self._amount(total, self._unit)}, {format_frac(frac)}"
        if self._rate and piece is None:
            line += self._rate_and_rest(done, total, self._began)
        if piece is not None:
            line = f"{what}: {piece} {done + 1:,} of {total:,}"
        start, end = ("\r\x1b[K", "") if self._live else ("", "\n")
        print(start + line, end=end, file=sys.stderr, flush=True)

    def _rate_and_rest(self, done: int, total: int, began: tuple[str, int, float]) -> str:
        per_s = (done - began[1]) / max(now_s() - began[2], 1e-9)
        if per_s <= 0:
            return ""
        rate = format_byte_rate(per_s) if self._unit == "bytes" else f"{format_count(per_s)} {self._unit}/s"
        return f", {rate}, {format_seconds(max(0, total - done) / per_s)} left"

    def _amount(self, value: int, unit: str = "") -> str:
        return format_bytes(value) if self._unit == "bytes" else f"{format_count(value)} {unit}".rstrip()

    def _clear(self) -> None:
        if self._live and self._shown:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
        self._shown = False
