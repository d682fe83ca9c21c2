"""Starts the probes as child processes and reads their answer, so that no caller imports torch.

Nothing is cached: a rate measured yesterday, beside other work, is a wrong rate, and measuring takes three seconds.
A run keeps the rate it was planned with in its events.
"""

import json
import subprocess
import sys
from typing import Any

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
    arguments = ["--threads", str(threads), "--dtype", dtype, "--device", device]
    # torchrun sets OMP_NUM_THREADS=1; the probe is told its threads outright.
    extra = {"OMP_NUM_THREADS": str(threads)} if threads > 0 else {}
    return MeasuredRate.from_json(_answer("matmul", arguments, extra, timeout_s))


def torch_facts(*, timeout_s: float = 60.0) -> dict[str, Any]:
    """What PyTorch here can do (``probes/torch_facts.py``); SmaltiError where it cannot even be imported."""
    return _answer("torch_facts", [], {}, timeout_s)


def _answer(probe: str, arguments: list[str], extra: dict[str, str], timeout_s: float) -> dict[str, Any]:
    """The JSON object that a probe prints last."""
    command = [sys.executable, "-m", f"smalti.fleet.probes.{probe}", *arguments]
    environment = child_environment(extra)
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout_s, check=False)
    except subprocess.TimeoutExpired as error:
        raise SmaltiError(
            f"the probe {probe} did not end within {timeout_s:.0f} s", hint=" ".join(command[1:])
        ) from error
    if done.returncode != 0:
        tail = "\n".join(done.stderr.strip().splitlines()[-5:])
        raise SmaltiError(
            f"the probe {probe} ended with exit code {done.returncode}:\n{tail}", hint=" ".join(command[1:])
        )
    return dict(json.loads(done.stdout.strip().splitlines()[-1]))
