"""``train.checkpoint.save_to``: copies each saved checkpoint, and restores a run folder that has none.

Rank 0 alone talks to the store, so the request rate is that of the whole job.
"""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from smalti.base import clock, log, store
from smalti.base.errors import UserError
from smalti.base.objects import Requests
from smalti.config.fork import is_of_history
from smalti.config.identity import difference
from smalti.config.load import load_text
from smalti.config.run import JobConfig
from smalti.distributed.group.world import broadcast_from_rank0
from smalti.track.checkpoints import names
from smalti.track.checkpoints.background import BackgroundCopies, remove_links
from smalti.track.checkpoints.copies import Check, Copies
from smalti.track.checkpoints.copy_retention import prune_copies
from smalti.track.checkpoints.retention import Keep
from smalti.track.run import RunFolder, config_text
from smalti.train.hooks import Hook
from smalti.train.loop import Job
from smalti.train.step import StepResult

_WAIT_S = 5.0
"""The other ranks are in a collective for at most so long while rank 0 restores."""


def watch(config: JobConfig, restored: str | None) -> list[Hook]:
    """Return the hook; none without ``train.checkpoint.save_to``. restored: the result of ``restore``."""
    return [] if config.train.checkpoint.save_to is None else [CopyCheckpoints(restored)]


class CopyCheckpoints(Hook):
    """Copies checkpoints on rank 0; the end of the run waits for the last one.

    restored: the checkpoint that was fetched from the store, which is not searched for it again.
    """

    def __init__(self, restored: str | None = None) -> None:
        self._restored = restored
        self._copies: BackgroundCopies | None = None

    def on_start(self, job: Job) -> None:
        """Begin with the newest checkpoint, which an earlier attempt may not have copied whole."""
        newest = next(iter(names.complete(job.folder.checkpoints)), None) if job.is_first else None
        if newest is not None and newest != self._restored:
            self.on_checkpoint(job, str(job.folder.checkpoints / newest))

    def on_checkpoint(self, job: Job, path: str) -> None:
        """Start the copy."""
        if job.is_first:
            self._opened(job).start(path)

    def on_step(self, job: Job, result: StepResult) -> None:
        """Write the events of copies that have ended."""
        if self._copies is not None:
            self._copies.poll()

    def is_busy(self, job: Job) -> bool:
        """Return whether a copy is not complete yet."""
        if self._copies is None:  # all steps were done before this attempt, perhaps not the last copy
            self.on_start(job)
        if self._copies is None:
            return False
        self._copies.poll()
        return self._copies.is_busy

    def close(self, job: Job) -> None:
        """Stop a copy that runs; the next attempt continues it."""
        if self._copies is not None:
            self._copies.close()

    def _opened(self, job: Job) -> BackgroundCopies:
        if self._copies is None:
            remove_links(job.folder.checkpoints)
            copies = _copies(job.config)
            self._copies = BackgroundCopies(
                copies,
                job.events,
                config=config_text(job.config),
                check=None if self._restored else same_run(job.config, job.folder),
                prune=_prune(copies, job),
            )
        return self._copies


def _prune(copies: Copies, job: Job) -> Callable[[int], None]:
    """Return the function that deletes the copies up to a step that are not to be kept."""
    section = job.config.train.checkpoint.save_to_keep_section
    if section is None:
        return lambda _: None
    keep = Keep.of(section, job.length, partial(job.events.write, "checkpoint_deleted"))
    return lambda step: prune_copies(copies, job.folder.checkpoints, step, keep)


def same_run(config: JobConfig, folder: RunFolder) -> Check:
    """Return the check that a copy is of the run of ``config``: it raises UserError with what differs.

    It may also have the config of an earlier attempt, from before a fork.
    """

    def check(text: str | None) -> None:
        if text is None:
            return
        place = f"{_url(config)}/config.yaml"
        stored = load_text(type(config), text, place).config
        lines = difference(stored, config)
        earlier = (folder.attempt_config(number, type(config)) for number in folder.attempts())
        if not lines or any(not difference(stored, before) for before in earlier):
            return
        forked = any(map(is_of_history, lines))
        raise UserError(
            f"{_url(config)} holds the checkpoints of another run; what differs (there -> here):"
            + "".join(f"\n  {line}" for line in lines),
            allowed="the same identity",
            hint="it was forked: give 'smalti train' its config.yaml, which has that history"
            if forked
            else "name=NEW_NAME, or another train.checkpoint.save_to",
        )

    return check


def restore(config: JobConfig, folder: RunFolder, events: Any) -> str | None:
    """Fetch the newest copy that verifies into a run folder without checkpoints, and return its name. A collective.

    None where the run folder has one or the store has none, without ``save_to``, and on other ranks than 0. Raises what
    rank 0 does where the store fails.
    """
    if config.train.checkpoint.save_to is None or broadcast_from_rank0(folder.saved_step) is not None:
        return None
    copies = _copies(config)
    with ThreadPoolExecutor(1) as pool:
        restored = pool.submit(_restore, copies, config, folder, events) if dist.get_rank() == 0 else None
        try:
            while not broadcast_from_rank0(lambda: _is_done(restored)):
                pass
        finally:
            copies.requests.stop.set()
        return None if restored is None else restored.result()


def _is_done(work: "Future[str | None] | None") -> bool:
    assert work is not None, "only rank 0 calls it"
    try:
        work.result(timeout=_WAIT_S)
    except TimeoutError:
        if work.done():
            raise
        return False
    return True


def _restore(copies: Copies, config: JobConfig, folder: RunFolder, events: Any) -> str | None:
    began_s = clock.now_s()

    def reject(path: str, reason: str) -> None:
        log.get("train").warning("%s is skipped: %s", path, reason)
        events.write("checkpoint_rejected", path=path, reason=reason)

    path = copies.newest(folder.checkpoints, check=same_run(config, folder), reject=reject)
    if path is None:
        return None
    seconds = round(clock.now_s() - began_s, 3)
    log.get("train").info("%s is restored from %s in %.1f s", path, _url(config), seconds)
    bytes_ = int(names.size_bytes(path))
    events.write("checkpoint_restored", step=names.step_of(path), url=_url(config), bytes=bytes_, seconds=seconds)
    return path.name


def _url(config: JobConfig) -> str:
    assert config.train.checkpoint.save_to is not None
    return store.join(config.train.checkpoint.save_to, config.name)


def _copies(config: JobConfig) -> Copies:
    url = _url(config)
    if store.is_local(url):
        url = str(Path(url).absolute())
    return Copies(url, Requests(config.train.checkpoint.save_requests_per_s))
