"""Measures a node with PyTorch, alone or with others: ``python -m smalti.fleet.probes.node REPORT [...]``.

``REPORT`` is a file with the report of ``smalti/fleet/check/local.py``. Prints one JSON object: ``reports``, those
of all nodes by rank with ``products`` and ``links`` added; None for a node that did not answer. Says on stderr what it
is at.

All measure in rounds (``smalti/fleet/check/merge.py``); nodes that share a machine (containers, tests) in turns. Every
node waits at most ``--timeout`` seconds for another, and ends with a report in any case.
"""

import argparse
import json
import socket
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from smalti.base.errors import SmaltiError
from smalti.fleet.check.local import measure_disk
from smalti.fleet.check.merge import merge, rounds_needed
from smalti.fleet.probes.links import measure_link, partners
from smalti.fleet.probes.products import Operands, measure_products, operands

Json = dict[str, Any]
Reports = list[Json | None]

_ENOUGH = 3.0
"""No further round begins after this multiple of ``--timeout``."""


def main() -> None:
    """Measure and print JSON."""
    parser = argparse.ArgumentParser()
    parser.add_argument("report", type=Path)
    parser.add_argument("--folder", type=Path, required=True, help="its disk is measured")
    parser.add_argument("--good", type=Path, help="the saved report of a good node")
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--partners", type=int, default=1)
    parser.add_argument("--master", default="127.0.0.1:0", help="host:port of the store, which rank 0 opens")
    parser.add_argument("--timeout", type=float, default=60.0)
    options = parser.parse_args()
    report = json.loads(options.report.read_text())
    good = json.loads(options.good.read_text()) if options.good else None
    measure = _alone if options.nodes == 1 else _with_others
    print(json.dumps({"reports": measure(report, good, options)}))


def _alone(report: Json, good: Json | None, options: argparse.Namespace) -> Reports:
    began_s, of = time.monotonic(), operands()
    while True:
        report = merge(report, _of_node(report, of, options))
        if report["rounds"] >= rounds_needed([report], good) or _is_late(began_s, options):
            return [report]


def _of_node(report: Json, of: Operands, options: argparse.Namespace) -> Json:
    """Return products, and the speed of the disk where an earlier round has one."""
    number = report.get("rounds", 0)
    _say(f"products of matrices, round {number + 1}")
    measured: Json = {"products": measure_products(of)}
    if number and "disk_bytes_per_s" in report:
        try:
            measured |= measure_disk(options.folder, options.timeout)
        except SmaltiError as error:
            _say(error.message)
    return measured


def _is_late(began_s: float, options: argparse.Namespace) -> bool:
    return time.monotonic() - began_s > _ENOUGH * float(options.timeout)


def _with_others(report: Json, good: Json | None, options: argparse.Namespace) -> Reports:
    host, _, port = options.master.rpartition(":")
    rank, nodes, timeout = options.rank, options.nodes, timedelta(seconds=options.timeout)
    _say(f"waiting for node 0 at {options.master}")
    store = dist.TCPStore(host, int(port), nodes, rank == 0, timeout, wait_for_workers=False)
    began_s, of, present = time.monotonic(), operands(), list(range(nodes))
    while True:
        number = report.get("rounds", 0)
        report = merge(report, _round(dist.PrefixStore(str(number), store), report, of, present, options))
        store.set(f"{number}/report/{rank}", json.dumps(report))
        _say("waiting for the reports of the others")
        if rank == 0:
            reports = _collect(store, number, present, nodes, timeout)
            again = number + 1 < rounds_needed(reports, good) and not _is_late(began_s, options)
            store.set(f"{number}/all", json.dumps({"reports": reports, "again": again}))
        else:
            store.wait([f"{number}/all"], 2 * timeout)
        decision = json.loads(store.get(f"{number}/all"))
        store.set(f"{number}/read/{rank}", "yes")
        reports = decision["reports"]
        present = [node for node in range(nodes) if reports[node] is not None]
        if not decision["again"] or rank not in present:
            break
    if rank == 0:  # it leaves last, because it has the store
        _wait(store, [f"{number}/read/{node}" for node in present], timedelta(seconds=10))
    return list(reports)


def _round(store: dist.Store, report: Json, of: Operands, present: list[int], options: argparse.Namespace) -> Json:
    """Return what this node measures in one round, with the nodes that are present."""
    rank, timeout, turn = options.rank, timedelta(seconds=options.timeout), f"turn/{report['boot']}"
    mine = store.add(turn, 1) - 1
    if mine:
        _say("waiting for the nodes of this machine that measure first")
        _wait(store, [f"{turn}/{mine - 1}"], timeout)
    measured = _of_node(report, of, options)
    store.set(f"{turn}/{mine}", "done")
    store.set(f"ready/{rank}", "yes")
    _wait(store, [f"ready/{node}" for node in present], timeout)
    address, links = _address(options.master.rpartition(":")[0]), []
    for partner in partners(rank, options.nodes, options.partners):
        if partner not in present or not store.check([f"ready/{partner}"]):
            links.append({"partner": partner, "problem": "not ready"})
            continue
        _say(f"all-reduce with node {partner}")
        links.append(measure_link(store, rank, partner, address, options.timeout / 2))
    return measured | {"links": links}


def _collect(store: dist.Store, number: int, present: list[int], nodes: int, timeout: timedelta) -> Reports:
    """Return the reports of a round, None of a node that did not answer."""
    keys = [f"{number}/report/{node}" for node in range(nodes)]
    _wait(store, [keys[node] for node in present], timeout)
    return [json.loads(store.get(key)) if store.check([key]) else None for key in keys]


def _wait(store: dist.Store, keys: list[str], timeout: timedelta) -> None:
    """Wait until all keys are set, at most ``timeout``; who did not answer is seen later."""
    try:
        store.wait(keys, timeout)
    except dist.DistStoreError:
        _say(f"no answer within {timeout.total_seconds():.0f} s")


def _address(host: str) -> str:
    """Return the address of this node on the way to ``host``: the network that a run would use."""
    family, kind, protocol, _, target = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as way:
        way.connect(target)
        return str(way.getsockname()[0])


def _say(what: str) -> None:
    print(what, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
