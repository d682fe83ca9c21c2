"""Measure a command with all of its child processes: wall time, processor time and peak memory. Linux only.

Processor time includes every descendant, also one that outlived its parent; memory is the sum of proportional set
sizes (a page shared by n processes counts 1/n in each), sampled, so a short peak can be missed. No descendant is left
running.
"""

import ctypes
import os
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

_PR_SET_CHILD_SUBREAPER = 36
_INTERVAL_S = 0.1
_SHOWN_BYTES = 4000


@dataclass(frozen=True)
class Cost:
    """Cost of one command."""

    wall_s: float
    cpu_s: float
    peak_bytes: int

    def figures(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


def measured(
    command: Sequence[str | Path],
    *,
    cores: Sequence[int],
    environment: Mapping[str, str] | None = None,
    folder: Path | None = None,
    limit_s: float = 1800,
) -> Cost:
    """Run ``command`` on these ``cores`` only and return its cost; RuntimeError with the end of its output if it fails.

    ``environment`` is added to the present one. Descendants that outlive the command become children of this process
    and are ended, so a caller must start no other process meanwhile; those that it has already are left alone.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    others = {child.pid for child in psutil.Process().children()}
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    words = ["taskset", "--cpu-list", ",".join(map(str, cores)), *map(str, command)]
    with tempfile.TemporaryFile() as output:
        begin = time.perf_counter()
        process = subprocess.Popen(
            words, stdout=output, stderr=output, cwd=folder, env={**os.environ, **(environment or {})}
        )
        process.returncode = -1  # waited for here, since Popen keeps no account of resources
        try:
            peak, status, cpu_s = _watch(process.pid, begin + limit_s)
            wall_s = time.perf_counter() - begin
        finally:
            rest_s = _end_children(others)
            libc.prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
        code = os.waitstatus_to_exitcode(status)
        if code:
            output.seek(max(0, output.seek(0, os.SEEK_END) - _SHOWN_BYTES))
            end = output.read().decode(errors="replace")
            raise RuntimeError(f"'{' '.join(words)}' ended with {code}:\n{end}")
    return Cost(wall_s, cpu_s + rest_s, peak)


def _watch(pid: int, deadline: float) -> tuple[int, int, float]:
    """Wait; peak of memory, exit status, and processor time of the process and all that it has waited for."""
    peak = 0
    while True:
        ended, status, usage = os.wait4(pid, os.WNOHANG)
        if ended:
            return peak, status, usage.ru_utime + usage.ru_stime
        if time.perf_counter() > deadline:
            raise RuntimeError("the command was still running at its limit of time")
        peak = max(peak, _memory_bytes(pid))
        time.sleep(_INTERVAL_S)


def _memory_bytes(pid: int) -> int:
    """Return the memory of the process and its descendants, without orphans, which are few."""
    total = 0
    try:
        first = psutil.Process(pid)
        for process in (first, *first.children(recursive=True)):
            try:
                total += int(process.memory_full_info().pss)
            except (psutil.NoSuchProcess, psutil.AccessDenied, ProcessLookupError):
                continue
    except psutil.NoSuchProcess:  # it ended between wait4 and here: the next turn of the watch sees that
        pass
    return total


def _end_children(others: set[int]) -> float:
    """End what is left, and return the processor time of all that nobody else has waited for."""
    cpu_s = 0.0
    while left := [child for child in psutil.Process().children() if child.pid not in others]:
        for child in left:
            child.kill()
            _, _, usage = os.wait4(child.pid, 0)
            cpu_s += usage.ru_utime + usage.ru_stime
    return cpu_s
