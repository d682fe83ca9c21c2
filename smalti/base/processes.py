"""Child processes: their end with their parent, and their priority."""

import ctypes
import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress

_PR_SET_PDEATHSIG = 1


def die_with_parent(number: signal.Signals, parent: int | None = None) -> Callable[[], None] | None:
    """Return a ``preexec_fn`` with which the kernel sends the child ``number`` when its parent ends in any manner.

    Linux only; None elsewhere. "Parent" is the thread that starts the child. A child may also call the function itself,
    with the process id of its ``parent``.
    """
    if not sys.platform.startswith("linux"):
        return None
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    parent = os.getpid() if parent is None else parent

    def arm() -> None:
        prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0)
        if os.getppid() != parent:  # it ended before prctl
            os._exit(1)

    return arm


def use_idle_priority() -> None:
    """Give this process and the threads that it starts the lowest priority; on Linux only idle processor time."""
    os.nice(19)
    with suppress(AttributeError, OSError):  # other systems, and containers that forbid it
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
