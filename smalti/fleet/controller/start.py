"""Starts the controller and the processes of attempts, which outlive the process that starts them."""

import os
import subprocess
import sys

from smalti.base.disk import writing
from smalti.base.env import child_environment
from smalti.fleet.controller import lease
from smalti.fleet.queue import runs

NONCE = "SMALTI_FLEET_ATTEMPT"
"""Environment variable of all processes of an attempt: its nonce."""


def ensure() -> None:
    """Start a controller of this machine if runs wait for one and none runs."""
    if lease.is_needed(runs.this_host()):
        _detached("smalti.fleet.controller", {NONCE: ""})  # a run may have called us


def start_attempt(nonce: str) -> subprocess.Popen[bytes]:
    """Start a process that claims the attempt with this nonce, runs its command and records its end."""
    return _detached("smalti.fleet.controller.attempt", {NONCE: nonce})


def _detached(module: str, variables: dict[str, str]) -> subprocess.Popen[bytes]:
    """Start a module of Python in a session of its own; its output goes to ``controller.log``."""
    place = runs.place()
    with writing(place):
        place.mkdir(parents=True, exist_ok=True)
        output = os.open(place / "controller.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        return subprocess.Popen(
            [sys.executable, "-m", module],
            env=child_environment({**variables, "SMALTI_HOME": str(place.parent)}),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    finally:
        os.close(output)
