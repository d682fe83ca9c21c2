"""Reads ranks, nodes and addresses from Slurm's variables, which the caller passes.

Names: https://slurm.schedmd.com/srun.html, section "OUTPUT ENVIRONMENT VARIABLES". A script of ``sbatch`` and a shell
of ``salloc`` have SLURM_PROCID or SLURM_NTASKS too and are no task: only a step of ``srun`` has SLURM_STEP_ID.
"""

import re
from collections.abc import Mapping

from smalti.base.errors import UserError

_PORTS = 20_000
_FIRST_PORT = 12_000
"""Ports 12,000 to 31,999: above those of services, below Linux's ephemeral ports (from 32,768)."""


def task_count(variables: Mapping[str, str]) -> int:
    """Return the number of tasks of this process's srun step; 0 outside a step."""
    if "SLURM_STEP_ID" not in variables or "SLURM_PROCID" not in variables:
        return 0
    return int_variable(variables, "SLURM_STEP_NUM_TASKS", int_variable(variables, "SLURM_NTASKS", 1))


def nodes_left_out(variables: Mapping[str, str]) -> int:
    """Return the number of nodes of the allocation that a process outside an srun step leaves unused."""
    if "SLURM_JOB_ID" not in variables or "SLURM_STEP_ID" in variables:
        return 0
    return int_variable(variables, "SLURM_JOB_NUM_NODES", 1) - 1


def tasks_here(variables: Mapping[str, str]) -> int:
    """Return the number of tasks of the step on this node."""
    text = variables.get("SLURM_STEP_TASKS_PER_NODE")
    if text is None:
        return int_variable(variables, "SLURM_NTASKS_PER_NODE", task_count(variables))
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if match is None:
            raise UserError(f"SLURM_STEP_TASKS_PER_NODE='{text}' is not a list of counts", allowed="such as 8(x3),4")
        counts += [int(match[1])] * int(match[2] or 1)
    node = int_variable(variables, "SLURM_NODEID", 0)
    if node >= len(counts):
        raise UserError(f"SLURM_NODEID={node} is not a node of SLURM_STEP_TASKS_PER_NODE='{text}'")
    return counts[node]


def address(variables: Mapping[str, str]) -> str:
    """Return the node of rank 0: the first of the step, else of the job."""
    text = variables.get("SLURM_STEP_NODELIST") or variables.get("SLURM_JOB_NODELIST")
    return first_node(text) if text else "127.0.0.1"


def first_node(nodes: str) -> str:
    """Return the first node of a list: ``gpu03`` for ``gpu[03-07,12],login1``.

    Digits keep their zeros; a name may have several brackets.
    """
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])+", nodes)
    if first is None:
        raise UserError(f"'{nodes}' is not a list of nodes in Slurm's format", allowed="such as gpu[03-07,12]")
    return re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", first[0])


def port(variables: Mapping[str, str]) -> int:
    """Return a port for a job step: the same on every task, another one for the next step on the same nodes."""
    job, step = int_variable(variables, "SLURM_JOB_ID", 0), int_variable(variables, "SLURM_STEP_ID", 0)
    return _FIRST_PORT + (job * 31 + step) % _PORTS


def int_variable(variables: Mapping[str, str], name: str, default: int) -> int:
    """Return the whole number in a variable, or ``default`` where it is not set."""
    text = variables.get(name)
    if text is None:
        return default
    try:
        return int(text)
    except ValueError:
        raise UserError(f"the environment variable {name}='{text}' is not a whole number") from None
