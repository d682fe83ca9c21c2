"""Measures an all-reduce over gloo between two processes: ``python -m smalti.fleet.probes.all_reduce``.

Prints one JSON object: the section ``collective`` of ``smalti.config.measured``. Each process has one thread; their
store is a file, without a port. The tensor is fp32; a time is the median of its repeats.
"""

import json
import os
import statistics
import tempfile
import time

RANKS = 2
SMALL, LARGE = 1, 1 << 22
"""Elements of the tensor."""
_REPEATS = 9


def main() -> None:
    """Measure and print JSON."""
    import torch  # before the fork: the child need not import it again

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="smalti-") as folder:
        path = os.path.join(folder, "meet")
        child = os.fork()
        if child == 0:
            _measure(1, path)
            os._exit(0)
        answer = _measure(0, path)
        os.waitpid(child, 0)
    print(json.dumps(answer))


def _measure(rank: int, path: str) -> dict[str, float]:
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.FileStore(path, RANKS), rank=rank, world_size=RANKS)
    times = {}
    for elements in (SMALL, LARGE):
        numbers, repeats = torch.ones(elements), list[float]()
        for _ in range(_REPEATS):
            dist.barrier()
            start = time.perf_counter()
            dist.all_reduce(numbers)
            repeats.append(time.perf_counter() - start)
        times[elements] = statistics.median(repeats)
    dist.destroy_process_group()
    beyond_s = max(times[LARGE] - times[SMALL], 1e-9)
    return {"ranks": RANKS, "latency_s": times[SMALL], "bytes_per_s": 4 * LARGE / beyond_s}


if __name__ == "__main__":
    main()
