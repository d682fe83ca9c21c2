"""``smalti fleet check`` on nodes of network_nodes.py, with a fault planted on one of them.

A slow node has a CPU quota (cgroup), a slow link is shaped on the switch (tbf), a full disk is a small tmpfs. A wrong
product, a clock that is ahead and another version of a library are planted in Python's start-up on that node.
"""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import network_nodes as network

SLOW_FRAC = 0.4
"""Of a processor's time that a slow node gets."""
SLOW_LINK = "200mbit"
AHEAD_S = 30.0
_PORT = 29470

_WRONG = """
import sys
if "smalti.fleet.probes.node" in sys.orig_argv:
    import torch
    product = torch.Tensor.__matmul__
    def wrong(left, right):
        result = product(left, right)
        result[7, 11] += 1
        return result
    torch.Tensor.__matmul__ = wrong
"""
_AHEAD = f"""
import time
right, right_ns = time.time, time.time_ns
time.time = lambda: right() + {AHEAD_S}
time.time_ns = lambda: right_ns() + int({AHEAD_S} * 1e9)
"""
_OTHER_VERSION = "Metadata-Version: 2.1\nName: numpy\nVersion: 0.9\n"

FAULTS = {
    "slow node": "slow_products",
    "slow link": "slow_link",
    "wrong matmul": "wrong_products",
    "full disk": "disk",
    "clock skew": "clock",
    "other library version": "differs",
}
"""Fault -> kind of the finding that names it."""


def why_not() -> str | None:
    """The reason to skip these tests here; None where they can run."""
    if network.why_not() is not None:
        return network.why_not()
    if shutil.which("tc") is None:
        return "needs iproute2 (tc)"
    return None if _cgroups() is not None else "needs a cgroup of processors that can be written"


def check(nodes: network.Nodes, folder: Path, fault: str | None = None, node: str = "n1") -> dict[str, Any]:
    """The result of a check by all nodes, as the first one prints it; ``fault`` is on ``node``."""
    with ExitStack() as stack:
        planted = stack.enter_context(_planted(nodes, fault, node, folder))
        started = []
        for rank, name in enumerate(nodes.names):
            options = planted if name == node else {}
            started.append(nodes.start(name, _command(folder / name), **_options(nodes, rank, **options)))
        printed = [process.communicate(timeout=1200) for process in started]
    output, errors = printed[0]
    assert started[0].returncode in (0, 3), errors
    result: dict[str, Any] = json.loads(output)
    return result


def named(result: dict[str, Any]) -> set[tuple[str, str]]:
    """The pairs of node and kind that a result names."""
    return {(node, finding["kind"]) for finding in result["findings"] for node in finding["nodes"]}


def _command(folder: Path) -> list[str]:
    return [sys.executable, "-m", "smalti", "fleet", "check", "--json", "--folder", str(folder)]


def _options(nodes: network.Nodes, rank: int, env: dict[str, str] | None = None, **options: Any) -> dict[str, Any]:
    world = {"RANK": str(rank), "LOCAL_RANK": "0", "WORLD_SIZE": str(len(nodes.names)), "LOCAL_WORLD_SIZE": "1"}
    world |= {"MASTER_ADDR": nodes.names[0], "MASTER_PORT": str(_PORT)}
    return {"env": {**world, **(env or {})}, "errors_apart": True, **options}


@contextmanager
def _planted(nodes: network.Nodes, fault: str | None, node: str, folder: Path) -> Iterator[dict[str, Any]]:
    """Options of ``Nodes.start`` for the node with the fault, which is lifted at the end."""
    (folder / node).mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        if fault == "slow node":
            yield {"preexec_fn": stack.enter_context(_quota(folder.name))}
        elif fault == "slow link":
            with nodes.slowed(node, SLOW_LINK):
                yield {}
        elif fault == "full disk":
            _must("mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(folder / node))
            stack.callback(_must, "umount", str(folder / node))
            yield {}
        elif fault is None:
            yield {}
        else:
            yield {"env": {"PYTHONPATH": f"{_start_up(fault, folder / 'start-up')}:{network.REPOSITORY}"}}


def _start_up(fault: str, folder: Path) -> Path:
    """A folder of Python's search path with the fault."""
    folder.mkdir(exist_ok=True)
    if fault == "other library version":
        (folder / "numpy-0.9.dist-info").mkdir()
        (folder / "numpy-0.9.dist-info" / "METADATA").write_text(_OTHER_VERSION)
    else:
        (folder / "sitecustomize.py").write_text({"wrong matmul": _WRONG, "clock skew": _AHEAD}[fault])
    return folder


@contextmanager
def _quota(name: str) -> Iterator[Callable[[], None]]:
    """A function with which a process enters a cgroup that gets ``SLOW_FRAC`` of one processor."""
    root = _cgroups()
    assert root is not None
    group = root / f"smalti-{name}"
    group.mkdir()
    period_us = 100_000
    if (group / "cpu.max").exists():
        (group / "cpu.max").write_text(f"{round(SLOW_FRAC * period_us)} {period_us}")
    else:
        (group / "cpu.cfs_quota_us").write_text(str(round(SLOW_FRAC * period_us)))
    try:
        yield partial(_enter, group)
    finally:
        group.rmdir()


def _enter(group: Path) -> None:
    (group / "cgroup.procs").write_text("0")


def _cgroups() -> Path | None:
    """The root of the cgroups of processors, where one can be made."""
    for root, file in ((Path("/sys/fs/cgroup/cpu"), "cpu.cfs_quota_us"), (Path("/sys/fs/cgroup"), "cpu.max")):
        group = root / "smalti-try"
        try:
            group.mkdir()
        except OSError:
            continue
        usable = (group / file).exists()
        group.rmdir()
        if usable:
            return root
    return None


def _must(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, timeout=20)
