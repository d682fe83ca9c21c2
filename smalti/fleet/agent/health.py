"""Runs the command of ``train.health`` after a fault that may be the node's, and decides what follows.

Its output goes to ``health.log`` of the attempt, and an event ``node_checked`` has its last lines.
"""

import os
import re
import signal
import subprocess
import time
from contextlib import suppress
from dataclasses import replace

from smalti.base import clock, log
from smalti.base.errors import ExitCode, RetryableError
from smalti.base.processes import die_with_parent
from smalti.config.durations import to_seconds
from smalti.config.health import HealthConfig
from smalti.fleet.agent.outcome import Outcome
from smalti.fleet.agent.requests import StopRequests
from smalti.track.run import RunFolder

_CAUSES = ("killed", "hang", "network", "disk", "reported", "slow")
_DEVICE_ERROR = re.compile(r"CUDA error|HIP error|NCCL error|CUBLAS_STATUS_|CUDNN_STATUS_")
"""Of an exception that the code of a run is rarely the cause of."""
_FILE = "health.log"
_LINES = 5
_POLL_S = 0.1


def check_node(outcome: Outcome, folder: RunFolder, config: HealthConfig | None, requests: StopRequests) -> Outcome:
    """Return ``outcome``; if an attempt would follow a fault that may be the node's, and the check says that it is, the
    outcome of a run that must continue elsewhere."""
    if config is None or not outcome.restarts or outcome.node is not None or not may_be_of_node(outcome):
        return outcome
    log.get("fleet").info("checking this node: %s", config.command)
    file, began_s = folder.log_folder() / _FILE, clock.now_s()
    code = _run(config, str(file), requests)
    result = {0: "healthy", int(ExitCode.CHECK_FAILED): "unhealthy", None: "no answer"}.get(code, "failed")
    node, lines = os.uname().nodename, log.last_lines(file, _LINES)
    with suppress(RetryableError):  # the disk fails
        events = folder.event_log()
        seconds = round(clock.now_s() - began_s, 3)
        events.write("node_checked", node=node, result=result, code=code, command=config.command, why=outcome.cause,
                     rank=outcome.rank, seconds=seconds, evidence=_FILE, lines=lines)  # fmt: skip
        events.close()
    if result != "unhealthy":
        if code != 0:
            log.get("fleet").warning("the check of this node gave no result (%s, exit code %s)", config.command, code)
        return outcome
    return replace(
        outcome, code=ExitCode.RETRY, restarts=False, next_ranks=None, printed=False, details=tuple(lines),
        reason=f"{outcome.reason}; the check of node {node} failed: '{config.command}' exited with {code}",
        hint=f"run the same command on another node, or repair this one; the output of the check is in {file}",
    )  # fmt: skip


def may_be_of_node(outcome: Outcome) -> bool:
    """Return whether the cause of an outcome may be a fault of the node, and not of the code of the run."""
    return outcome.cause in _CAUSES or bool(_DEVICE_ERROR.search(outcome.traceback or ""))


def _run(config: HealthConfig, file: str, requests: StopRequests) -> int | None:
    """Return the exit code of the check; None where it did not end in time, or a stop was requested."""
    limit_s = to_seconds(config.timeout)
    assert limit_s is not None
    end_s = clock.now_s() + limit_s
    try:
        output: int = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    except OSError:
        output = os.open(os.devnull, os.O_WRONLY)
    process = subprocess.Popen(
        ["sh", "-c", config.command],
        stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True,
        preexec_fn=die_with_parent(signal.SIGKILL),
    )  # fmt: skip
    os.close(output)
    while process.poll() is None and clock.now_s() < end_s and not requests.any:
        time.sleep(_POLL_S)
    code = process.poll()
    with suppress(ProcessLookupError):  # it and what it has started
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    return code
