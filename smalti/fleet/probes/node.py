"""Measures a node with PyTorch, alone or with others: ``python -m smalti.fleet.probes.node REPORT [...]``.

``REPORT`` is a file with the report of ``smalti/fleet/check/local.py``. Prints one JSON object: ``reports``, those
of all nodes by rank with ``products`` and ``links`` added; None for a node that did not answer. Says on stderr what it
is at.

Nodes that share a machine (containers, tests) measure products in turns. Every node waits at most ``--timeout`` seconds
for another, and ends with a report in any case.
"""

import argparse
import json
import socket
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from smalti.fleet.probes.links import measure_link, partners
from smalti.fleet.probes.products import measure_products

Json = dict[str, Any]


def main() -> None:
    """Measure and print JSON."""
    parser = argparse.ArgumentParser()
    parser.add_argument("report", type=Path)
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--master", default="127.0.0.1:0", help="host:port of the store, which rank 0 opens")
    parser.add_argument("--timeout", type=float, default=60.0)
    options = parser.parse_args()
    report = json.loads(options.report.read_text())
    if options.nodes == 1:
        _say("products of matrices")
        print(json.dumps({"reports": [report | {"products": measure_products()}]}))
        return
    print(json.dumps({"reports": _with_others(report, options)}))


def _with_others(report: Json, options: argparse.Namespace) -> list[Json | None]:
    host, _, port = options.master.rpartition(":")
    rank, nodes, timeout = options.rank, options.nodes, timedelta(seconds=options.timeout)
    _say(f"waiting for node 0 at {options.master}")
    store = dist.TCPStore(host, int(port), nodes, rank == 0, timeout, wait_for_workers=False)
    turn = f"turn/{report['boot']}"
    mine = store.add(turn, 1) - 1
    if mine:
        _say("waiting for the nodes of this machine that measure first")
        _wait(store, [f"{turn}/{mine - 1}"], timeout)
    _say("products of matrices")
    report["products"] = measure_products()
    store.set(f"{turn}/{mine}", "done")
    store.set(f"ready/{rank}", "yes")
    _wait(store, [f"ready/{node}" for node in range(nodes)], timeout)
    address, report["links"] = _address(host), []
    for partner in partners(rank, nodes, options.rounds):
        if not store.check([f"ready/{partner}"]):
            report["links"].append({"partner": partner, "problem": "not ready"})
            continue
        _say(f"all-reduce with node {partner}")
        report["links"].append(measure_link(store, rank, partner, address, options.timeout / 2))
    _say("waiting for the reports of the others")
    store.set(f"report/{rank}", json.dumps(report))
    return _gathered(store, rank, nodes, timeout)


def _gathered(store: dist.Store, rank: int, nodes: int, timeout: timedelta) -> list[Json | None]:
    """Return the reports of all nodes, which rank 0 collects; it leaves last, because it has the store."""
    everyone = [f"report/{node}" for node in range(nodes)]
    if rank == 0:
        _wait(store, everyone, timeout)
        store.set("all", json.dumps([json.loads(store.get(key)) if store.check([key]) else None for key in everyone]))
        store.set("read/0", "yes")
        present = [node for node in range(nodes) if store.check([everyone[node]])]
        _wait(store, [f"read/{node}" for node in present], timedelta(seconds=10))
        return list(json.loads(store.get("all")))
    store.wait(["all"], 2 * timeout)
    gathered = json.loads(store.get("all"))
    store.set(f"read/{rank}", "yes")
    return list(gathered)


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
