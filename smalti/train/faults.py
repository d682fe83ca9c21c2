"""The faults of ``chaos``: each is done to this process, by the means of the operating system where there are any.

What lasts for a time ends by a thread. ``config/chaos_needs.py`` says what a kind needs.
"""

import ctypes
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist

from smalti.base import clock, env
from smalti.base.errors import InjectedError
from smalti.base.objects import Requests
from smalti.config.chaos import FaultConfig
from smalti.config.durations import to_seconds

_CLONE_NEWNS, _MS_RDONLY, _MS_REMOUNT, _MS_BIND, _MS_REC, _MS_PRIVATE = 0x20000, 1, 32, 4096, 16384, 1 << 18
_MNT_DETACH = 2
_TCP_REPAIR, _TCP_REPAIR_QUEUE, _SEND_QUEUE = 19, 20, 2
_JUMP = timedelta(hours=1)
_FOR_GOOD_S = 10 * 86_400.0


def seconds_of(fault: FaultConfig) -> float | None:
    """Return the duration in seconds; None: until the process ends."""
    return None if fault.duration is None else to_seconds(fault.duration)


def inject(fault: FaultConfig, checkpoints: Path, group: dist.ProcessGroup | None) -> None:
    """Do it now. Returns only where the process lives on.

    checkpoints: the folder that becomes read-only. group: of all ranks, used by nothing else; for ``deadlock``.
    """
    seconds = seconds_of(fault)
    match fault.kind:
        case "sigkill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "sigstop":
            _stop(seconds)
        case "segfault":
            ctypes.string_at(0)
        case "held_gil":
            _hold_gil(seconds or _FOR_GOOD_S)
        case "exception":
            raise InjectedError(
                f"injected by chaos: {fault.label}", hint="chaos.faults and chaos.mix are in config.yaml"
            )
        case "deadlock":
            dist.all_reduce(torch.zeros(1), group=group)
        case "full_disk":
            _fill_disk(seconds)
        case "read_only_disk":
            _make_read_only(checkpoints, seconds)
        case "store_503":
            _refuse_requests(seconds)
        case "clock_jump":
            _shift_clock(seconds)
        case "agent_death":
            os.kill(os.getppid(), signal.SIGKILL)
            time.sleep(_FOR_GOOD_S)  # the kernel kills the ranks of a dead agent
        case "store_death":
            _kill_store()
        case "half_open_tcp":
            _silence_connections()
        case "cut_line":
            _cut(seconds)


def _later(seconds: float | None, action: Callable[[], object]) -> None:
    """Call ``action`` after so many seconds, in a thread; never for None."""
    if seconds is not None:
        timer = threading.Timer(seconds, action)
        timer.daemon = True
        timer.start()


def _stop(seconds: float | None) -> None:
    if seconds is not None:
        wake = f"sleep {seconds}; kill -CONT {os.getpid()}"
        subprocess.Popen(["sh", "-c", wake], start_new_session=True, stdin=subprocess.DEVNULL)
    os.kill(os.getpid(), signal.SIGSTOP)


def _hold_gil(seconds: float) -> None:
    """Sleep in C without releasing the interpreter, as a broken extension does; no Python code of any thread runs."""
    usleep = ctypes.PyDLL(None).usleep
    usleep.argtypes = [ctypes.c_uint]
    end_s = time.monotonic() + seconds
    while (left_s := end_s - time.monotonic()) > 0:  # a signal ends it early
        usleep(int(min(left_s, 4000) * 1e6))


def _fill_disk(seconds: float | None) -> None:
    """Let no file of this process grow: the kernel refuses each write with EFBIG, which is handled as ENOSPC is."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    _later(seconds, lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard)))


def _make_read_only(folder: Path, seconds: float | None) -> None:
    """Mount a folder read-only, in a mount namespace of this thread and of those that it starts from now on."""
    folder.mkdir(parents=True, exist_ok=True)
    libc, place = ctypes.CDLL(None, use_errno=True), os.fsencode(folder)
    calls = (
        lambda: libc.unshare(_CLONE_NEWNS),
        lambda: libc.mount(None, b"/", None, _MS_REC | _MS_PRIVATE, None),
        lambda: libc.mount(place, place, None, _MS_BIND, None),
        lambda: libc.mount(None, place, None, _MS_REMOUNT | _MS_BIND | _MS_RDONLY, None),
    )
    for call in calls:
        if call() != 0:
            raise OSError(ctypes.get_errno(), "the folder could not be mounted read-only", str(folder))
    _later(seconds, lambda: libc.umount2(place, _MNT_DETACH))


def _refuse_requests(seconds: float | None) -> None:
    """Answer the requests of this process to object stores with 503."""
    send = Requests.send

    def refused(self: Requests, url: str, action: str, request: Callable[[], Any]) -> Any:
        def slow_down() -> Any:
            if Requests.send is refused:
                raise ConnectionError("status code: 503 SlowDown (injected by chaos)")
            return request()

        return send(self, url, action, slow_down)

    Requests.send = refused  # type: ignore[method-assign]
    _later(seconds, lambda: setattr(Requests, "send", send))


def _shift_clock(seconds: float | None) -> None:
    """Set the time of day that the Python code of this process reads an hour ahead; monotonic clocks are unchanged."""
    now, now_ns = time.time, time.time_ns

    class Shifted(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> datetime:  # type: ignore[override]
            return datetime.now(tz or UTC) + _JUMP

    def restore() -> None:
        time.time, time.time_ns, clock.datetime = now, now_ns, datetime  # type: ignore[attr-defined]

    time.time = lambda: now() + _JUMP.total_seconds()
    time.time_ns = lambda: now_ns() + int(_JUMP.total_seconds() * 1e9)
    clock.datetime = Shifted  # type: ignore[attr-defined]
    _later(seconds, restore)


def _kill_store() -> None:
    """Kill the process below the agent that serves the rendezvous."""
    port = env.world().master_port
    for process in psutil.Process(os.getppid()).children(recursive=True):
        listening = (each for each in process.net_connections("tcp") if each.status == psutil.CONN_LISTEN)
        if any(each.laddr.port == port for each in listening):
            process.kill()
            return
    raise InjectedError(f"store_death: no process below the agent listens at port {port}")


def _silence_connections() -> None:
    """Send nothing more over the TCP connections of this process, and no FIN when it ends: the peers are not told."""
    for entry in os.listdir("/proc/self/fd"):
        try:
            with socket.socket(fileno=os.dup(int(entry))) as connection:
                if connection.type != socket.SOCK_STREAM or connection.family not in (socket.AF_INET, socket.AF_INET6):
                    continue
                connection.getpeername()
                connection.setsockopt(socket.IPPROTO_TCP, _TCP_REPAIR, 1)
                connection.setsockopt(socket.IPPROTO_TCP, _TCP_REPAIR_QUEUE, _SEND_QUEUE)
        except OSError:  # no socket, or one that listens
            continue


def _cut(seconds: float | None) -> None:
    """Take all network devices of this namespace down, but not the loopback."""
    devices = [name for name in os.listdir("/sys/class/net") if name != "lo"]

    def set_all(state: str) -> None:
        for name in devices:
            subprocess.run(["ip", "link", "set", "dev", name, state], check=True)

    set_all("down")
    _later(seconds, lambda: set_all("up"))
