"""Runs ``smalti train`` in real processes that are forked by the server of gloo_ranks.py, with PyTorch imported.

Each rank of a command that is started imports it again, five seconds of a processor. Here agent and ranks have the
command's own code, signals, sessions, exit codes and log files; train_process.py starts the command itself.
"""

import os
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any, NoReturn

import psutil
import pytest
from gloo_ranks import server, set_up

from smalti.cli.main import main
from smalti.fleet.launch import local

InRank = Callable[[], None] | None


class ForkedCommand:
    """A running command."""

    def __init__(self, process: BaseProcess, output: Path) -> None:
        assert process.pid is not None
        self.pid, self._process, self._output = process.pid, process, output

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal to the agent."""
        os.kill(self.pid, number)

    def ranks(self) -> list[int]:
        """Process ids of the ranks, rank 0 first: it was started first."""
        return sorted(child.pid for child in psutil.Process(self.pid).children())

    def output(self) -> str:
        """What it has printed so far."""
        return self._output.read_text()

    def finish(self, timeout_s: float = 240) -> tuple[int, str]:
        """Exit code and output, of the agent and of rank 0, at the end."""
        self._process.join(timeout_s)
        if self._process.is_alive():
            self._process.kill()
            raise AssertionError(f"the command did not end within {timeout_s} s:\n{self._output.read_text()}")
        assert self._process.exitcode is not None
        output = self._output.read_text()
        self._output.unlink()
        return self._process.exitcode, output


def start(
    *arguments: str,
    in_rank: InRank = None,
    in_agent: InRank = None,
    folder: Path | None = None,
    environment: dict[str, str] | None = None,
) -> ForkedCommand:
    """Start ``smalti ARGUMENTS``, in this folder and environment unless others are given.

    ``in_rank``, a function of a module, is called first in each rank, and ``in_agent`` in the command itself.
    """
    descriptor, output = tempfile.mkstemp()
    os.close(descriptor)
    process = server().Process(
        target=_agent,
        args=(arguments, folder or os.getcwd(), environment or dict(os.environ), output, in_rank, in_agent),
    )
    process.start()
    return ForkedCommand(process, Path(output))


def run(*arguments: str, in_rank: InRank = None) -> tuple[int, str]:
    """Exit code and output of ``smalti ARGUMENTS``."""
    return start(*arguments, in_rank=in_rank).finish()


def fork_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that a command in this process starts are forked by the server from now on."""
    monkeypatch.setattr(local, "subprocess", SimpleNamespace(Popen=_ServedRank, DEVNULL=None))


class _ServedRank:
    """What the agent uses of ``subprocess.Popen``."""

    def __init__(self, command: list[str], *, env: dict[str, str], stdout: IO[bytes] | None, **_: Any) -> None:
        output = None if stdout is None else stdout.name
        self._process = server().Process(target=_rank, args=(_arguments(command), os.getcwd(), env, output))
        self._process.start()
        self.pid = self._process.pid

    def poll(self) -> int | None:
        """Return the exit code, or minus the signal; None while it runs."""
        return self._process.exitcode

    def send_signal(self, number: signal.Signals) -> None:
        """Send it a signal."""
        os.kill(self.pid, number)

    def kill(self) -> None:
        """Kill it."""
        self._process.kill()


def _rank(arguments: list[str], folder: str, environment: dict[str, str], output: str | None) -> None:
    set_up()
    os.setsid()
    os.chdir(folder)
    if output is not None:
        _redirect(output)
    _run(arguments, environment)


def _arguments(command: list[str]) -> list[str]:
    return command[command.index("smalti") + 1 :]


def _redirect(output: str) -> None:
    with open(output, "ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)


def _agent(
    arguments: tuple[str, ...],
    folder: Path,
    environment: dict[str, str],
    output: str,
    in_rank: InRank,
    in_agent: InRank,
) -> None:
    set_up()
    _redirect(output)

    def popen(command: list[str], **options: Any) -> "_ForkedRank":
        return _ForkedRank(_arguments(command), in_rank, **options)

    local.subprocess = SimpleNamespace(Popen=popen, DEVNULL=None)  # type: ignore[attr-defined]
    os.chdir(folder)
    _run(arguments, environment, in_agent)


def _run(arguments: Sequence[str], environment: dict[str, str], begin: Callable[[], None] | None = None) -> NoReturn:
    """Run a command, and end this process with its exit code."""
    code: Any = 1
    try:
        os.environ.clear()
        os.environ.update(environment)
        if begin is not None:
            begin()
        main(arguments)
    except SystemExit as end:
        code = end.code or 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


class _ForkedRank:
    """What the agent uses of ``subprocess.Popen``."""

    def __init__(
        self,
        arguments: list[str],
        in_rank: InRank,
        *,
        env: dict[str, str],
        stdout: IO[bytes] | None,
        preexec_fn: Callable[[], None] | None,
        **_: Any,
    ) -> None:
        self.returncode: int | None = None
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid != 0:
            return

        def begin() -> None:
            os.setsid()
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                signal.signal(number, signal.SIG_DFL)
            if preexec_fn is not None:
                preexec_fn()
            if stdout is not None:
                os.dup2(stdout.fileno(), 1)
                os.dup2(stdout.fileno(), 2)
            os.closerange(3, 1024)  # the lock of the run folder, too
            if in_rank is not None:
                in_rank()

        _run(arguments, env, begin)

    def poll(self) -> int | None:
        """Return the exit code, or minus the signal; None while it runs."""
        if self.returncode is None:
            ended, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if ended else None
        return self.returncode

    def send_signal(self, number: signal.Signals) -> None:
        """Send it a signal, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Kill it."""
        self.send_signal(signal.SIGKILL)
