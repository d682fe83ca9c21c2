"""Time that training is blocked by a checkpoint: Smalti beside DCP, synchronous and asynchronous with its best stager.

    make bench NAME=checkpoint                     a state of 4 GB on 2 ranks, 5 turns: about 30 minutes
    make bench NAME=checkpoint ARGS=--short        3 turns, under 20 minutes; prints the ratio of blocked time last

Two ranks (gloo) hold the state in equal shards. A step computes for about a second on each rank, and then changes every
tensor. The training threads of both ranks share one core, all other threads the other one. The savers take turns: each
saves in the first of its steps, and trains until the checkpoint is complete. The loads come after, each rank on a
core, as a resume does them, four times as many as turns: from the disk, and verified also from shared memory, as after
``train.checkpoint.peer_copies``. *Blocked* is the time in the call that
saves, and the wait before tensors may change. DCP's peers are ``dcp.save`` and ``dcp.async_save`` with a
``DefaultStager`` (shared memory, asynchronous staging). Bounds, beyond which the script exits with 1: a tenth of
``dcp.save``'s blocked time and not more than ``dcp.async_save``'s; steps during a write at most 10 % slower; memory as
planned within 5 %; verification at most 5 % of a load whose files are not in the page cache.
"""

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from paired import ratio_of
from record import ROOT, RecordOption, record
from torch import Tensor
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.tensor import DTensor, Shard, init_device_mesh

from smalti.distributed.checkpoint import checkpoint
from smalti.distributed.checkpoint.saver import Saver
from smalti.fleet.agent.memory import SHARED

RANKS, TENSORS = 2, 32
BLOCKED_RATIO, SLOWDOWN_FRAC, MEMORY_FRAC, VERIFY_FRAC = 10.0, 0.10, 0.05, 0.05
MODES = ("smalti", "dcp.save", "dcp.async_save")


def on_core(core: int) -> None:
    """Run this thread, and those that it starts, on one core (of two or more)."""
    cores = sorted(os.sched_getaffinity(0) | set(range(os.cpu_count() or 1)))
    os.sched_setaffinity(0, {cores[core % len(cores)]})


class Training:
    """The state and the steps of one rank."""

    def __init__(self, n_bytes: int) -> None:
        mesh = init_device_mesh("cpu", (RANKS,))
        rows = n_bytes // RANKS // TENSORS // 4 // 1024
        self.tensors: dict[str, Tensor] = {
            f"model.{number:02d}": DTensor.from_local(torch.ones(rows, 1024), mesh, [Shard(0)])
            for number in range(TENSORS)
        }
        self._matrix = torch.ones(768, 768)
        self._products = 1
        began_s = time.perf_counter()
        self._compute(20)
        self._products = round(20 / (time.perf_counter() - began_s))

    @property
    def local_bytes(self) -> int:
        """Return the bytes of this rank."""
        return sum(tensor.to_local().nbytes for tensor in self.tensors.values())  # type: ignore[attr-defined]

    def step(self, wait: Callable[[], None]) -> tuple[float, float]:
        """Compute, wait until tensors may change, and change them; return seconds, and those of them that it waited."""
        began_s = time.perf_counter()
        self._compute(self._products)
        dist.barrier()
        wait_s = time.perf_counter()
        wait()
        waited_s = time.perf_counter() - wait_s
        for tensor in self.tensors.values():
            tensor.to_local().add_(1.0)  # type: ignore[attr-defined]
        return time.perf_counter() - began_s, waited_s

    def _compute(self, products: int) -> None:
        for _ in range(products):
            self._matrix @ self._matrix


class Smalti:
    """Saves with ``Saver``."""

    def __init__(self, folder: Path) -> None:
        self.saver = Saver(folder)

    def save(self, training: Training, path: Path) -> None:
        """Begin to save."""
        self.saver.start(1, training.tensors, {"step": 1}, keep=1)

    def wait(self) -> None:
        """Return when tensors may change."""
        self.saver.wait_copied()

    def is_complete(self) -> bool:
        """Return whether the checkpoint is complete, and end the save."""
        if self.saver.is_writing:
            return False
        save = self.saver.result()
        assert save is None or save.failure is None, save
        return True


class Synchronous:
    """Saves with ``dcp.save``."""

    def save(self, training: Training, path: Path) -> None:
        """Save."""
        dcp.save(dict(training.tensors), checkpoint_id=path)

    def wait(self) -> None:
        """Return at once."""

    def is_complete(self) -> bool:
        """Return True."""
        return True


