"""Processes: what identifies one, its end with its parent, and its priority."""

import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path

import psutil

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


def identity(pid: int) -> str | None:
    """Return what identifies a running process for good, unlike its number; None where it has ended, as a zombie too.

    On Linux the start in ticks since the boot: a time of day changes with the clock.
    """
    if not sys.platform.startswith("linux"):
        try:
            process = psutil.Process(pid)
            return None if process.status() == psutil.STATUS_ZOMBIE else str(process.create_time())
        except psutil.Error:
            return None
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else f"{_boot_id()}/{fields[19]}"


def is_running(pid: int | None, process: str | None) -> bool:
    """Return whether the process ``pid`` that had this ``identity`` still runs."""
    return pid is not None and process is not None and identity(pid) == process


def age_s(process: str | None) -> float | None:
    """Return the seconds since the process of an ``identity`` was started, whatever has been done to the clock.

    None for one that was started before the last boot, and where the system does not give it.
    """
    boot, _, ticks = (process or "").partition("/")
    if not sys.platform.startswith("linux") or boot != _boot_id() or not ticks.isdigit():
        return None
    return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - int(ticks) / os.sysconf("SC_CLK_TCK"))


@cache
def _boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
