"""The attempts of a run: ``logs/attempt-N``, a folder each. Other entries there are not ours and are passed over."""

import re
from pathlib import Path

_NAME = re.compile(r"attempt-(\d+)")


def log_folder(run: Path, attempt: int) -> Path:
    """``logs/attempt-N``."""
    return run / "logs" / f"attempt-{attempt}"


def attempts(run: Path) -> list[int]:
    """Numbers of the attempts so far, rising."""
    found = (_NAME.fullmatch(entry.name) for entry in (run / "logs").glob("attempt-*"))
    return sorted(int(match[1]) for match in found if match)
