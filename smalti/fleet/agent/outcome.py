"""How an attempt ended, and its message on the terminal."""

import sys
from dataclasses import dataclass
from typing import Literal

from smalti.config.restart import Cause
from smalti.track.sinks.console import wants_live

PAUSES = ("slow", "grow", "leave")
"""Causes that are no faults: the attempt was ended after a save."""
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
    cause: Cause | Literal["oom", "grow", "leave"] | None = None
    """``oom``: a rank ran out of memory; ``grow``: the run is to continue on all of its ranks; ``leave``: without a
    node that is to be stopped; else a ``Cause`` of train.restart. None: no fault."""
    rank: int | None = None
    """The rank that caused it."""
    node: str | None = None
    """Its node, if that is not this one."""
    step: int = 0
    """Finished steps of the run."""
    traceback: str | None = None
    """Of a rank that ended by an exception, if its log has it."""
    next_microbatch_tokens: int | None = None
    """Microbatch of the next attempt after ``oom``; None: there is no smaller one."""
    restarts: bool = False
    """The agent starts the next attempt."""
    next_ranks: int | None = None
    """Its number of ranks if that changes."""
    wait_s: float = 0.0
    """Seconds until then."""


def announce(outcome: Outcome) -> None:
    """Print on stderr how the attempt ended, unless rank 0 has.

    A rank that was killed leaves its progress line unfinished and the cursor hidden; both are restored here.
    """
    if outcome.printed and not outcome.restarts:
        return
    if wants_live(sys.stderr):
        sys.stderr.write(f"\n{_SHOW_CURSOR}")
    lines = [f"{'note' if outcome.restarts and outcome.cause in PAUSES else 'error'}: {outcome.reason}"]
    if outcome.details and not outcome.printed:
        lines += ["last lines of its log:", *(f"  {line}" for line in outcome.details)]
    lines += [f"hint: {outcome.hint}"] if outcome.hint else []
    sys.stderr.write("\n".join(lines) + "\n")
