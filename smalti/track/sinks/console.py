"""The console sink: one live line on a terminal, plain lines elsewhere, on stderr.

Without a terminal no carriage return or escape sequence is written. rich is imported only for the live line.
"""

import atexit
import sys
from collections.abc import Mapping
from datetime import datetime
from typing import Any, Protocol, TextIO

from smalti.base import clock
from smalti.base.env import no_color, plain_output
from smalti.base.units import format_count, format_frac, format_seconds
from smalti.track.names import EVAL, EVAL_EMA

_TASKS_PREFIX = "icl/metrics/"
_TASKS = 6
"""Most tasks in a line."""


class _Live(Protocol):
    def show(self, line: str, frac: float) -> None: ...
    def print(self, text: str) -> None: ...
    def close(self) -> None: ...


def wants_live(stream: TextIO) -> bool:
    """Return whether a line on ``stream`` may be rewritten: a terminal, no CI, no TERM=dumb."""
    return bool(getattr(stream, "isatty", lambda: False)()) and not plain_output()


class ConsoleSink:
    """Shows the loss, learning rate, speed and held-out results among the metrics of each logged step.

    ``every_s`` spaces the plain lines (the first, the last step and held-out results are always printed); the live
    line follows every update. Safe to close twice.
    """

    def __init__(
        self, total_steps: int, *, stream: TextIO | None = None, every_s: float = 10, live: bool | None = None
    ) -> None:
        self._stream = stream or sys.stderr
        self._total_steps = total_steps
        self._every_s = every_s
        self._last_s: float | None = None
        self._pending: str | None = None
        self._live: _Live | None = None
        if wants_live(self._stream) if live is None else live:
            self._live = _RichLine(self._stream)
        # A run that ends by an error does not call close, and must leave the terminal as it was.
        atexit.register(self.close)

    def update(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Show step ``step`` (1 is the first finished one) of the run."""
        if "loss/train/total" in metrics:
            line = format_step(step, self._total_steps, metrics)
            if self._live is not None:
                self._live.show(line, step / max(1, self._total_steps))
            else:
                self._plain(line, is_last=step >= self._total_steps)
        for text in (format_heldout(step, metrics), format_tasks(step, metrics)):
            if text is not None:
                self.message(text)

    def message(self, text: str) -> None:
        """Print a line above the live line: a checkpoint saved, an eval, a warning."""
        if self._live is not None:
            self._live.print(text)
        else:
            self._write(text)

    def close(self) -> None:
        """End the live line; a plain line held back by ``every_s`` is printed."""
        atexit.unregister(self.close)
        if self._live is not None:
            self._live.close()
            self._live = None
        elif self._pending is not None:
            self._write(self._pending)
        self._pending = None

    def _plain(self, line: str, *, is_last: bool) -> None:
        now = clock.now_s()
        if is_last or self._last_s is None or now - self._last_s >= self._every_s:
            self._write(line)
            self._last_s = now
            self._pending = None
        else:
            self._pending = line

    def _write(self, text: str) -> None:
        stamp = datetime.now().strftime("%H:%M:%S")
        self._stream.write("".join(f"{stamp} {line}\n" for line in text.splitlines()))
        self._stream.flush()


def format_step(step: int, total_steps: int, metrics: Mapping[str, Any]) -> str:
    """Return ``step 120/600  loss 3.214  lr 3.00e-03  16.1k tok/s  MFU 15.2%  ETA 2m10s``, without absent metrics."""
    parts = [f"step {step}/{total_steps}"]
    if (loss := _number(metrics.get("loss/train/total"))) is not None:
        parts.append(f"loss {loss:.3f}")
    lr = next((_number(value) for name, value in metrics.items() if name.startswith("lr-")), None)
    if lr is not None:
        parts.append(f"lr {lr:.2e}")
    if (rate := _number(metrics.get("throughput/tokens_per_sec"))) is not None:
        parts.append(f"{format_count(rate)} tok/s")
    if (mfu := _number(metrics.get("throughput/device/mfu"))) is not None:
        parts.append(f"MFU {format_frac(mfu)}")
    if (hours := _number(metrics.get("time/remaining_estimate"))) is not None:
        parts.append(f"ETA {format_seconds(hours * 3600)}")
    return "  ".join(parts)


def format_heldout(step: int, metrics: Mapping[str, Any]) -> str | None:
    """Return ``held-out at step 120  code: loss 2.101, 1.58 bits/byte  prose: ...``; None without such metrics."""
    texts_of: dict[str, list[str]] = {}
    for name, value in metrics.items():
        number = _number(value)
        if not name.startswith((EVAL, EVAL_EMA)) or number is None:
            continue
        prefix = EVAL if name.startswith(EVAL) else EVAL_EMA
        source, _, metric = name.removeprefix(prefix).rpartition("/")
        if metric == "LanguagePerplexity":  # the same as the loss
            continue
        texts = {"LanguageCrossEntropy": f"loss {number:.3f}", "bits_per_byte": f"{number:.3f} bits/byte"}
        text = texts.get(metric, f"{metric} {number:.4g}")
        texts_of.setdefault(source, []).append(text if prefix == EVAL else f"EMA {text}")
    if not texts_of:
        return None
    return "  ".join(
        [f"held-out at step {step}", *(f"{source}: {', '.join(texts)}" for source, texts in texts_of.items())]
    )


def format_tasks(step: int, metrics: Mapping[str, Any]) -> str | None:
    """Return ``tasks at step 120  copa: 55.0% [45.2%, 64.4%]  ...``, at most six; None without such metrics."""
    texts = []
    for name, value in metrics.items():
        error = _number(metrics.get(f"{name}/stderr"))
        if name.startswith(_TASKS_PREFIX) and error is not None:
            ends = [_number(metrics.get(f"{name}/{end}")) for end in ("low", "high")]
            spread = (
                " [{}, {}]".format(*(format_frac(end) for end in ends if end is not None)) if None not in ends else ""
            )
            texts.append(f"{name.rpartition('/')[2]}: {format_frac(value)}{spread}")
    if not texts:
        return None
    shown = texts[-_TASKS:]  # averages are at the end
    more = f"({len(texts) - len(shown)} more in metrics.jsonl)" if len(shown) < len(texts) else ""
    return "  ".join([f"tasks at step {step}", *shown, more]).rstrip()


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


class _RichLine:
    """One line at the bottom of the terminal, rewritten in place."""

    def __init__(self, stream: TextIO) -> None:
        from rich.console import Console
        from rich.live import Live

        self._console = Console(file=stream, no_color=no_color(), highlight=False, force_terminal=True)
        self._live = Live(console=self._console, auto_refresh=False, transient=False, redirect_stdout=False)
        self._live.start()
        self._console.show_cursor(True)  # rich hides it until stop(), which a killed process never reaches

    def show(self, line: str, frac: float) -> None:
        from rich.text import Text

        frac = min(1.0, max(0.0, frac))
        # The figures come first: the bar and the percentage take what a narrow terminal leaves.
        spare = self._console.width - len(line)
        width = min(12, spare - 7)
        text = Text(no_wrap=True, overflow="ellipsis")
        if width >= 4:
            filled = round(width * frac)
            text.append("█" * filled, style="cyan").append("░" * (width - filled), style="dim")
        if spare >= 6:
            text.append(f"{frac:4.0%}  " if width < 4 else f" {frac:4.0%}  ", style="bold")
        text.append(line)
        self._live.update(text, refresh=True)

    def print(self, text: str) -> None:
        self._console.print(text, markup=False)

    def close(self) -> None:
        self._live.stop()
