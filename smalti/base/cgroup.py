"""Limits that the cgroups of this process set, in a container or a Slurm job; Linux only."""

import os
from pathlib import Path

_NO_LIMIT = 1 << 62  # what cgroup v1 writes where there is none is about 2^63


def main_memory_bytes() -> int:
    """Return the bytes of main memory for this process and its cgroup: the machine's, or the cgroup's limit."""
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min(machine, memory_limit_bytes() or machine)


def memory_limit_bytes() -> int | None:
    """Return the lowest memory limit of this process's cgroups and their parents (v2, else v1), in bytes."""
    limits = [
        int(text) for text in cgroup("memory.max", "memory", "memory.limit_in_bytes") if text.isdigit()
    ]  # "max" is no limit
    return min((limit for limit in limits if limit < _NO_LIMIT), default=None)


def cgroup(v2_name: str, controller: str, v1_name: str, root: Path = Path("/sys/fs/cgroup")) -> list[str]:
    """Return the contents of a file in this process's cgroup and all its parents."""
    try:
        lines = Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    texts: list[str] = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "" and v2_name:
            texts += _upwards(root, path, v2_name)
        elif controller and controller in controllers.split(","):
            texts += _upwards(root / controllers, path, v1_name)
    return texts


def _upwards(root: Path, path: str, name: str) -> list[str]:
    parts = [part for part in path.split("/") if part and part != ".."]
    folders = [root.joinpath(*parts[:depth]) for depth in range(len(parts), -1, -1)]
    texts: list[str] = []
    for folder in folders:
        try:
            texts.append((folder / name).read_text(encoding="utf-8").strip())
        except OSError:
            continue
    return texts
