"""The engine ``slurm``: an attempt is a job of ``srun``, which the process of the attempt starts and waits for.

So Slurm's queue decides when it runs and where, and everything else is as on this machine: ``srun`` prints the output
of the ranks and ends with their exit code; ``scancel`` sends them SIGTERM. Arguments are lists; no shell reads them.
"""

import subprocess
from collections.abc import Collection, Sequence

from smalti.base.errors import ExitCode
from smalti.config.clusters import ClusterConfig

_ASK_S = 30.0

_LOST = {
    "NODE_FAIL": "a node of it failed",
    "BOOT_FAIL": "a node of it did not boot",
    "PREEMPTED": "Slurm preempted it",
    "TIMEOUT": "it reached Slurm's time limit",
    "CANCELLED": "it was cancelled in Slurm",
}
"""States of a job that ended, but not by its own doing."""


def command_of(cluster: ClusterConfig, command: Sequence[str], *, ranks: int, cores: int, gpus: int) -> list[str]:
    """Return the command that runs ``command`` as a job of so many ranks, on so many cores and GPUs in all."""
    per_node = cluster.ranks_per_node or ranks
    if ranks <= per_node:
        size = ["--nodes=1", "--ntasks=1", f"--cpus-per-task={max(1, cores)}"]
        size += [f"--gpus={gpus}"] if gpus else []
    else:
        size = [f"--ntasks={ranks}", f"--ntasks-per-node={per_node}", "--kill-on-bad-exit=0"]
        size += ["--gpus-per-task=1"] if gpus else [f"--cpus-per-task={max(1, cores // ranks)}"]
    return ["srun", *size, *cluster.options, *command]


def without(command: Sequence[str], cordoned: Collection[str]) -> list[str]:
    """Return a command of ``srun`` that leaves out the cordoned nodes, of those that Slurm knows."""
    if not cordoned:
        return list(command)
    try:
        answer = subprocess.run(
            ["sinfo", "--noheader", "--Node", "--format=%N %n"],
            capture_output=True, text=True, timeout=_ASK_S, check=True,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):  # srun reports it too
        return list(command)
    short, nodes = {_short(name) for name in cordoned}, set()
    for line in answer.stdout.splitlines():
        name, _, host = line.strip().partition(" ")
        if short & {_short(name), _short(host)}:
            nodes.add(name)
    return [command[0], f"--exclude={','.join(sorted(nodes))}", *command[1:]] if nodes else list(command)


def _short(host: str) -> str:
    return host.partition(".")[0]


def job_name(run_id: str, attempt: int, nonce: str) -> str:
    """Return the name of the job of an attempt, which no other job has."""
    return f"smalti-{run_id}-{attempt}-{nonce[:8]}"


def end_of(name: str, code: int) -> tuple[int, str | None]:
    """Return the exit code of an attempt whose ``srun`` ended with ``code``, and the reason where Slurm has one.

    A job that Slurm ended, and a Slurm that does not answer, is a fault (75); a job that Slurm never took is 2.
    The code 0 is not believed alone: ``srun`` 22.05 ends with 0 after the failure of a node.
    """
    if code in (ExitCode.USAGE, ExitCode.CHECK_FAILED):
        return code, None
    try:
        state, nodes = _state(name)
    except (OSError, subprocess.SubprocessError) as error:
        return ExitCode.RETRY, f"srun ended with code {code}, and Slurm does not answer: {error}"
    if state in _LOST:
        return ExitCode.RETRY, f"{_LOST[state]} (Slurm: {state})"
    if code != ExitCode.DONE and (state is None or not nodes):
        return ExitCode.USAGE, f"Slurm took no job: srun ended with code {code}; its output has the reason"
    return code, None


def stop(name: str) -> bool:
    """Send SIGTERM to the ranks of a job, or cancel it if it waits; returns False where Slurm has not done so yet.

    ``srun`` itself would answer SIGTERM with SIGKILL to the ranks.
    """
    try:
        state, _ = _state(name)
        if state is None:  # not submitted yet
            return False
        how = ["--signal=TERM"] if state == "RUNNING" else []
        subprocess.run(["scancel", *how, f"--name={name}"], capture_output=True, timeout=_ASK_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return False
    return True


def _state(name: str) -> tuple[str | None, str]:
    """Return the state of a job, which Slurm remembers for some minutes after its end, and its nodes, empty before it
    has had any; None where Slurm knows no such job."""
    command = ["squeue", "--noheader", "--states=all", f"--name={name}", "--format=%T %N"]
    lines = subprocess.run(command, capture_output=True, text=True, timeout=_ASK_S, check=True).stdout.splitlines()
    state, _, nodes = lines[-1].strip().partition(" ") if lines else ("", "", "")
    return state or None, nodes.strip()
