"""The CPU cores and home folders of this machine."""

import os
import re
from typing import Any


def cpu_count() -> int:
    """Return the number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def without_home(value: Any) -> Any:
    """Return a JSON value with home folders replaced by ``~``."""
    if isinstance(value, dict):
        return {key: without_home(child) for key, child in value.items()}
    if isinstance(value, list):
        return [without_home(child) for child in value]
    if not isinstance(value, str):
        return value
    home = os.path.expanduser("~")
    if len(home) > 1:
        value = re.sub(rf"{re.escape(home)}(?![\w.-])", "~", value)
    return re.sub(r"/(?:home|Users)/[^/\s]+", "~", value)