class Asynchronous:
    """Saves with ``dcp.async_save`` and its best stager on a CPU."""

    def __init__(self) -> None:
        self._group = dist.new_group(backend="gloo")
        options = StagingOptions(
            use_pinned_memory=False, use_shared_memory=True, use_async_staging=True, use_non_blocking_copy=False
        )
        self._stager = DefaultStager(options)

    def save(self, training: Training, path: Path) -> None:
        """Begin to save."""
        self._response = dcp.async_save(
            dict(training.tensors), checkpoint_id=path, process_group=self._group, async_stager=self._stager
        )

    def wait(self) -> None:
        """Return when everything is staged."""
        self._response.staging_completion.result()  # type: ignore[union-attr]

    def is_complete(self) -> bool:
        """Return whether the upload is complete."""
        return bool(self._response.upload_completion.done())  # type: ignore[union-attr]


def turn(training: Training, saver: Any, path: Path) -> dict[str, Any]:
    """Save once; return the blocked time, and the steps during the write and, as many, after it."""
    dist.barrier()
    shutil.rmtree(path.parent if path.name.startswith("step-") else path, ignore_errors=True)
    dist.barrier()
    path.parent.mkdir(parents=True, exist_ok=True)
    before = [training.step(lambda: None)[0] for _ in range(2)]
    began_s = time.perf_counter()
    on_core(1)  # for the threads that it starts
    saver.save(training, path)
    on_core(0)
    blocked_s = time.perf_counter() - began_s
    during: list[float] = []
    done = torch.zeros(1)
    while not done.item():
        seconds, waited_s = training.step(saver.wait if not during else lambda: None)
        blocked_s += waited_s
        during.append(seconds - waited_s)
        done.fill_(saver.is_complete())
        dist.all_reduce(done, op=dist.ReduceOp.MIN)
    total_s = time.perf_counter() - began_s
    after = [training.step(lambda: None)[0] for _ in range(2)]
    return {"blocked_s": blocked_s, "total_s": total_s, "during": during[:-1], "alone": before + after}


def loads(training: Training, path: Path, memory: Path, *, verified_first: bool) -> dict[str, float]:
    """Return the seconds of a load without and with verification, its files not in the page cache; and from memory."""
    seconds = {}
    names = ("load", "verify and load", "from memory")
    on_core(dist.get_rank())  # nothing trains beside a load
    for name in reversed(names) if verified_first else names:
        for file in path.rglob("*"):
            if file.is_file():
                with open(file, "rb") as opened:
                    os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        dist.barrier()
        began_s = time.perf_counter()
        if name == "load":
            checkpoint.load(path, training.tensors)
        else:  # as a resume does
            source = memory / path.name if name == "from memory" else path
            assert checkpoint.newest(source.parent, shared=True, load_verifies=True) == str(source)
            assert checkpoint.load_verified(source, training.tensors) is None
        dist.barrier()
        seconds[name] = time.perf_counter() - began_s
    on_core(0)
    return seconds


def rank_main(rank: int, folder: str, memory: str, n_bytes: int, turns: int) -> None:
    """Measure as one rank; rank 0 writes the figures."""
    torch.set_num_threads(1)
    on_core(0)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=RANKS)
    training, place = Training(n_bytes), Path(folder)
    paths = {"smalti": place / "smalti" / "step-00000001", **{mode: place / mode for mode in MODES[1:]}}
    smalti = Smalti(paths["smalti"].parent)
    savers: dict[str, Any] = {"smalti": smalti, "dcp.save": Synchronous(), "dcp.async_save": Asynchronous()}
    rows: dict[str, list[dict[str, Any]]] = {mode: [] for mode in MODES}
    for number in range(turns + 1):  # the first one plans and gets its memory
        for mode in MODES if number % 2 else reversed(MODES):
            resident_bytes = psutil.Process().memory_info().rss
            of_rank = turn(training, savers[mode], paths[mode])
            both: list[Any] = [None] * RANKS
            dist.all_gather_object(both, of_rank)
            if number:
                rows[mode].append(slower(both))
            if mode == "smalti" and not number:
                extra_bytes = psutil.Process().memory_info().rss - resident_bytes
            if rank == 0:
                print(f"{mode}: blocked {both[0]['blocked_s']:.3f} s of {both[0]['total_s']:.1f} s", file=sys.stderr)
    if rank == 0:
        shutil.copytree(paths["smalti"], Path(memory) / paths["smalti"].name)
    dist.barrier()
    of_number = partial(loads, training, paths["smalti"], Path(memory))
    load = [of_number(verified_first=bool(number % 2)) for number in range(4 * turns)]
    if rank == 0:
        figures = {"rows": rows, "loads": load, "memory_bytes": extra_bytes, "planned_bytes": training.local_bytes}
        (place / "figures.json").write_text(json.dumps(figures))
    dist.barrier()
    os._exit(0)  # the stager's threads never end


