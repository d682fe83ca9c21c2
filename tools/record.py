"""Writes a measured result to ``bench/results/<name>.json`` with the commit, the date and the machine it comes from.

Used by the proofs (through the ``record`` fixture of tests/conftest.py) and by the scripts in bench/. Standard library
only, so that it works with any interpreter. It promises that figures of two commits are never mixed in one file: the
same commit adds to the file, another one replaces it.
"""

import json
import os
import platform
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results"


def record(name: str, figures: dict[str, Any], folder: Path = RESULTS) -> Path:
    """Merge ``figures`` into ``folder/name.json`` and return its path; a name is letters, digits, '-', '_' and '.'."""
    if not name or not all(letter.isalnum() or letter in "-_." for letter in name):
        raise ValueError(f"'{name}' cannot be the name of a result; use letters, digits, '-', '_' and '.'")
    path = folder / f"{name}.json"
    commit = commit_of(ROOT)
    before: dict[str, Any] = {}
    if path.exists():
        found = json.loads(path.read_text())
        before = found["figures"] if found.get("commit") == commit else {}
    result = {
        "name": name,
        "commit": commit,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine(),
        "figures": {**before, **figures},
    }
    folder.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    temporary.write_text(json.dumps(result, indent=2, sort_keys=False, default=str) + "\n")
    temporary.replace(path)
    return path


def commit_of(root: Path) -> str:
    """The commit of the checkout, with ``-dirty`` when a tracked file (other than a result) differs; or 'unknown'.

    A copy without its .git is told it by BENCH_COMMIT, with ``-dirty`` where it was.
    """
    if "BENCH_COMMIT" in os.environ:
        return os.environ["BENCH_COMMIT"]
    head = _output(["git", "-C", str(root), "rev-parse", "HEAD"])
    if head is None:
        return "unknown"
    changed = _output(
        ["git", "-C", str(root), "status", "--porcelain", "--untracked-files=no", "--", ".", ":!bench/results"]
    )
    return head + ("-dirty" if changed else "")


def machine() -> dict[str, Any]:
    """What a figure depends on: processor, cores usable, memory, GPU, Python and torch. Never a host's name."""
    return {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_bytes": _memory_bytes(),
        "gpu": _output(["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": _torch_version(),
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.machine()


def _memory_bytes() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        return None


def _torch_version() -> str | None:
    if "torch" in sys.modules:
        return str(sys.modules["torch"].__version__)
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("torch")
    except PackageNotFoundError:
        return None


def _output(command: list[str]) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None
