"""A real Slurm on the nodes of network_nodes.py: munged, slurmctld and a slurmd for each node, in a folder of its own.

Debian's packages slurmctld, slurmd, slurm-client and munge, and root, are needed. Nothing outside the folder is used:
no service of the machine, no configuration in /etc/slurm. Written for Slurm 22.05 and newer.
"""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import network_nodes as network

_COMMANDS = ("slurmctld", "slurmd", "munged", "srun", "sbatch", "scancel", "squeue", "sinfo")
# No control groups: the namespaces of the nodes do not mount them.
_CONFIG = """\
ClusterName=test
SlurmctldHost=n1
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket,cred_expire=5
CredType=cred/munge
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
ReturnToService=2
KillWait=30
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
NodeName={names} CPUs=4
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def why_not() -> str | None:
    """The reason to skip tests of Slurm here; None where they can run."""
    missing = [name for name in _COMMANDS if shutil.which(name) is None]
    if missing:
        return f"needs Slurm: {', '.join(missing)} not found (apt-get install slurmctld slurmd slurm-client munge)"
    return network.why_not()


class Slurm:
    """A cluster that takes jobs."""

    def __init__(self, nodes: network.Nodes, folder: Path, settings: str = "") -> None:
        self.nodes = nodes
        self.settings = settings
        self.folder = folder
        self.variables = {"SLURM_CONF": str(folder / "slurm.conf")}

    def begin(self) -> None:
        for name in ("state", "munge", *(f"spool-{node}" for node in self.nodes.names)):
            (self.folder / name).mkdir(parents=True)
        config = _CONFIG.format(folder=self.folder, names=",".join(self.nodes.names)) + self.settings
        (self.folder / "slurm.conf").write_text(config)
        (self.folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\nCgroupAutomount=no\n")
        self._begin_munge()
        self._must("n1", "slurmctld")
        for node in self.nodes.names:
            self._must(node, "slurmd", "-N", node)
        end_s = time.monotonic() + 40
        while self.call("sinfo", "-h", "-t", "idle", "-o", "%D").strip() != str(len(self.nodes.names)):
            assert time.monotonic() < end_s, (self.folder / "slurmctld.log").read_text()[-2000:]
            time.sleep(0.3)

    def call(self, *command: str, cwd: Path | None = None, timeout_s: float = 30) -> str:
        """The output of a command on the first node, which must succeed."""
        code, text = self.nodes.run("n1", command, env=self.variables, cwd=cwd, timeout_s=timeout_s)
        assert code == 0, f"{' '.join(command)} ended with {code}: {text}"
        return text

    def start(self, *command: str, cwd: Path) -> "subprocess.Popen[str]":
        """Start a command on the first node: ``srun`` and its kind."""
        process: subprocess.Popen[str] = self.nodes.start("n1", command, env=self.variables, cwd=cwd)
        return process

    def _must(self, node: str, *command: str) -> None:
        # A daemon keeps the output open that it was started with: it gets a file.
        with open(self.folder / "daemons.txt", "a") as file:
            process = self.nodes.start(node, command, env=self.variables, output=file)
            assert process.wait(timeout=30) == 0, (self.folder / "daemons.txt").read_text()

    def _begin_munge(self) -> None:
        own = self.folder / "munge"
        (own / "key").write_bytes(os.urandom(128))
        (own / "key").chmod(0o600)
        own.chmod(0o755)
        files = [f"--{name}={own / name.split('-')[0]}" for name in ("key-file", "socket", "pid-file", "log-file")]
        self._must("n1", "munged", "--force", *files, f"--seed-file={own / 'seed'}")


@contextmanager
def slurm(folder: Path, count: int = 2, settings: str = "") -> Iterator[Slurm]:
    """A Slurm of ``count`` nodes ``n1``, ``n2``, ...; its daemons end with the nodes. settings: more of slurm.conf."""
    with network.nodes(count) as made:
        cluster = Slurm(made, folder, settings)
        cluster.begin()
        yield cluster


def smalti(*arguments: str) -> list[str]:
    """The command ``smalti`` of this checkout."""
    return [sys.executable, "-m", "smalti", *arguments]
