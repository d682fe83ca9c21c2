"""What the cgroups of this process allow it, as a container or a Slurm job sets them; on Linux alone."""

import os
from pathlib import Path

_NO_LIMIT = 1 << 62  # what cgroup v1 writes where there is none is about 2^63


def main_memory_bytes() -> int:
    """Bytes of main memory that this process and those beside it may have: the machine's, or the cgroups' limit."""
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min(machine, memory_limit_bytes() or machine)


def memory_limit_bytes() -> int | None:
    """The lowest memory limit of this process's cgroups and their parents (v2, else v1)."""
    found = [
        int(text) for text in cgroup("memory.max", "memory", "memory.limit_in_bytes") if text.isdigit()
    ]  # "max" is no limit
    return min((limit for limit in found if limit < _NO_LIMIT), default=None)


def cgroup(v2_name: str, controller: str, v1_name: str, root: Path = Path("/sys/fs/cgroup")) -> list[str]:
    """What the files of this process's cgroup and all above it say."""
    try:
        lines = Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "" and v2_name:
            found += _upwards(root, path, v2_name)
        elif controller and controller in controllers.split(","):
            found += _upwards(root / controllers, path, v1_name)
    return found


def _upwards(root: Path, path: str, name: str) -> list[str]:
    parts = [part for part in path.split("/") if part and part != ".."]
    folders = [root.joinpath(*parts[:depth]) for depth in range(len(parts), -1, -1)]
    found = []
    for folder in folders:
        try:
            found.append((folder / name).read_text(encoding="utf-8").strip())
        except OSError:
            continue
    return found
