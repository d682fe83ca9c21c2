"""20 jobs of 3,072 ranks restart at once from a store that counts: of each job one rank asks, once, below its rate."""

import re
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from made_checkpoints import checkpoint, digests
from made_copies import opened
from s3_buckets import Bucket

from smalti.config.load import from_dict
from smalti.config.run import JobConfig
from smalti.train import checkpoint_copies

STEPS, RATE = 6, 20.0


class World(threading.local):
    """The ranks of a job, one after the other in a thread: rank 0 acts, the others receive what it sent, in order."""

    rank = 0
    received = 0

    def __init__(self) -> None:
        self.sent: list[Any] = []

    def broadcast(self, action: Callable[[], Any]) -> Any:
        if self.rank == 0:
            self.sent.append(action())
            return self.sent[-1]
        self.received += 1
        return self.sent[self.received - 1]


def _restart(world: World, ranks: int, root: Path, number: int, bucket: str) -> tuple[Path, set[int]]:
    """Restore a job on all its ranks; returns its folder, and the ranks that did not receive all that rank 0 sent."""
    tree = {
        "name": f"job-{number}", "folder": str(root / str(number)),
        "train": {"duration": "9step", "global_batch_tokens": 12, "optimizer": {"lr": 0.05},
                  "checkpoint": {"save_to": f"s3://{bucket}/runs", "save_requests_per_s": RATE}},
    }  # fmt: skip
    config = from_dict(JobConfig, tree).config
    folder: Any = SimpleNamespace(saved_step=lambda: None, checkpoints=root / str(number) / "checkpoints")
    wrong = set()
    for world.rank in range(ranks):
        world.received = 0
        checkpoint_copies.restore(config, folder, _Events())
        if world.rank and world.received != len(world.sent):
            wrong.add(world.rank)
    return folder.checkpoints, wrong


class _Events:
    def write(self, kind: str, **fields: Any) -> None:
        """Nothing is written."""


@pytest.mark.slow
def test_one_rank_of_each_job_asks_the_store_once(
    tmp_path: Path, s3: Bucket, monkeypatch: pytest.MonkeyPatch, proof: Any
) -> None:
    ranks, jobs = proof(short=16, full=3072), proof(short=6, full=20)
    saved = [checkpoint(tmp_path / "saved", step) for step in range(1, STEPS + 1)]
    for number in range(jobs):
        for path in saved[-2:]:
            opened(f"s3://{s3.name}/runs/job-{number}").upload(path)
    world, asked = World(), defaultdict(list)

    def ask(head: str, key: str) -> None:
        target = head.split(" ", 2)[1]
        name = re.search(r"job-(\d+)", target)
        asked[name[1] if name else "?"].append((time.monotonic(), target))

    s3.proxy.refuse = ask  # type: ignore[assignment]
    monkeypatch.setattr(checkpoint_copies.dist, "get_rank", lambda: world.rank)
    monkeypatch.setattr(checkpoint_copies, "broadcast_from_rank0", world.broadcast)
    with ThreadPoolExecutor(jobs) as pool:
        restarts = [pool.submit(_restart, world, ranks, tmp_path / "jobs", n, s3.name) for n in range(jobs)]
    for job in restarts:
        folder, wrong = job.result()
        assert (wrong, digests(folder / saved[-1].name)) == (set(), digests(saved[-1]))
    assert asked.keys() == {str(number) for number in range(jobs)}
    for requests in asked.values():
        lists = [target for _, target in requests if "list-type" in target]
        reads = [target for _, target in requests if "list-type" not in target]
        assert len(lists) == 1
        assert len([target for target in reads if "/shards/" not in target]) <= 8, "metadata"
        times = sorted(at for at, _ in requests)
        assert len(times) <= RATE * (times[-1] - times[0] + 0.75), "a burst of a quarter second, and delays on the way"
