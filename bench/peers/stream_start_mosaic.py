"""mosaicml-streaming's start, as far as the order of the epoch is known (child of bench/stream_start.py).

The index is as its writer makes it for rows of 4,096 int32 tokens in shards of 64 MiB; the shards themselves do not
exist, so no sample is read, and the time ends when this rank knows which samples are its own. Its own classes do all
of it: the constructor parses the index, ``load_state_dict`` takes the state of two thirds of an epoch, and what
``__iter__`` does first follows. World of 16 nodes with 8 ranks: this process is the first rank of its node, which works
the order out for all of them. One stream without weights, the cheapest case.
"""

import json
import os
import threading
import time
from pathlib import Path
from typing import Any

from stream_child import Child

child = Child()
job = child.job

import numpy as np  # noqa: E402

child.imported()

from streaming import StreamingDataset  # noqa: E402
from streaming.base.world import World  # noqa: E402

imported_s = time.monotonic()
ROWS_PER_SHARD, ROW_BYTES = 4096, 4 * 4096
NODES, RANKS_PER_NODE = 16, 8


def make(folder: Path, rows: int) -> None:
    """Write index.json of a data set without its shards."""
    folder.mkdir(parents=True)
    (folder.parent / "nothing").mkdir(exist_ok=True)
    config = {
        "column_encodings": ["ndarray:int32:4096"],
        "column_names": ["tokens"],
        "column_sizes": [ROW_BYTES],
        "compression": None,
        "format": "mds",
        "hashes": [],
        "size_limit": 1 << 26,
        "version": 2,
        "zip_data": None,
    }
    size = ROWS_PER_SHARD * (ROW_BYTES + 4)
    shards = [
        {
            **config,
            "raw_data": {"basename": f"shard.{n:05d}.mds", "bytes": size, "hashes": {}},
            "samples": ROWS_PER_SHARD,
        }
        for n in range(rows // ROWS_PER_SHARD)
    ]
    (folder / "index.json").write_text(json.dumps({"shards": shards, "version": 2}, sort_keys=True))


class SharedMemoryPeak(threading.Thread):
    """A thread that records the peak size of /dev/shm, read every 5 ms."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.before, self.peak, self.ended = set(os.listdir("/dev/shm")), 0, threading.Event()

    def run(self) -> None:
        """Read the size until ``ended`` is set."""
        while not self.ended.wait(0.005):
            total = 0
            for name in set(os.listdir("/dev/shm")) - self.before:
                try:
                    total += os.stat(f"/dev/shm/{name}").st_size
                except FileNotFoundError:
                    continue
            self.peak = max(self.peak, total)


def main() -> None:
    """Time the constructor and the order separately."""
    folder = Path(job["folder"])
    if job["do"] == "make":
        make(folder, job["rows"])
        child.end()
        return
    watch = SharedMemoryPeak()
    watch.start()
    child.notes["stream_imports_s"] = imported_s - child.begin_s
    dataset = StreamingDataset(
        remote=str(folder.parent / "nothing"), local=str(folder), shuffle=True, batch_size=job["rows_per_rank"]
    )
    state: dict[str, Any] = {"epoch": 0, "sample_in_epoch": job["rows"] * 2 // 3, "shuffle_seed": 9176}
    dataset.load_state_dict({**state, "num_canonical_nodes": NODES, "initial_physical_nodes": NODES})
    child.built()
    dataset._unique_worker_world = dataset._unique_rank_world.detect_workers()
    dataset._parallel_worker_world = World(NODES, RANKS_PER_NODE, 1, 0)
    epoch, sample = dataset._resume_incr_epoch()
    assert sample == state["sample_in_epoch"]
    mine = dataset._get_work(epoch, sample)
    child.first(mine[:1])
    child.notes["first_after_imports_s"] = child.notes["first_s"] - child.notes["stream_imports_s"]
    child.notes["samples_of_this_rank"] = int(np.size(mine))
    watch.ended.set()
    child.notes["shm_peak_bytes"] = watch.peak
    child.end()


main()
