"""The priority of a child process."""

import subprocess
import sys

import pytest

PROGRAM = """
import os
from smalti.base.processes import use_idle_priority
use_idle_priority()
print(os.nice(0), os.sched_getscheduler(0) == os.SCHED_IDLE)
"""


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="SCHED_IDLE is Linux's")
def test_idle_priority_is_the_lowest() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["19", "True"]
