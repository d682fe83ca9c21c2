"""Runs parsers in a child process, so that no input can crash, hang or fill the process that builds.

One child serves one process, call after call. It has a limit on its address space; a call has one on processor time. A
child that exceeds a limit or dies is replaced, and the call raises Unreadable. On Linux a child dies with its parent.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any, TypeVar

import psutil

from smalti.base.processes import die_with_parent
from smalti.data.build.extract.unreadable import Unreadable

_MEMORY_BYTES = 4 << 30
_POLL_S = 0.5
_WALL_FACTOR = 20
"""A call may take this many times its processor time: the machine may be busy."""
_START = "import json, sys; sys.path[:] = json.loads(sys.argv[2]); from {module} import serve; serve(int(sys.argv[1]))"

Result = TypeVar("Result")


def parse(function: Callable[..., Result], *arguments: Any, limit_s: float) -> Result:
    """Return ``function(*arguments)``, computed in the child of this process; both are pickled.

    Raises Unreadable: the function raised something, died, or took more than ``limit_s`` of processor time.
    """
    result: Result = _child(os.getpid()).call(function, arguments, limit_s)
    return result


@cache
def _child(pid: int) -> "_Child":
    return _Child()


class _Child:
    """A child process; it is started by the first call, and again after it was killed."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection[Any, Any] | None = None

    def call(self, function: Callable[..., Any], arguments: tuple[Any, ...], limit_s: float) -> Any:
        """Call ``function`` in the child."""
        if self._process is None or self._process.poll() is not None:
            self._start()
        assert self._process is not None and self._connection is not None
        try:
            self._connection.send((function, arguments))
            self._wait(limit_s)
            is_error, value = self._connection.recv()
        except (EOFError, OSError) as error:
            raise Unreadable("extract/file", f"its parser crashed ({self._end()})") from error
        except BaseException:  # also Ctrl-C: the next call must not receive this answer
            self._end()
            raise
        if is_error:
            raise Unreadable(*value)
        return value

    def _start(self) -> None:
        mine, other = Pipe()
        code = _START.format(module=__name__)
        with other:
            self._process = subprocess.Popen(
                [sys.executable, "-c", code, str(other.fileno()), json.dumps(sys.path)],
                pass_fds=[other.fileno()], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL, preexec_fn=die_with_parent(signal.SIGKILL),
            )  # fmt: skip
        self._connection = mine

    def _wait(self, limit_s: float) -> None:
        assert self._process is not None and self._connection is not None
        if self._connection.poll(_POLL_S):
            return
        before_s = self._cpu_s()
        end = time.monotonic() + _WALL_FACTOR * limit_s
        while not self._connection.poll(_POLL_S):
            if self._cpu_s() - before_s > limit_s or time.monotonic() > end:
                raise Unreadable("extract/time", f"parsing it takes more than {limit_s:g} s (max_parse_s)")

    def _cpu_s(self) -> float:
        assert self._process is not None
        with suppress(psutil.Error):
            times = psutil.Process(self._process.pid).cpu_times()
            return float(times.user + times.system)
        return 0.0

    def _end(self) -> str:
        """Kill the child; returns how it ended, if it had."""
        assert self._process is not None and self._connection is not None
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(0.2)
        self._process.kill()
        code = self._process.wait()
        self._connection.close()
        self._process = None
        return signal.Signals(-code).name if code < 0 else f"exit code {code}"


def serve(descriptor: int) -> None:
    """Answer calls until the parent closes the connection: the life of a child."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent
    with suppress(ImportError, ValueError, OSError):  # other systems, a lower limit
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with Connection(descriptor) as connection, suppress(EOFError):
        while True:
            function, arguments = connection.recv()
            try:
                answer: Any = (False, function(*arguments))
            except Unreadable as error:
                answer = (True, (error.rule, error.reason))
            except MemoryError:
                answer = (True, ("extract/too-large", f"parsing it takes more than {_MEMORY_BYTES >> 30} GiB"))
            except Exception as error:
                answer = (True, ("extract/file", f"it cannot be parsed: {type(error).__name__}: {str(error)[:200]}"))
            connection.send(answer)
