"""Runs the command of ``train.health`` after a fault that may be a node's, and decides what follows.

With ``train.nodes`` it runs on all nodes of the attempt at once, which may measure each other: the variables ``RANK``,
``WORLD_SIZE``, ``MASTER_ADDR`` and ``MASTER_PORT`` are set as for one rank on each node. Its output goes to
``health.log`` of the attempt (``health-1.log`` ... of other nodes), and an event ``node_checked`` for each node has its
last lines.
"""

import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from smalti.base import clock, log
from smalti.base.env import child_environment
from smalti.base.errors import ExitCode, RetryableError
from smalti.base.processes import die_with_parent
from smalti.config.durations import to_seconds
from smalti.config.health import HealthConfig
from smalti.fleet.agent.outcome import Outcome
from smalti.fleet.agent.requests import StopRequests
from smalti.track.run import RunFolder

if TYPE_CHECKING:
    from smalti.fleet.nodes.lead import Nodes

_CAUSES = ("killed", "hang", "network", "disk", "reported", "slow")
_DEVICE_ERROR = re.compile(r"CUDA error|HIP error|NCCL error|CUBLAS_STATUS_|CUDNN_STATUS_")
"""Of an exception that the code of a run is rarely the cause of."""
_LINES = 5
_POLL_S = 0.1
_RESULTS: dict[int | None, str] = {0: "healthy", int(ExitCode.CHECK_FAILED): "unhealthy", None: "no answer"}


@dataclass(frozen=True)
class Check:
    """A check that has ended."""

    node: str
    code: int | None
    """Exit code of the command; None: it did not end in time."""
    file: Path
    """Its output."""

    @property
    def result(self) -> str:
        """What the exit code means."""
        return _RESULTS.get(self.code, "failed")


def check_nodes(
    outcome: Outcome,
    folder: RunFolder,
    config: HealthConfig | None,
    requests: StopRequests,
    nodes: "Nodes | None" = None,
) -> Outcome:
    """Return ``outcome``; if an attempt would follow a fault that may be a node's, and the check says that it is this
    one's, the outcome of a run that must continue elsewhere. Another node that is not healthy is left out from now on.
    """
    if config is None or not outcome.restarts or not may_be_of_node(outcome):
        return outcome
    log.get("fleet").info("checking %s: %s", "this node" if nodes is None else "the nodes", config.command)
    began_s = clock.now_s()
    here, *others = _run_all(config, folder, requests, nodes)
    if requests.any:  # it was ended early, and so were the others that wait for it
        return outcome
    with suppress(RetryableError):  # the disk fails
        events = folder.event_log()
        for check in (here, *others):
            events.write("node_checked", node=check.node, result=check.result, code=check.code, command=config.command,
                         why=outcome.cause, rank=outcome.rank, seconds=round(clock.now_s() - began_s, 3),
                         evidence=check.file.name, lines=log.last_lines(str(check.file), _LINES))  # fmt: skip
        events.close()
    for check in (here, *others):
        if check.result not in ("healthy", "unhealthy"):
            how = f"no answer within {config.timeout}" if check.code is None else f"exit code {check.code}"
            log.get("fleet").warning("the check of node %s has no result: %s (%s)", check.node, how, config.command)
    for check in others:
        if check.result == "unhealthy":
            assert nodes is not None
            nodes.exclude(check.node, f"its check failed: '{config.command}' exited with {check.code}")
    if here.result != "unhealthy":
        return outcome
    return replace(
        outcome, code=ExitCode.RETRY, restarts=False, next_ranks=None, wait_s=0.0, printed=False,
        details=tuple(log.last_lines(str(here.file), _LINES)),
        reason=f"{outcome.reason}; the check of node {here.node} failed: '{config.command}' exited with {here.code}",
        hint=f"run the same command on another node, or repair this one; the output of the check is in {here.file}",
    )  # fmt: skip


def may_be_of_node(outcome: Outcome) -> bool:
    """Return whether the cause of an outcome may be a fault of the node, and not of the code of the run."""
    return outcome.cause in _CAUSES or bool(_DEVICE_ERROR.search(outcome.traceback or ""))


def _run_all(config: HealthConfig, folder: RunFolder, requests: StopRequests, nodes: "Nodes | None") -> Sequence[Check]:
    """Run the check on this node, whose result is the first, and on the others of the attempt."""
    limit_s = to_seconds(config.timeout)
    assert limit_s is not None
    logs = folder.log_folder().absolute()
    name, file = os.uname().nodename if nodes is None else nodes.name, logs / "health.log"

    def run_here(environment: Mapping[str, str]) -> Check:
        return Check(name, run(config.command, limit_s, str(file), lambda: requests.any, environment), file)

    return (
        [run_here({})] if nodes is None else nodes.check(config.command, limit_s, logs, run_here, lambda: requests.any)
    )


def run(
    command: str, limit_s: float, file: str, stops: Callable[[], bool], environment: Mapping[str, str]
) -> int | None:
    """Return the exit code of a command line; None where it did not end in time, or ``stops`` says so. Its output is
    appended to ``file``."""
    end_s = clock.now_s() + limit_s
    try:
        output: int = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    except OSError:
        output = os.open(os.devnull, os.O_WRONLY)
    process = subprocess.Popen(
        ["sh", "-c", command],
        stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True,
        env=child_environment(dict(environment)), preexec_fn=die_with_parent(signal.SIGKILL),
    )  # fmt: skip
    os.close(output)
    while process.poll() is None and clock.now_s() < end_s and not stops():
        time.sleep(_POLL_S)
    code = process.poll()
    with suppress(ProcessLookupError):  # it and what it has started
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    return code
