"""How tests run a benchmark, as a user does."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def bench(script: str, *arguments: str) -> str:
    """What ``python bench/SCRIPT ARGUMENTS`` prints; it must succeed."""
    done = subprocess.run(
        [sys.executable, str(ROOT / "bench" / script), *arguments],
        env={**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT / "tools"), str(ROOT)))},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
