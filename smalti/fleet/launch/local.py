"""Starts the ranks of one attempt on this machine, each a child in its own session with torchrun's variables."""

import os
import secrets
import signal
import socket
import subprocess
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from smalti.base import log
from smalti.base.env import child_environment
from smalti.base.processes import die_with_parent
from smalti.track.line_file import disk_trouble

LOST_PEER = 76
"""Exit code between rank and agent only: this rank failed because another one is gone, and has printed nothing."""

STACK_SIGNAL = signal.SIGUSR2
"""On this signal a rank writes the stacks of its threads to ``stack_file``."""


def stack_file(log_folder: Path, rank: int) -> Path:
    """Return the file of a rank's stacks in the log folder of an attempt."""
    return log_folder / f"stacks-{rank:03d}.txt"


@dataclass(kw_only=True)
class Rank(ABC):
    """A started rank."""

    rank: int
    log: Path
    killed_by_us: bool = False
    node: str | None = None
    """Its node, if that is not this one."""

    @property
    def name(self) -> str:
        """The rank with its process, for messages."""
        return f"rank {self.rank} (pid {self.pid}{f' on {self.node}' if self.node else ''})"

    @property
    @abstractmethod
    def pid(self) -> int:
        """Process id on its node."""

    @property
    @abstractmethod
    def code(self) -> int | None:
        """Exit code, or minus the signal that ended it; None while it runs."""

    @property
    @abstractmethod
    def is_stopped(self) -> bool:
        """True if it is stopped by SIGSTOP or a debugger."""

    @abstractmethod
    def send(self, number: signal.Signals) -> None:
        """Send a signal to the rank alone."""

    @abstractmethod
    def kill(self) -> None:
        """Kill the rank and its children (SIGKILL), also those that it has left behind."""

    def last_lines(self, count: int) -> list[str]:
        """Return the last lines of its log file."""
        return log.last_lines(self.log, count)


@dataclass(kw_only=True)
class LocalRank(Rank):
    """A rank on this machine, a child of this process."""

    process: subprocess.Popen[bytes]
    nonce: str
    """Name under which it answers ``track.collectives.ask``."""

    @property
    def pid(self) -> int:
        """Process id, which is also its session and process group."""
        return self.process.pid

    @property
    def code(self) -> int | None:
        """Exit code, or minus the signal that ended it; None while it runs."""
        return self.process.poll()

    @property
    def is_stopped(self) -> bool:
        """True if it is stopped by SIGSTOP or a debugger."""
        try:
            return psutil.Process(self.pid).status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
        except psutil.Error:  # it has just gone
            return False

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the rank alone."""
        if self.code is None:
            self.process.send_signal(number)

    def kill(self) -> None:
        """Kill the rank and its children (SIGKILL), also those that it has left behind."""
        self.killed_by_us = self.killed_by_us or self.code is None
        try:
            os.killpg(self.pid, signal.SIGKILL)  # the number is not given anew while its group has members
        except ProcessLookupError:  # it has not reached setsid yet, or is gone with all its children
            self.process.kill()


def start(
    command: Sequence[str],
    *,
    ranks: int,
    threads: int,
    attempt: int,
    port: int,
    log_of: Callable[[int], Path],
    memory: Path | None = None,
    first: int = 0,
    world_size: int | None = None,
    address: str = "127.0.0.1",
) -> list[LocalRank]:
    """Start the ranks of this machine. Rank 0 writes to the terminal, the others to their log files.

    memory: the folder of shared memory for copies of the state. first: the first rank of this machine, of
    ``world_size``; None: all are here. address: where rank 0 is reached. Raises RetryableError where a log file cannot
    be written; no rank is left then.
    """
    started: list[LocalRank] = []
    try:
        for local_rank in range(ranks):
            rank = first + local_rank
            nonce = secrets.token_hex(8)
            environment = child_environment(
                {
                    "RANK": str(rank),
                    "LOCAL_RANK": str(local_rank),
                    "WORLD_SIZE": str(world_size or ranks),
                    "LOCAL_WORLD_SIZE": str(ranks),
                    "MASTER_ADDR": address,
                    "MASTER_PORT": str(port),
                    "SMALTI_ATTEMPT": str(attempt),
                    "SMALTI_RANK_NONCE": nonce,
                    "OMP_NUM_THREADS": str(threads),
                    "PYTHONUNBUFFERED": "1",
                    "PYTHONFAULTHANDLER": "1",
                    "SMALTI_PEER_MEMORY": str(memory or ""),
                }
            )
            started.append(_start_one(command, rank, environment, log_of(rank), nonce))
    except BaseException:
        for rank_process in started:
            rank_process.kill()
        raise
    return started


def free_port(address: str = "127.0.0.1") -> int:
    """Return a TCP port of an address of this machine that is free now; another process may take it first."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind((address, 0))
        return int(probe.getsockname()[1])


def _start_one(command: Sequence[str], rank: int, environment: dict[str, str], log: Path, nonce: str) -> LocalRank:
    with disk_trouble(log):
        log.parent.mkdir(parents=True, exist_ok=True)
        file = open(log, "ab")  # noqa: SIM115 - closed below
    with file:
        output = None if rank == 0 else file
        process = subprocess.Popen(
            list(command),
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,  # Ctrl-C in the terminal reaches the agent alone
            preexec_fn=die_with_parent(signal.SIGKILL),
        )
    return LocalRank(rank=rank, log=log, process=process, nonce=nonce)
