"""Checks this node, alone or with the other nodes of the same launch."""

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from smalti.base.env import World
from smalti.base.errors import DataError, SmaltiError, UserError
from smalti.fleet.check.local import report_of_node
from smalti.fleet.measure import run_probe

Json = dict[str, Any]

_ALL_PAIRS = 16
"""Up to so many nodes every pair is measured; of more, each node with ``_PARTNERS`` others."""
_PARTNERS = 4
_START_S = 60.0
"""Beyond the waits for others: importing PyTorch, measuring."""


def check(
    folder: Path,
    world: World,
    *,
    good: Json | None = None,
    timeout_s: float,
    report: Callable[[str], None] = lambda line: None,
) -> list[Json | None]:
    """Return the reports of all nodes, None for one that did not answer. All nodes must call it, one process each.

    ``good``: the saved report of a good node. ``timeout_s`` is how long a node waits for another; a probe that hangs
    longer is killed and is a problem of its report.
    """
    if world.local_world_size > 1:
        raise UserError(
            f"{world.local_world_size} processes check one node",
            allowed="one process for each node",
            hint="srun --ntasks-per-node=1 smalti fleet check",
        )
    report("facts and disk")
    report_here = report_of_node(folder, timeout_s=timeout_s)
    nodes = world.world_size
    partners = nodes - (nodes % 2 == 0) if nodes <= _ALL_PAIRS else _PARTNERS
    # the rounds that begin within 3 timeouts, and two in which each waits for: its turn, all to be ready, its
    # partners, all reports
    limit_s = _START_S + timeout_s * (4 if nodes == 1 else 4 + 2 * (5 + partners / 2))
    with tempfile.TemporaryDirectory(prefix="smalti-") as place:
        file, saved = Path(place) / "report.json", Path(place) / "good.json"
        file.write_text(json.dumps(report_here), encoding="utf-8")
        arguments = [str(file), "--folder", str(folder), "--rank", str(world.rank), "--nodes", str(nodes)]
        arguments += ["--partners", str(partners), "--master", f"{world.master_addr}:{world.master_port}"]
        arguments += ["--timeout", str(timeout_s)]
        if good is not None:
            saved.write_text(json.dumps(good), encoding="utf-8")
            arguments += ["--good", str(saved)]
        try:
            return list(run_probe("node", arguments, {}, limit_s, report)["reports"])
        except SmaltiError as error:
            report_here["problems"].append({"kind": "probe", "message": error.message})
            return [report_here if rank == world.rank else None for rank in range(nodes)]


def read_report(path: Path) -> Json:
    """Return a saved report. DataError if it is none."""
    try:
        saved = json.loads(path.read_text(encoding="utf-8"))
        if {"node", "facts", "problems"} <= saved.keys():
            return dict(saved)
    except (OSError, ValueError, AttributeError) as error:
        raise DataError(f"{path} cannot be read: {error}", hint=f"smalti fleet check --save {path}") from error
    raise DataError(f"{path} is not the report of a node", hint=f"smalti fleet check --save {path}")
