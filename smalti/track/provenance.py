"""The provenance of a run: code, packages, machine, command. Holds no environment variables and no secrets."""

import os
import platform
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import smalti
from smalti.base import store
from smalti.base.clock import utc_text
from smalti.base.machine import cpu_count
from smalti.track.attempts import attempts, log_folder
from smalti.track.packages import package_versions

_URL_LOGIN = re.compile(r"(?<=://)[^/\s]+@")
_SECRET_VALUE = re.compile(
    r"(?i)((?:(?:secret|password|passwd|credential|(?:api|access|auth)[_-]?(?:key|token))[a-z0-9_.-]*"
    r"|key|token|signature|(?<![a-z0-9])sig)=)\S+"
)


def provenance(argv: Sequence[str], origins: Mapping[str, str]) -> dict[str, Any]:
    """Return the record as JSON values; ``origins`` gives the source of each config value."""
    return {
        "time": utc_text(),
        "command": [redact(argument) for argument in argv],
        "directory": os.getcwd(),
        "process": process_id(),
        "smalti": smalti.__version__,
        "git": git_state(Path(smalti.__file__).parent),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "machine": platform.machine(),
        "cpu": cpu_name(),
        "cpus": os.cpu_count(),
        "cpus_usable": cpu_count(),
        "executable": sys.executable,
        "packages": package_versions(),
        "origins": dict(origins),
    }


@cache
def process_id() -> str:
    """Return an id of this process that no other has: attempts with the same one were started by one command."""
    return f"{os.getpid()}-{os.urandom(4).hex()}"


def directories(run: str | Path) -> list[str]:
    """Return the directories that attempts of ``run`` were started in, newest first, then the current one."""
    folder = Path(run)
    folders = [*(log_folder(folder, number) for number in reversed(attempts(folder))), folder]
    files = [each / "provenance.json" for each in folders]
    records = [store.read_json(file) for file in files if file.is_file()]
    return list(dict.fromkeys([*(record["directory"] for record in records if "directory" in record), os.getcwd()]))


def directory_of(run: str | Path, paths: Iterable[str]) -> str | None:
    """Return the first of ``directories`` in which all ``paths`` exist: the base of the config's relative paths."""
    needed = list(paths)
    candidates = directories(run)
    return next((folder for folder in candidates if all(Path(folder, path).exists() for path in needed)), None)


def redact(text: str) -> str:
    """Replace logins in URLs and the values of secret-sounding keys by ``***``."""
    return _SECRET_VALUE.sub(r"\1***", _URL_LOGIN.sub("***@", text))


def cpu_name() -> str:
    """Return the model of the processor, or its architecture where the system reports no model."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            lines = (line.partition(":") for line in file)
            models = (
                value.strip() for key, _, value in lines if key.strip() in ("model name", "Processor", "cpu model")
            )
            return next(filter(None, models), None) or platform.machine()
    except OSError:
        return platform.processor() or platform.machine()


def git_state(folder: Path) -> dict[str, Any] | None:
    """Return the commit of the checkout that tracks ``folder``, and whether it has changes; None outside one."""
    if _git(folder, "ls-files", "--error-unmatch", "__init__.py") is None:
        return None
    commit = _git(folder, "rev-parse", "HEAD")
    changes = _git(folder, "status", "--porcelain", "--untracked-files=no", "--", ".")
    return {"commit": commit, "dirty": None if changes is None else bool(changes)}


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        result = subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=5, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return result.stdout.strip() if result.returncode == 0 else None
