"""What a hang looked like, recorded before its ranks are killed: slots, states, stacks, memory, disk, network, kernel.

Stacks come from outside by py-spy where it is installed, else from faulthandler in the ranks (SIGUSR2), which needs no
GIL. A rank that is stopped gives none of the second kind.
"""

import re
import shutil
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from smalti.base import store
from smalti.base.clock import utc_text
from smalti.base.errors import SmaltiError
from smalti.fleet.launch.local import STACK_SIGNAL, LocalRank, Rank, stack_file
from smalti.track import collectives
from smalti.track.collectives import Counts
from smalti.track.progress import Progress

_STACK_WAIT_S = 0.5
_ANSWER_S = 1.0
_TOOL_S = 3.0
_KERNEL_LINES = 30
_STARTED_BY_PYTHON = re.compile(r"threading\.py.* in _bootstrap|_bootstrap \(.*threading\.py")
"""The first frame of a thread, as faulthandler and py-spy print it. Processes of multiprocessing have one too."""


class Look(NamedTuple):
    """What ranks are in, seen from outside."""

    stacks: dict[int, str]
    """Python stacks by rank; empty of a rank that gave none."""
    counts: dict[int, Counts]
    """Collectives that a rank has started by now, of the ranks that answer."""


def look(ranks: Sequence[LocalRank], log_folder: Path) -> Look:
    """Return what the running ranks of this node are in."""
    running = [rank for rank in ranks if rank.code is None]
    counts = collectives.ask({rank.rank: rank.nonce for rank in running}, _ANSWER_S)
    return Look(_stacks_of(running, log_folder), counts)


def _stacks_of(running: Sequence[LocalRank], log_folder: Path) -> dict[int, str]:
    tool = shutil.which("py-spy")
    if tool is not None:
        stacks = {rank.rank: _by_tool(tool, rank.pid) for rank in running}
        if all(stacks.values()):
            return stacks
    for rank in running:
        with suppress(OSError):
            if stack_file(log_folder, rank.rank).exists():  # without it the signal would end the rank
                rank.send(STACK_SIGNAL)
    time.sleep(_STACK_WAIT_S)
    return {rank.rank: _read(stack_file(log_folder, rank.rank)) for rank in running}


def waits_in_collective(stacks: str) -> bool:
    """Return whether a thread of a rank is in torch.distributed, by its stacks as py-spy or faulthandler print them.

    Threads that Python has started do not count: a thread that saves a checkpoint waits for those of the other ranks.
    """
    threads = re.split(r"^(?=(?:Current t|T)hread )", stacks, flags=re.MULTILINE)
    return any("torch/distributed/" in thread and not _STARTED_BY_PYTHON.search(thread) for thread in threads)


def write(folder: Path, slots: Sequence[Progress], ranks: Sequence[Rank], seen: Look) -> str | None:
    """Write ``evidence-hang.json`` in a log folder; returns its name, None where the disk takes no file."""
    disk: dict[str, Any] = {}
    with suppress(OSError):
        disk = psutil.disk_usage(str(folder))._asdict()
    value = {
        "time": utc_text(),
        "now_ns": time.monotonic_ns(),
        "slots": [{**asdict(slot), "phase": slot.phase.name.lower()} for slot in slots],
        "ranks": [
            {**_process(rank), "stack": seen.stacks.get(rank.rank, ""), "collectives": seen.counts.get(rank.rank, {})}
            for rank in ranks
        ],
        "memory_bytes": psutil.virtual_memory()._asdict(),
        "disk_bytes": disk,
        "network": psutil.net_io_counters()._asdict(),
        "kernel": _kernel_lines(),
    }
    try:
        store.write_json(folder / "evidence-hang.json", value)
    except (OSError, SmaltiError):
        return None
    return "evidence-hang.json"


def _process(rank: Rank) -> dict[str, Any]:
    facts: dict[str, Any] = {"rank": rank.rank, "pid": rank.pid, "code": rank.code}
    if not isinstance(rank, LocalRank):
        return {**facts, "node": rank.node}
    with suppress(psutil.Error):
        process = psutil.Process(rank.pid)
        cpu = process.cpu_times()
        facts |= {"state": process.status(), "memory_bytes": process.memory_info().rss, "cpu_s": cpu.user + cpu.system}
    return facts


def _by_tool(tool: str, pid: int) -> str:
    return _output([tool, "dump", "--nonblocking", "--pid", str(pid)])


def _kernel_lines() -> list[str]:
    return _output(["dmesg"]).splitlines()[-_KERNEL_LINES:] if shutil.which("dmesg") else []


def _output(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TOOL_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
