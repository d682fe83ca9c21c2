"""Write a measured result to ``bench/results/<name>.json`` with its command, commit, date and machine.

Used by the proofs (fixture ``record`` of tests/conftest.py) and by the scripts in bench/. Standard library only, so
that it works with any interpreter. The code of a result is in the named commit: a changed checkout raises
``Uncommitted``, before anything is measured. The same commit adds to a file, another one replaces it.
"""

import argparse
import json
import os
import platform
import shlex
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results"
CODE = ("smalti", "tests", "tools", "bench", "pyproject.toml", "constraints.txt", "Makefile", ":!bench/results")
"""Paths that a figure may depend on. Pages and plots of docs/ may change while recording."""


class Uncommitted(RuntimeError):
    """The measured code is in no commit."""


class RecordOption(argparse.Action):
    """The option ``--record`` of a script in bench/: refuses an uncommitted checkout before anything is measured."""

    def __init__(self, option_strings: list[str], dest: str, help: str | None = None) -> None:
        super().__init__(option_strings, dest, nargs=0, default=False, help=help)

    def __call__(self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, *_: Any) -> None:
        try:
            committed()
        except Uncommitted as error:
            parser.error(str(error))
        setattr(namespace, self.dest, True)


def record(name: str, figures: dict[str, Any], folder: Path = RESULTS) -> Path:
    """Merge ``figures`` into ``folder/name.json`` and return its path; a name is letters, digits, '-', '_' and '.'.

    Raises ``Uncommitted`` if the checkout has changes that are in no commit.
    """
    if not name or not all(letter.isalnum() or letter in "-_." for letter in name):
        raise ValueError(f"'{name}' cannot be the name of a result; use letters, digits, '-', '_' and '.'")
    path = folder / f"{name}.json"
    commit = committed()
    before: dict[str, Any] = {}
    if path.exists():
        previous = json.loads(path.read_text())
        before = previous["figures"] if previous.get("commit") == commit else {}
    result = {
        "name": name,
        "command": command(),
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


def committed(root: Path = ROOT) -> str:
    """Return the commit of the checkout. Raises ``Uncommitted`` with a hint if its code is in no commit."""
    commit = commit_of(root)
    if commit == "unknown":
        raise Uncommitted(
            f"a result names the commit of its code, and {root} is not a git checkout\n"
            "hint: record in a checkout, or set BENCH_COMMIT to the commit that this copy was made of"
        )
    if commit.endswith("-dirty"):
        files = changed(root) or ["see BENCH_COMMIT"]
        shown = ", ".join(files[:5]) + (f" and {len(files) - 5} more" if len(files) > 5 else "")
        raise Uncommitted(
            f"results are recorded from committed code only, and this checkout has changes ({shown})\n"
            "hint: git commit them and run the same command again, or leave out --record (make prove: RECORD=no)"
        )
    return commit


def commit_of(root: Path) -> str:
    """Return the commit of the checkout, or 'unknown'; ``-dirty`` is added if a file of ``CODE`` differs from it.

    A copy without its .git takes it from BENCH_COMMIT, with ``-dirty`` if its checkout had changes.
    """
    if "BENCH_COMMIT" in os.environ:
        return os.environ["BENCH_COMMIT"]
    head = _output(["git", "-C", str(root), "rev-parse", "HEAD"])
    if head is None:
        return "unknown"
    return head + ("-dirty" if changed(root) else "")


def changed(root: Path) -> list[str]:
    """Return the files of ``CODE`` that differ from the commit or are not in it, without those that git ignores."""
    status = _output(["git", "-C", str(root), "status", "--porcelain", "--untracked-files=all", "--", *CODE])
    return [line.split(maxsplit=1)[1] for line in (status or "").splitlines()]


def command() -> str:
    """Return the command that measures again."""
    if os.environ.get("SMALTI_PROVE") == "1":
        name = os.environ.get("SMALTI_PROVE_NAME")
        return f"make prove NAME={name}" if name else "make prove"
    script = Path(sys.argv[0])
    if script.resolve().parent == ROOT / "bench":
        return f"make bench NAME={script.stem}" + (
            f" ARGS={shlex.quote(shlex.join(sys.argv[1:]))}" if sys.argv[1:] else ""
        )
    return shlex.join(["python", script.name, *sys.argv[1:]])


def machine() -> dict[str, Any]:
    """Return what a figure depends on: processor, usable cores, memory, GPU, Python and torch; no host name."""
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
