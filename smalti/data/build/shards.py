"""Runs a function over the shards of a step, in processes; a shard that is complete is not run again.

The result of a shard is one file whose name is a digest of all that decides its content: the code's version, the
options, and the digest of the input. It is written under another name and renamed, so it is complete or absent, also
after ``kill -9``. Results do not depend on the number of processes.
"""

import itertools
import multiprocessing
import os
import signal
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path

from smalti.base.errors import RetryableError
from smalti.base.hashing import digest_json
from smalti.base.processes import die_with_parent
from smalti.base.progress import Progress
from smalti.config.build import BuildConfig
from smalti.data.prepare.daft_engine import as_smalti_error

_IN_PROCESS_BYTES = 4 << 20
"""Less work than this is done in this process: starting others takes a second or two."""
_WAITING_PER_WORKER = 4


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
    what: str, function: Callable[..., None], shards: Sequence[Shard], workers: int, progress: Progress
) -> None:
    """Call ``function(path, *arguments)`` for each shard whose result is missing. ``progress`` counts bytes."""
    missing = [shard for shard in shards if not shard.result.exists()]
    total = sum(shard.n_bytes for shard in missing)
    done = 0
    for folder in {shard.result.parent for shard in missing}:
        folder.mkdir(parents=True, exist_ok=True)
        for leftover in folder.glob("*.tmp"):
            leftover.unlink()
    progress(what, 0, max(total, 1))
    if min(workers, len(missing)) < 2 or total < _IN_PROCESS_BYTES:
        for shard in missing:
            _run(function, shard)
            done += shard.n_bytes
            progress(what, done, total)
        return
    with ProcessPoolExecutor(
        min(workers, len(missing)), multiprocessing.get_context("spawn"), _die_with, (os.getpid(),)
    ) as pool:
        waiting: dict[Future[None], Shard] = {}
        rest = iter(missing)
        try:
            while True:
                for shard in itertools.islice(rest, max(0, _WAITING_PER_WORKER * workers - len(waiting))):
                    waiting[pool.submit(_run, function, shard)] = shard
                if not waiting:
                    break
                for future in wait(waiting, return_when=FIRST_COMPLETED).done:
                    done += waiting.pop(future).n_bytes
                    future.result()
                    progress(what, done, total)
        except BrokenProcessPool as error:
            raise RetryableError(
                f"{what}: a worker process was killed, most likely for want of memory",
                hint="run the same command with workers=1; complete shards are not repeated",
            ) from error
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _run(function: Callable[..., None], shard: Shard) -> None:
    unfinished = shard.result.with_name(f"{shard.result.stem}.{os.getpid()}.tmp")
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
