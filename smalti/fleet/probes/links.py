"""All-reduces between this node and others, two at a time, over a range of sizes; and how far their clocks are apart.

In each round every node has one partner (circle method: n - 1 rounds bring all pairs of n nodes together). A pair is
a process group of its own, so that one that fails ends no other. Bus bandwidth is that of nccl-tests
(doc/PERFORMANCE.md): bytes / seconds x 2 (n - 1) / n, with n = 2 bytes / seconds.
"""

import statistics
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

SIZES = tuple(2**exponent for exponent in range(12, 31, 3))
"""Bytes of the tensors, 4 KiB to 1 GiB; a pair stops after one that took longer than ``_ENOUGH_S``."""
_ENOUGH_S = 0.1
_REPEATS, _PINGS = 5, 9


def partners(rank: int, nodes: int, count: int) -> Iterator[int]:
    """Yield the partner of ``rank`` in each of the first ``count`` rounds of the circle method, itself left out."""
    circle = nodes - 1 if nodes % 2 == 0 else nodes  # of an odd number one node pauses in each round
    for number in range(min(count, circle)):
        if rank == circle:
            partner = next(node for node in range(circle) if (2 * node - number) % circle == 0)
        else:
            partner = (number - rank) % circle
            partner = circle if partner == rank else partner
        if partner < nodes:
            yield partner


def measure_link(store: dist.Store, rank: int, partner: int, address: str, timeout_s: float) -> dict[str, Any]:
    """Return ``bytes_per_s`` by size, ``latency_s`` and ``ahead_s`` (this clock less the partner's), or ``problem``."""
    name, first = f"{min(rank, partner)}-{max(rank, partner)}", rank < partner
    timeout = timedelta(seconds=timeout_s)
    try:
        group = _gloo(dist.PrefixStore(f"gloo/{name}", store), int(not first), address, timeout)
        ahead_s = _ahead(group, first)
        device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
        if device.type == "cuda":
            group = _nccl(dist.PrefixStore(f"nccl/{name}", store), int(not first), timeout)
        times = _times(group, device)
    except (RuntimeError, ValueError) as error:
        return {"partner": partner, "problem": " ".join(str(error).split())[:200]}
    return {
        "partner": partner,
        "bytes_per_s": {str(size): size / took_s for size, took_s in times.items()},
        "latency_s": times[SIZES[0]],
        "ahead_s": ahead_s,
    }


def _gloo(store: dist.Store, rank: int, address: str, timeout: timedelta) -> Any:
    options: Any = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = timeout
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
    return dist.ProcessGroupGloo(store, rank, 2, options)


def _nccl(store: dist.Store, rank: int, timeout: timedelta) -> Any:
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return dist.ProcessGroupNCCL(store, rank, 2, options)


def _times(group: Any, device: torch.device) -> dict[int, float]:
    """Return the median seconds of an all-reduce by bytes; both sides stop at the same size."""
    times: dict[int, float] = {}
    for size in SIZES:
        numbers, repeats = torch.zeros(size // 4, device=device), []
        for _ in range(_REPEATS):
            began_s = time.perf_counter()
            group.allreduce([numbers]).wait()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            repeats.append(time.perf_counter() - began_s)
        longest = torch.tensor([statistics.median(repeats)], device=device)
        group.allreduce([longest], dist.ReduceOp.MAX).wait()
        times[size] = float(longest)
        if times[size] > _ENOUGH_S:
            break
    return times


def _ahead(group: Any, first: bool) -> float:
    """Return the seconds by which this clock is ahead of the partner's: from the ping that returned soonest."""
    clock, best_ns, ahead_s = torch.zeros(1, dtype=torch.int64), 2**62, torch.zeros(1, dtype=torch.float64)
    for tag in range(_PINGS):
        if first:
            began_ns = time.time_ns()
            group.send([clock], 1, tag).wait()
            group.recv([clock], 1, tag).wait()
            ended_ns = time.time_ns()
            if ended_ns - began_ns < best_ns:
                best_ns = ended_ns - began_ns
                ahead_s[0] = (began_ns + best_ns // 2 - int(clock)) / 1e9
        else:
            group.recv([clock], 0, tag).wait()
            clock[0] = time.time_ns()
            group.send([clock], 0, tag).wait()
    group.allreduce([ahead_s]).wait()  # a sum: it is 0 on the second
    return float(ahead_s) if first else -float(ahead_s)
