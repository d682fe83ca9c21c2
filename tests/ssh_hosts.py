"""Hosts of ssh on the nodes of network_nodes.py: a real sshd on each but the first, with keys of their own.

Debian's package openssh-server, and root, are needed. Nothing outside the folder is used but /run/sshd.
"""

import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import network_nodes as network

_SSHD = "/usr/sbin/sshd"
_SERVER = """\
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/key.pub
PidFile none
StrictModes no
PermitRootLogin yes
PasswordAuthentication no
UsePAM no
"""
_CLIENT = """\
IdentityFile {folder}/key
StrictHostKeyChecking no
UserKnownHostsFile /dev/null
LogLevel ERROR
User root
"""


def why_not() -> str | None:
    """The reason to skip tests of ssh here; None where they can run."""
    if not Path(_SSHD).exists() or shutil.which("ssh") is None:
        return "needs sshd and ssh (apt-get install openssh-server openssh-client)"
    return network.why_not()


class Hosts:
    """Nodes; the first is the machine of the queue."""

    def __init__(self, nodes: network.Nodes, folder: Path) -> None:
        self.nodes, self.folder = nodes, folder
        self.names = nodes.names[1:]
        self.options = (f"-F{folder}/client",)

    def begin(self) -> None:
        for name in ("key", "host_key"):
            command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(self.folder / name)]
            subprocess.run(command, check=True, timeout=20)
        (self.folder / "server").write_text(_SERVER.format(folder=self.folder))
        (self.folder / "client").write_text(_CLIENT.format(folder=self.folder))
        Path("/run/sshd").mkdir(exist_ok=True)
        for name in self.names:
            self.boot(name)

    def boot(self, name: str) -> None:
        """Start sshd on a host, and wait until it listens."""
        with open(self.folder / f"{name}.log", "a") as log:
            self.nodes.start(name, [_SSHD, "-D", "-e", "-f", str(self.folder / "server")], output=log)
        end_s = time.monotonic() + 20
        probe = f"import socket; socket.create_connection(('{self.nodes.address(name)}', {_PORT}), 1)"
        while self.nodes.run(self.nodes.names[0], ["python3", "-c", probe])[0] != 0:
            assert time.monotonic() < end_s, (self.folder / f"{name}.log").read_text()
            time.sleep(0.2)

    def call(self, *command: str, cwd: Path, env: dict[str, str], timeout_s: float = 120) -> str:
        """The output of a command on the machine of the queue, which must succeed."""
        code, text = self.nodes.run(self.nodes.names[0], command, env=env, cwd=cwd, timeout_s=timeout_s)
        assert code == 0, f"{' '.join(command)} ended with {code}: {text}"
        return text


_PORT = socket.getservbyname("ssh")


@contextmanager
def hosts(folder: Path, count: int = 2) -> Iterator[Hosts]:
    """``count`` hosts ``n2``, ``n3``, ..., and the machine of the queue ``n1``."""
    with network.nodes(count + 1) as made:
        cluster = Hosts(made, folder)
        cluster.begin()
        yield cluster
