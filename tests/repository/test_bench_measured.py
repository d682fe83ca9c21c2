"""tools/measured.py counts descendants, keeps to the cores, and leaves nothing behind."""

import os
import sys
from pathlib import Path

import pytest
from measured import measured

CORE = [min(os.sched_getaffinity(0))] if hasattr(os, "sched_getaffinity") else [0]
SPIN = "import time\nend = time.process_time() + 0.3\nwhile time.process_time() < end: pass\n"

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads Linux's account of processes")


@pytest.mark.slow
def test_processor_time_of_a_child_and_of_an_orphan_counts() -> None:
    waited = f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {SPIN!r}], check=True)"
    orphan = (
        "import subprocess, sys\n"
        f"spun = {SPIN!r} + 'print(flush=True)\\ntime.sleep(60)'\n"
        "subprocess.Popen([sys.executable, '-c', spun], stdout=subprocess.PIPE).stdout.readline()"
    )
    for program in (SPIN, waited, orphan):
        cost = measured([sys.executable, "-c", program], cores=CORE)
        assert cost.cpu_s >= 0.3
        assert cost.wall_s < 30


@pytest.mark.slow
def test_memory_of_a_child_counts() -> None:
    hold = "import time; block = bytearray(60_000_000); time.sleep(0.7)"
    program = f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {hold!r}])"
    assert 60e6 < measured([sys.executable, "-c", program], cores=CORE).peak_bytes < 200e6


def test_keeps_to_the_cores(tmp_path: Path) -> None:
    program = "import os\nopen('seen', 'w').write(f'{sorted(os.sched_getaffinity(0))} {os.environ[\"GIVEN\"]}')"
    measured([sys.executable, "-c", program], cores=CORE, environment={"GIVEN": "yes"}, folder=tmp_path)
    assert (tmp_path / "seen").read_text() == f"{CORE} yes"


def test_failure_shows_the_end_of_the_output() -> None:
    with pytest.raises(RuntimeError, match="what went wrong"):
        measured([sys.executable, "-c", "raise SystemExit('what went wrong')"], cores=CORE)
    with pytest.raises(RuntimeError, match="limit"):
        measured([sys.executable, "-c", "import time; time.sleep(60)"], cores=CORE, limit_s=0.3)
