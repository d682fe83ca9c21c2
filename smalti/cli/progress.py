"""How far a command is: one line on stderr, rewritten in place on a terminal, else a new one every few seconds.

Promises: short work shows none; nothing of it reaches stdout; a terminal is left as it was found.
"""

import sys

from smalti.base.clock import now_s
from smalti.base.env import plain_output
from smalti.base.units import format_bytes, format_count, format_frac

_LIVE_S, _PLAIN_S = 0.2, 5.0


class ProgressLine:
    """``with ProgressLine("tokens") as tell: tell("code", done, total)``; ``bytes`` are written as such."""

    def __init__(self, unit: str = "bytes") -> None:
        self._unit = unit
        self._live = sys.stderr.isatty() and not plain_output()
        self._last_s = now_s()
        self._shown = False

    def __enter__(self) -> "ProgressLine":
        return self

    def __exit__(self, *error: object) -> None:
        self._clear()

    def __call__(self, what: str, done: int, total: int) -> None:
        """Tell that ``done`` of ``total`` are done; the end of ``what`` takes its live line away."""
        if done == total:
            self._clear()
            return
        if now_s() - self._last_s < (_LIVE_S if self._live else _PLAIN_S):
            return
        self._last_s = now_s()
        self._shown = True
        frac = min(1.0, done / max(total, 1))  # a total that was estimated may be passed
        line = f"{what}: {self._amount(done)} of {self._amount(total, self._unit)}, {format_frac(frac)}"
        start, end = ("\r\x1b[K", "") if self._live else ("", "\n")
        print(start + line, end=end, file=sys.stderr, flush=True)

    def _amount(self, value: int, unit: str = "") -> str:
        return format_bytes(value) if self._unit == "bytes" else f"{format_count(value)} {unit}".rstrip()

    def _clear(self) -> None:
        if self._live and self._shown:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
        self._shown = False
