"""The allocator keeps what is freed: the second pass over the same work faults in almost nothing."""

import platform
import subprocess
import sys

import pytest

WORK = """
import resource, sys
import numpy as np
from smalti.distributed.group.allocator import keep_freed_memory
if sys.argv[1] == "keep":
    assert keep_freed_memory()
for _ in range(3):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    arrays = [np.ones(6_000_000) for _ in range(3)]
    del arrays
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults_of_the_third_pass(how: str) -> int:
    done = subprocess.run([sys.executable, "-c", WORK, how], capture_output=True, text=True, check=True)
    return int(done.stdout)


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="speaks to glibc")
def test_freed_memory_is_used_again_without_page_faults():
    plain, keeping = faults_of_the_third_pass("plain"), faults_of_the_third_pass("keep")
    assert keeping < 100, keeping
    assert plain > 1_000, plain  # otherwise this test shows nothing, and the call is not needed any more
