"""The attempts of a run: a folder ``logs/attempt-N`` each. Other entries in ``logs/`` are ignored."""

import re
from pathlib import Path

_NAME = re.compile(r"attempt-(\d+)")


def log_folder(run: Path, attempt: int) -> Path:
    """Return the folder ``logs/attempt-N``."""
    return run / "logs" / f"attempt-{attempt}"


def attempts(run: Path) -> list[int]:
    """Return the numbers of the attempts so far, ascending."""
    matches = (_NAME.fullmatch(entry.name) for entry in (run / "logs").glob("attempt-*"))
    return sorted(int(match[1]) for match in matches if match)
