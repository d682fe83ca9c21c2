"""How an attempt ended, and its message on the terminal."""

import sys
from dataclasses import dataclass

from smalti.track.sinks.console import wants_live

_SHOW_CURSOR = "\x1b[?25h"


@dataclass(frozen=True)
class Outcome:
    """The end of an attempt: exit code and reason."""

    code: int
    reason: str
    """One line: which rank, how, after which step."""
    details: tuple[str, ...] = ()
    """Last lines of the log of the rank that caused it, unless rank 0 has printed the error."""
    hint: str | None = None
    printed: bool = False
    """Rank 0 has printed the error on the terminal."""
    cause: str | None = None
    """``oom``: a rank ran out of memory."""
    next_microbatch_tokens: int | None = None
    """Microbatch of the next attempt after ``oom``; None: there is no smaller one."""


def announce(outcome: Outcome) -> None:
    """Print on stderr how the attempt ended, unless rank 0 has.

    A rank that was killed leaves its progress line unfinished and the cursor hidden; both are restored here.
    """
    if outcome.printed:
        return
    if wants_live(sys.stderr):
        sys.stderr.write(f"\n{_SHOW_CURSOR}")
    lines = [f"error: {outcome.reason}"]
    if outcome.details:
        lines += ["last lines of its log:", *(f"  {line}" for line in outcome.details)]
    lines += [f"hint: {outcome.hint}"] if outcome.hint else []
    sys.stderr.write("\n".join(lines) + "\n")
