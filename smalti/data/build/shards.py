"""Runs a function over the shards of a step, in processes or on a Ray cluster; a complete shard is not run again.

The result of a shard is one file whose name is a digest of all that decides its content: the code's version, the
options, and the digest of the input. It is written under another name and renamed, so it is complete or absent, also
after ``kill -9``. Results do not depend on the number of processes or machines; a shard whose machine is lost is run
again on another one.
"""

import itertools
import multiprocessing
import os
import shutil
import signal
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from smalti.base.errors import RetryableError
from smalti.base.hashing import digest_json
from smalti.base.processes import die_with_parent
from smalti.base.progress import Progress
from smalti.config.build import BuildConfig
from smalti.data.prepare.daft_engine import as_smalti_error

_IN_PROCESS_BYTES = 4 << 20
"""Less work than this is done in this process: starting others takes a second or two."""
_WAITING_PER_SLOT = 4


@dataclass(frozen=True)
class Shard:
    """The work for one file; plain data."""

    result: Path
    arguments: tuple[object, ...]
    """Further arguments of the function, after the path to write to."""
    n_bytes: int
    """Approximate size of the input, for progress."""


def n_workers(config: BuildConfig) -> int:
    """Return the number of processes of a recipe: ``workers``, or one for each core."""
    return config.workers or len(os.sched_getaffinity(0))


def shards_digest(paths: Sequence[Path]) -> str:
    """Return a digest of the names of shards, which identify their contents, in any order."""
    return digest_json(sorted(path.stem for path in paths))


def run_shards(
    what: str, function: Callable[..., None], shards: Sequence[Shard], config: BuildConfig, progress: Progress
) -> None:
    """Call ``function(path, *arguments)`` for each shard whose result is missing. ``progress`` counts bytes."""
    missing = [shard for shard in shards if not shard.result.exists()]
    total = sum(shard.n_bytes for shard in missing)
    done = 0
    for folder in {shard.result.parent for shard in missing}:
        folder.mkdir(parents=True, exist_ok=True)
        for leftover in folder.glob("*.tmp"):
            shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()
    progress(what, 0, max(total, 1))
    workers = min(n_workers(config), len(missing))
    if config.runner == "native" and (workers < 2 or total < _IN_PROCESS_BYTES):
        for shard in missing:
            _run(function, shard)
            done += shard.n_bytes
            progress(what, done, total)
        return
    with _on_ray(what) if config.runner == "ray" else _in_processes(what, workers) as (submit, n_slots):
        waiting: dict[Future[Exception | None], Shard] = {}
        rest = iter(missing)
        while True:
            for shard in itertools.islice(rest, max(0, _WAITING_PER_SLOT * n_slots - len(waiting))):
                waiting[submit(function, shard)] = shard
            if not waiting:
                break
            for future in wait(waiting, return_when=FIRST_COMPLETED).done:
                done += waiting.pop(future).n_bytes
                error = future.result()
                if error is not None:
                    raise error
                progress(what, done, total)


_Submit = Callable[[Callable[..., None], Shard], "Future[Exception | None]"]


@contextmanager
def _in_processes(what: str, workers: int) -> Iterator[tuple[_Submit, int]]:
    """Yield a function that runs a shard in one of ``workers`` processes, and their number."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, context, _die_with, (os.getpid(),)) as pool:
        try:
            yield lambda function, shard: pool.submit(_run, function, shard), workers
        except BrokenProcessPool as error:
            raise RetryableError(
                f"{what}: a worker process was killed, most likely for want of memory",
                hint="run the same command with workers=1; complete shards are not repeated",
            ) from error
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


@contextmanager
def _on_ray(what: str) -> Iterator[tuple[_Submit, int]]:
    """Yield a function that runs a shard on the Ray cluster of this process, and the number of its cores.

    A shard whose process or machine is lost is run again, three times (Ray's default).
    """
    import ray
    from ray.exceptions import RayError

    task = ray.remote(num_cpus=1, max_retries=3)(_run_on_ray)
    running: list[Any] = []

    def submit(function: Callable[..., None], shard: Shard) -> "Future[Exception | None]":
        reference = task.remote(os.getcwd(), function, shard)
        running.append(reference)
        future: Future[Exception | None] = reference.future()
        return future

    try:
        yield submit, max(1, int(ray.cluster_resources().get("CPU", 1)))
    except BaseException as error:
        for reference in running:
            ray.cancel(reference)
        if not isinstance(error, RayError):
            raise
        hint = "run the same command; complete shards are not repeated"
        raise RetryableError(f"{what}: the Ray cluster lost a shard: {error}", hint=hint) from error


def _run_on_ray(folder: str, function: Callable[..., None], shard: Shard) -> Exception | None:
    """Return what ``_run`` raises: Ray would raise an exception of another class."""
    try:
        os.chdir(folder)  # paths of inputs may be relative
        _run(function, shard)
    except Exception as error:
        return error
    return None


def _run(function: Callable[..., None], shard: Shard) -> None:
    # A name of its own: on a cluster a shard may run again while its first process still lives.
    unfinished = shard.result.with_name(f"{shard.result.stem}.{uuid.uuid4().hex}.tmp")
    try:
        function(unfinished, *shard.arguments)
        os.replace(unfinished, shard.result)
    except Exception as error:
        unfinished.unlink(missing_ok=True)
        raise as_smalti_error(error, shard.result.parent) from error


def _die_with(parent: int) -> None:
    arm = die_with_parent(signal.SIGKILL, parent)
    if arm is not None:
        arm()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent
