"""20 jobs of 3,072 ranks start at once beside a store that counts: of each job one rank reads, few objects, below its
rate.

Each job is a process. Its rank 0 trains (a world of one); then the same process is each of the other ranks at the seam
of ``torch.distributed``: it restores, finds its checkpoint and calls the hooks with what rank 0 has sent. The access
key of a request names job and rank. The load of the other ranks is not run: it gets a path in the run folder, no store.
"""

import os
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch.distributed as dist
import toy_run
from gloo_ranks import server, set_up
from s3_buckets import Bucket
from s3_server import s3_environment

from smalti.base.objects import Requests
from smalti.config.load import from_dict
from smalti.config.run import RunConfig
from smalti.track.checkpoints.copies import THREADS, Copies
from smalti.track.events import NoEventLog
from smalti.track.run import RunFolder, config_text
from smalti.train import build, checkpoint_copies, fit, resume
from smalti.train.hooks import Hook

RATE, PART = 16.0, 16_384
BURSTS = 2 * 0.25 * RATE
"""Requests that may be sent at once: at the restore, and at the first copy."""


class Ranks:
    """The ranks of a job, one after the other in one process: what rank 0 broadcasts from ``restore`` to the end of
    ``find``, others receive."""

    def __init__(self, job: str, patch: pytest.MonkeyPatch) -> None:
        self._job = job
        self._sent: list[list[Any]] = []
        self._is_kept = False
        self._broadcast, self._restore = dist.broadcast_object_list, checkpoint_copies.restore
        self._find = resume.Checkpoints.find
        patch.setattr(dist, "broadcast_object_list", self._send)
        self.become(0)

    def become(self, rank: int) -> None:
        self.rank, self.received = rank, 0
        os.environ["AWS_ACCESS_KEY_ID"] = f"{self._job}:{rank}"

    def restore_first(self, barrier: Any, patch: pytest.MonkeyPatch) -> None:
        """Rank 0 keeps what it sends from ``restore`` on, which all jobs begin together."""

        def restore(*args: Any) -> Any:
            self._is_kept = True
            barrier.wait(1200)
            return self._restore(*args)

        def find(checkpoints: resume.Checkpoints) -> str | None:
            path = self._find(checkpoints)
            self._is_kept = False
            return path

        patch.setattr(checkpoint_copies, "restore", restore)
        patch.setattr(resume.Checkpoints, "find", find)

    def run_others(self, ranks: int, config: RunConfig, patch: pytest.MonkeyPatch) -> int:
        """Run what touches a store on all other ranks; returns the number of them that received all."""
        patch.setattr(dist, "get_rank", lambda *_: self.rank)
        job: Any = SimpleNamespace(is_first=False, config=config, folder=RunFolder(config.run_folder))
        complete, nothing = 0, cast("Any", None)
        for rank in range(1, ranks):
            self.become(rank)
            stored = self._restore(config, job.folder, NoEventLog())
            path = self._find(resume.Checkpoints(job.folder, NoEventLog(), None, stored))
            assert path == str(job.folder.checkpoint(4))
            [hook] = checkpoint_copies.watch(config, stored)
            hook.on_start(job)
            hook.on_checkpoint(job, "step-00000004")
            hook.on_step(job, nothing)
            complete += not hook.is_busy(job) and self.received == len(self._sent)
            hook.close(job)
        return complete

    def _send(self, items: list[Any], *args: Any, **options: Any) -> None:
        if self.rank == 0:
            self._broadcast(items, *args, **options)
            if self._is_kept:
                self._sent.append(list(items))
            return
        items[:] = self._sent[self.received]
        self.received += 1


class Started(Hook):
    """Notes when the first step is over."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def on_step(self, job: Any, result: Any) -> None:
        if not self._path.exists():
            self._path.write_text(str(time.monotonic()))


def _job(config: RunConfig, ranks: int, barrier: Any, environment: dict[str, str]) -> None:
    """environment: of the store; the server that forks this process began with an earlier one."""
    set_up()
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", LOCAL_WORLD_SIZE="1", **environment)
    run = Path(config.run_folder)
    with pytest.MonkeyPatch.context() as patch:
        world = Ranks(config.name, patch)
        world.restore_first(barrier, patch)
        fit(build(config, hooks=[Started(run.with_suffix(".started"))]))
        run.with_suffix(".others").write_text(str(world.run_others(ranks, config, patch)))
    os._exit(0)


def _fill_the_store(root: Path, s3: Bucket, jobs: int) -> list[RunConfig]:
    """Returns the configs of jobs that have lost their disks: each has a copy of step 4, and parts of a newer one."""
    base = toy_run.config(root, duration="8step", checkpoint={"every": "4step"})
    saver = server().Process(target=_save, args=(base,))
    saver.start()
    saver.join(600)
    saved = Path(base.run_folder) / "checkpoints" / "step-00000004"
    section = {"every": "4step", "save_to": f"s3://{s3.name}/runs", "save_requests_per_s": RATE}
    tree = toy_run.config(root, duration="8step", checkpoint=section).model_dump(mode="json")
    configs = []
    for number in range(jobs):
        changes = {"name": f"job-{number}", "folder": str(root / "jobs" / str(number))}
        configs.append(from_dict(RunConfig, tree | changes).config)
        url = f"s3://{s3.name}/runs/job-{number}"
        Copies(url, Requests(5000.0), part_bytes=PART).upload(saved, config=config_text(configs[-1]))
        s3.write(
            f"runs/job-{number}/step-00000008/shards/00000.safetensors.00000-0000000000000000", b"of a killed saver"
        )
    return configs


def _save(config: RunConfig) -> None:
    set_up()
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", LOCAL_WORLD_SIZE="1")
    toy_run.fit_until(0, config, 4)
    os._exit(0)


@dataclass(frozen=True)
class Request:
    """One request that the store received."""

    at_s: float
    rank: int
    is_list: bool
    is_weights: bool


@pytest.mark.slow  # processes
def test_restarts_of_many_jobs_read_the_store_from_one_rank_below_the_rate(
    tmp_path: Path, s3: Bucket, proof: Any, record: Any
) -> None:
    jobs, ranks = proof(short=3, full=20), proof(short=64, full=3072)
    configs = _fill_the_store(tmp_path, s3, jobs)
    requests: dict[str, list[Request]] = defaultdict(list)

    def count(head: str, key: str) -> None:
        job, rank = key.split(":")
        target = head.split(" ", 2)[1]
        request = Request(time.monotonic(), int(rank), "list-type" in target, "safetensors" in target)
        requests[job].append(request)

    answered = s3.proxy.refuse
    s3.proxy.refuse = count  # type: ignore[assignment]
    context = server()
    barrier = context.Barrier(jobs)
    environment = s3_environment(s3.proxy.url)
    processes = [context.Process(target=_job, args=(config, ranks, barrier, environment)) for config in configs]
    for process in processes:
        process.start()
    for process in processes:
        process.join(1800)
    assert [process.exitcode for process in processes] == [0] * jobs
    s3.proxy.refuse = answered
    assert requests.keys() == {config.name for config in configs}
    figures: dict[str, list[float]] = defaultdict(list)
    for config in configs:
        run = Path(config.run_folder)
        assert int(run.with_suffix(".others").read_text()) == ranks - 1, "all received what rank 0 has sent"
        received = sorted(requests[config.name], key=lambda request: request.at_s)
        assert {request.rank for request in received} == {0}
        assert _excess(received) <= BURSTS + 1 + THREADS, "requests in flight may arrive together"
        started_s = float(run.with_suffix(".started").read_text())
        at_start = [request for request in received if request.at_s < started_s]
        figures["lists"].append(sum(request.is_list for request in at_start))
        figures["metadata_gets"].append(sum(not (request.is_list or request.is_weights) for request in at_start))
        figures["weight_gets"].append(sum(request.is_weights for request in at_start))
        figures["requests_per_s"].append((len(at_start) - 1) / (at_start[-1].at_s - at_start[0].at_s))
        assert Copies(f"s3://{s3.name}/runs/{config.name}", Requests(5000.0)).complete()[0] == "step-00000008"
    assert set(figures["lists"]) == {1}
    assert max(figures["metadata_gets"]) <= 8
    assert min(figures["weight_gets"]) > 10, "enough to be slowed down"
    together_s = max(at[0].at_s for at in requests.values()) - min(at[0].at_s for at in requests.values())
    record(
        "restarts",
        {"jobs": jobs, "ranks": ranks, "configured_requests_per_s": RATE, "first_requests_within_s": together_s}
        | {f"{name}_at_most": max(values) for name, values in figures.items()},
    )


def _excess(requests: list[Request]) -> float:
    """Return the largest number of requests above the rate, over all intervals between two of them."""
    lead = [number - RATE * request.at_s for number, request in enumerate(requests)]
    return max(later + 1 - earlier for n, earlier in enumerate(lead) for later in lead[n:])
