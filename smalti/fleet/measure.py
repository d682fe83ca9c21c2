"""Starts the probes as child processes and reads their answer, so that no caller imports torch.

Nothing is cached: a rate measured yesterday, beside other work, is a wrong rate, and measuring takes three seconds.
A run keeps the rate it was planned with in its events.
"""

import json
import subprocess
import sys

from smalti.base.env import child_environment
from smalti.base.errors import SmaltiError
from smalti.plan.hardware import MeasuredRate


def measure_matmul(
    *, threads: int = 0, dtype: str = "bf16", device: str = "auto", timeout_s: float = 120.0
) -> MeasuredRate:
    """The matmul rate of one device (CUDA) or of ``threads`` CPU threads (0: torch's default).

    ``dtype`` is ``bf16`` or ``fp32``, ``device`` ``auto``, ``cpu`` or ``cuda``. SmaltiError with the end of the child's
    stderr when it fails.
    """
    command = [sys.executable, "-m", "smalti.fleet.probes.matmul"]
    command += ["--threads", str(threads), "--dtype", dtype, "--device", device]
    # torchrun sets OMP_NUM_THREADS=1; the probe is told its threads outright.
    environment = child_environment({"OMP_NUM_THREADS": str(threads)} if threads > 0 else {})
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout_s, check=False)
    except subprocess.TimeoutExpired as error:
        raise SmaltiError(
            f"the matmul probe did not end within {timeout_s:.0f} s", hint=" ".join(command[1:])
        ) from error
    if done.returncode != 0:
        tail = "\n".join(done.stderr.strip().splitlines()[-5:])
        raise SmaltiError(
            f"the matmul probe ended with exit code {done.returncode}:\n{tail}", hint=" ".join(command[1:])
        )
    return MeasuredRate.from_json(json.loads(done.stdout.strip().splitlines()[-1]))
