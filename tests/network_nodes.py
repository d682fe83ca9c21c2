"""Machines of a cluster on one machine, for tests: network namespaces with names of their own, on one switch.

Each node has an own host name, loopback and address, and reaches the others by name; files and processors are shared.
Linux, root and iproute2 are needed. A cable can be cut and restored: packets vanish while it is cut.
"""

import ctypes
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import IO, Any

REPOSITORY = Path(__file__).resolve().parent.parent
_ETC = Path("/etc/netns")
"""``ip netns exec NAME`` mounts the files of /etc/netns/NAME over /etc, for the process that it starts."""


def why_not() -> str | None:
    """The reason to skip tests of several nodes here; None where they can run."""
    if not sys.platform.startswith("linux"):
        return "network namespaces are Linux's"
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None or shutil.which("unshare") is None:
        return "needs iproute2 (ip) and util-linux (unshare)"
    name = f"smt{os.getpid()}-try"
    made = _ip("netns", "add", name)
    _ip("netns", "del", name)
    return None if made.returncode == 0 else f"no network namespace can be made: {made.stderr.strip()[:100]}"


class Nodes:
    """Nodes ``n1``, ``n2``, ... and a switch between them; made by ``nodes``."""

    def __init__(self, count: int) -> None:
        self.names = tuple(f"n{number}" for number in range(1, count + 1))
        self._prefix = f"smt{os.getpid()}-"
        self._started: list[subprocess.Popen[str]] = []

    def make(self) -> None:
        switch = self._prefix + "switch"
        _must("netns", "add", switch)
        _must("-n", switch, "link", "add", "br0", "type", "bridge")
        _must("-n", switch, "link", "set", "br0", "up")
        hosts = "127.0.0.1 localhost\n" + "".join(f"{self.address(name)} {name}\n" for name in self.names)
        for name in self.names:
            space = self._prefix + name
            _must("netns", "add", space)
            _must("-n", switch, "link", "add", name, "type", "veth", "peer", "name", "eth0", "netns", space)
            _must("-n", switch, "link", "set", name, "master", "br0", "up")
            _must("-n", space, "addr", "add", f"{self.address(name)}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                _must("-n", space, "link", "set", device, "up")
            (_ETC / space).mkdir(parents=True, exist_ok=True)
            (_ETC / space / "hosts").write_text(hosts)

    def remove(self) -> None:
        """End what was started on the nodes and remove them."""
        spaces = [self._prefix + name for name in (*self.names, "switch")]
        for space in spaces:
            self._kill(space)
        for process in self._started:
            process.communicate(timeout=20)
        for space in spaces:
            _ip("netns", "del", space)
            shutil.rmtree(_ETC / space, ignore_errors=True)
        with suppress(OSError):
            _ETC.rmdir()

    def kill(self, name: str) -> None:
        """Kill every process of a node, as when its power fails."""
        self._kill(self._prefix + name)

    def _kill(self, space: str) -> None:
        for pid in _ip("netns", "pids", space).stdout.split():  # of this namespace, which is ours
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)

    def address(self, name: str) -> str:
        """The address of a node; its name works too."""
        return f"10.77.0.{self.names.index(name) + 1}"

    def start(
        self,
        name: str,
        command: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        output: IO[str] | int = subprocess.PIPE,
        errors_apart: bool = False,
        **options: Any,
    ) -> "subprocess.Popen[str]":
        """Start ``command`` on a node, in a session of its own, with its output as text.

        errors_apart: its stderr is a second pipe.
        """
        inside = ["unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"', name, *command]
        process = subprocess.Popen(
            ["ip", "netns", "exec", self._prefix + name, *inside],
            env=environment(env or {}),
            stdout=output,
            stderr=subprocess.PIPE if errors_apart else subprocess.STDOUT,
            text=True,
            start_new_session=True,
            **options,
        )
        self._started.append(process)
        return process

    def entry(self, name: str) -> Callable[[], None]:
        """A function with which a process enters a node, and the processes that it starts; it keeps its files."""
        return partial(_enter, self._prefix + name)

    def run(self, name: str, command: Sequence[str], *, timeout_s: float = 60, **options: Any) -> tuple[int, str]:
        """Exit code and output of ``command`` on a node."""
        process = self.start(name, command, **options)
        text, _ = process.communicate(timeout=timeout_s)
        return process.returncode, text

    def cut(self, name: str) -> None:
        """Pull the cable of a node out of the switch."""
        _must("-n", self._prefix + "switch", "link", "set", name, "down")

    @contextmanager
    def slowed(self, name: str, rate: str) -> Iterator[None]:
        """Limit what a node sends and receives to ``rate`` (of tc), until the end."""
        sides = [(self._prefix + "switch", name), (self._prefix + name, "eth0")]
        for space, device in sides:
            shape = ["dev", device, "root", "tbf", "rate", rate, "burst", "256kb", "latency", "50ms"]
            _must("netns", "exec", space, "tc", "qdisc", "add", *shape)
        try:
            yield
        finally:
            for space, device in sides:
                _must("netns", "exec", space, "tc", "qdisc", "del", "dev", device, "root")

    def restore(self, name: str) -> None:
        """Plug it back in."""
        _must("-n", self._prefix + "switch", "link", "set", name, "up")


@contextmanager
def nodes(count: int) -> Iterator[Nodes]:
    """``count`` nodes, removed at the end."""
    made = Nodes(count)
    try:
        made.make()
        yield made
    finally:
        made.remove()


def environment(more: Mapping[str, str]) -> dict[str, str]:
    """This process's environment without a world, with this checkout, one thread a rank, and ``more``."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "MASTER_"))}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "SMALTI_ATTEMPT"):
        kept.pop(name, None)
    return {**kept, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", **more}


def wait_for(path: Path, *processes: "subprocess.Popen[str]", seconds: float = 90) -> None:
    """Until ``path`` is there; what the processes have said, where one of them ends before."""
    end_s = time.monotonic() + seconds
    while not path.exists():
        for process in processes:
            assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < end_s, f"{path} did not appear"
        time.sleep(0.05)


def _enter(space: str) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/run/netns/{space}") as file:
        assert libc.setns(file.fileno(), 0) == 0, os.strerror(ctypes.get_errno())


def _ip(*arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False, timeout=20)


def _must(*arguments: str) -> None:
    done = _ip(*arguments)
    assert done.returncode == 0, f"ip {' '.join(arguments)}: {done.stderr}"