def slower(both: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the turn of the rank that was blocked longer."""
    return max(both, key=lambda row: row["blocked_s"])


def main() -> None:
    """Measure, print and check."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--short", action="store_true", help="3 turns")
    parser.add_argument("--turns", type=int, default=5, help="saves of each; at least 3")
    parser.add_argument("--gigabytes", type=float, default=4.0, help="size of the state on both ranks together")
    parser.add_argument("--folder", default=None, help="where checkpoints are written; absent: a temporary folder")
    parser.add_argument("--record", action=RecordOption, help="write bench/results/checkpoint.json")
    options = parser.parse_args()
    (ROOT / "build").mkdir(exist_ok=True)
    turns = 3 if options.short else max(3, options.turns)
    with (
        tempfile.TemporaryDirectory(prefix="bench-checkpoint-", dir=options.folder or ROOT / "build") as folder,
        tempfile.TemporaryDirectory(prefix="bench-checkpoint-", dir=SHARED) as memory,
    ):
        mp.spawn(rank_main, (folder, memory, int(options.gigabytes * 1e9), turns), nprocs=RANKS)
        measured = json.loads((Path(folder) / "figures.json").read_text())
    figures, missed = summary(measured)
    for line in missed:
        print("missed:", line)
    if options.record:
        print("wrote", record("checkpoint", figures | {"gigabytes": options.gigabytes, "missed": missed}))
    print(f"ratio of blocked time, dcp.save / smalti: {figures['blocked']['dcp.save']['ratio']:.1f}")
    sys.exit(1 if missed else 0)


def summary(measured: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Print the tables; return the figures and the bounds that were missed."""
    rows, missed = measured["rows"], []
    blocked = {mode: [row["blocked_s"] for row in rows[mode]] for mode in MODES}
    ratios = {mode: ratio_of(blocked[mode], blocked["smalti"], names=(mode, "smalti")) for mode in MODES[1:]}
    print("| saver | blocked, s | until complete, s | steps during the write, slower |\n| --- | --- | --- | --- |")
    slowdowns = {}
    for mode in MODES:
        alone = statistics.median([s for row in rows[mode] for s in row["alone"]])
        during = [s for row in rows[mode] for s in row["during"]]
        slowdowns[mode] = statistics.median(during) / alone - 1 if during else None
        slower_by = "-" if slowdowns[mode] is None else f"{slowdowns[mode]:.1%}"
        total = statistics.median(row["total_s"] for row in rows[mode])
        print(f"| {mode} | {statistics.median(blocked[mode]):.3f} | {total:.1f} | {slower_by} |")
    for ratio in ratios.values():
        print(ratio)
    load = {name: [row[name] for row in measured["loads"]] for name in measured["loads"][0]}
    verification = ratio_of(load["verify and load"], load["load"], names=("verify and load", "load"))
    recovery = ratio_of(load["verify and load"], load["from memory"], names=("from disk", "from memory"))
    memory = measured["memory_bytes"] / measured["planned_bytes"]
    print(verification)
    print(recovery)
    print(
        f"memory of a rank beyond its state: {measured['memory_bytes'] / 1e9:.3f} GB, {memory:.3f} of what is planned"
    )
    if ratios["dcp.save"].ratio < BLOCKED_RATIO:
        missed.append(f"dcp.save is blocked {ratios['dcp.save'].ratio:.1f} times as long, {BLOCKED_RATIO:g} were asked")
    if ratios["dcp.async_save"].ratio < 1:
        missed.append(f"dcp.async_save is blocked {ratios['dcp.async_save'].ratio:.2f} times as long, 1 was asked")
    if (slowdowns["smalti"] or 0) > SLOWDOWN_FRAC:
        missed.append(f"steps during a write are {slowdowns['smalti']:.1%} slower, {SLOWDOWN_FRAC:.0%} were asked")
    if abs(memory - 1) > MEMORY_FRAC:
        missed.append(f"memory is {memory:.3f} of the plan, within {MEMORY_FRAC:.0%} was asked")
    if verification.ratio > 1 + VERIFY_FRAC:
        missed.append(f"verification adds {verification.ratio - 1:.1%} to a load, {VERIFY_FRAC:.0%} were asked")
    figures = {
        "blocked": {mode: ratio.figures() for mode, ratio in ratios.items()},
        "seconds_until_complete": {mode: [row["total_s"] for row in rows[mode]] for mode in MODES},
        "slowdown_frac": slowdowns,
        "verification": verification.figures(),
        "recovery": recovery.figures(),
        "memory_bytes": measured["memory_bytes"],
        "planned_bytes": measured["planned_bytes"],
    }
    return figures, missed


if __name__ == "__main__":
    main()
