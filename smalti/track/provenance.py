"""What a run was made by and on: code, packages, machine, command. Never the environment, never a secret."""

import os
import platform
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import smalti
from smalti.base import store
from smalti.base.clock import utc_text
from smalti.base.env import cpu_count
from smalti.track.attempts import attempts, log_folder
from smalti.track.packages import package_versions

_URL_LOGIN = re.compile(r"(?<=://)[^/\s]+@")
_SECRET_VALUE = re.compile(
    r"(?i)((?:(?:secret|password|passwd|credential|(?:api|access|auth)[_-]?(?:key|token))[a-z0-9_.-]*"
    r"|key|token|signature|(?<![a-z0-9])sig)=)\S+"
)


def provenance(argv: Sequence[str], origins: Mapping[str, str]) -> dict[str, Any]:
    """The record as JSON values; ``origins`` says where each value of the config came from."""
    return {
        "time": utc_text(),
        "command": [redact(argument) for argument in argv],
        "directory": os.getcwd(),
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


def directories(run: str | Path) -> list[str]:
    """The directories that attempts of ``run`` were started in, the newest first, and at last the present one."""
    folder = Path(run)
    records = [*(log_folder(folder, number) for number in reversed(attempts(folder))), folder]
    found = [store.read_json(one / "provenance.json") for one in records if (one / "provenance.json").is_file()]
    return list(dict.fromkeys([*(one["directory"] for one in found if "directory" in one), os.getcwd()]))


def directory_of(run: str | Path, paths: Iterable[str]) -> str | None:
    """The first of ``directories`` in which all ``paths`` exist, where relative paths of the run's config begin."""
    every = list(paths)
    return next((one for one in directories(run) if all(Path(one, path).exists() for path in every)), None)


def redact(text: str) -> str:
    """Logins in URLs and the values of keys that sound secret become ``***``."""
    return _SECRET_VALUE.sub(r"\1***", _URL_LOGIN.sub("***@", text))


def cpu_name() -> str:
    """The model of the processor; its architecture where the system does not say more."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            lines = (line.partition(":") for line in file)
            named = (
                value.strip() for key, _, value in lines if key.strip() in ("model name", "Processor", "cpu model")
            )
            return next(filter(None, named), None) or platform.machine()
    except OSError:
        return platform.processor() or platform.machine()


def git_state(folder: Path) -> dict[str, Any] | None:
    """Commit of the checkout that ``folder`` is tracked in, and whether it has changes; None outside one."""
    if _git(folder, "ls-files", "--error-unmatch", "__init__.py") is None:
        return None
    commit = _git(folder, "rev-parse", "HEAD")
    changes = _git(folder, "status", "--porcelain", "--untracked-files=no", "--", ".")
    return {"commit": commit, "dirty": None if changes is None else bool(changes)}


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=5, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
