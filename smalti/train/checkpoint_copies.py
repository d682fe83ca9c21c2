"""``train.checkpoint.save_to``: copies each saved checkpoint, and restores those that a run folder lacks.

Rank 0 alone talks to the store, so the request rate is that of the whole job.
"""

import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist

from smalti.base import clock, log, store
from smalti.base.errors import DataError, RetryableError, SmaltiError, UserError
from smalti.base.objects import Requests
from smalti.base.objects.requests import GIVE_UP_S
from smalti.config.fork import is_of_history
from smalti.config.identity import difference
from smalti.config.load import load_text
from smalti.config.run import JobConfig, RunConfig
from smalti.distributed.group.world import broadcast_from_rank0
from smalti.track.checkpoints import names
from smalti.track.checkpoints.background import BackgroundCopies, remove_links
from smalti.track.checkpoints.copies import Check, Copies
from smalti.track.checkpoints.copy_retention import prune_copies, set_aside
from smalti.track.checkpoints.names import NoneUsable
from smalti.track.checkpoints.retention import Keep
from smalti.track.run import RunFolder, config_text
from smalti.train.hooks import Hook
from smalti.train.loop import Job
from smalti.train.step import StepResult

_WAIT_S = 5.0
"""The other ranks are in a collective for at most so long while rank 0 restores."""
_LOOK_S = 30.0
"""A store that cannot be listed for so long is not searched where the run folder has a checkpoint."""

T = TypeVar("T")


def watch(config: JobConfig, stored: "StoredCheckpoints | None") -> list[Hook]:
    """Return the hook; none without ``train.checkpoint.save_to``. stored: the result of ``restore``."""
    restored = None if stored is None else stored.restored
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


def restore(config: JobConfig, folder: RunFolder, events: Any) -> "StoredCheckpoints | None":
    """Fetch the newest copy if it is newer than all checkpoints of the run folder. A collective; None without
    ``save_to``.

    Raises what rank 0 does where the store fails and the run folder has no checkpoint.
    """
    if config.train.checkpoint.save_to is None:
        return None
    stored = StoredCheckpoints(config, folder, events)
    stored.fetch_newer(broadcast_from_rank0(folder.saved_step))
    return stored


class StoredCheckpoints:
    """The copies that a run may resume from. Rank 0 lists them once, and tries each at most once."""

    def __init__(self, config: JobConfig, folder: RunFolder, events: Any) -> None:
        self.restored: str | None = None
        """Name of the checkpoint that was fetched last."""
        self._config, self._folder, self._events = config, folder, events
        self._left: list[str] | None = None
        """On rank 0 the names that were not tried, newest first."""
        self._damaged: list[str] = []
        self._opened: Copies | None = None

    def fetch_newer(self, step: int | None) -> str | None:
        """Fetch the newest copy that verifies of those after ``step``, and return its path; None without one.

        step: of the newest checkpoint that can be used without a store; None where there is none. A collective. Raises
        what the store does, NoneUsable where there are copies and no checkpoint at all can be used, and UserError for
        those of another run. A store that fails is passed over with a warning where there is a ``step``; and for a run
        that was forked it is not searched then, as newer copies may be of what the fork has left.
        """
        is_forked = isinstance(self._config, RunConfig) and bool(self._config.data.history)
        name = None if is_forked and step is not None else self._on_rank0(lambda: self._fetch(step))
        if name is None:
            return None
        self.restored = name
        return str(self._folder.checkpoints / name)

    def set_aside_newer(self, step: int) -> None:
        """Make the damaged copies after ``step`` incomplete: training will write those steps again. A collective."""
        self._on_rank0(lambda: self._set_aside(step))

    def _fetch(self, step: int | None) -> str | None:
        began_s, url = clock.now_s(), _url(self._config)
        try:
            if self._left is None:
                for left in self._folder.checkpoints.glob(".step-*.fetching"):  # of a restore that was killed
                    shutil.rmtree(left, ignore_errors=True)
                self._opened = _copies(self._config, GIVE_UP_S if step is None else _LOOK_S)
                self._left = [name for name in self._opened.names() if name not in self._damaged]
                self._opened = _copies(self._config)  # reads have more time
            assert self._opened is not None, "it was listed"
            path = self._opened.newest(
                self._folder.checkpoints,
                names=self._take_newer(-1 if step is None else step),
                check=same_run(self._config, self._folder),
                reject=self._reject,
            )
        except NoneUsable:
            if step is None:
                raise
            return None
        except (DataError, RetryableError) as error:
            self._left = None  # what failed may be tried again
            if step is None:
                raise
            log.get("train").warning("%s is not searched for a newer checkpoint: %s", url, error.message)
            return None
        if path is None:
            return None
        seconds = round(clock.now_s() - began_s, 3)
        log.get("train").info("%s is restored from %s in %.1f s", path, url, seconds)
        bytes_ = int(names.size_bytes(path))
        self._events.write("checkpoint_restored", step=names.step_of(path), url=url, bytes=bytes_, seconds=seconds)
        return path.name

    def _take_newer(self, step: int) -> Iterator[str]:
        while self._left and names.step_of(self._left[0]) > step:
            yield self._left.pop(0)

    def _reject(self, path: str, reason: str) -> None:
        self._damaged.append(Path(path).name)
        log.get("train").warning("%s is skipped: %s", path, reason)
        self._events.write("checkpoint_rejected", path=path, reason=reason)

    def _set_aside(self, step: int) -> None:
        for name in [name for name in self._damaged if names.step_of(name) > step]:
            assert self._opened is not None, "it was read"
            place = store.join(self._opened.url, name)
            try:
                set_aside(self._opened, name)
            except SmaltiError as error:  # the step is not copied again: StepTaken
                log.get("train").warning("%s is damaged and was not removed: %s", place, error.message)
                continue
            reason = f"it is damaged, and training continues from step {step}"
            log.get("train").warning("%s is no complete copy any more: %s", place, reason)
            self._events.write("checkpoint_deleted", step=names.step_of(name), path=place, reason=reason)

    def _on_rank0(self, work: Callable[[], T]) -> T:
        """Return the result of ``work`` on rank 0; no collective takes long meanwhile."""
        with ThreadPoolExecutor(1) as pool:
            future = pool.submit(work) if dist.get_rank() == 0 else None
            try:
                while (done := broadcast_from_rank0(lambda: _result(future))) is None:
                    pass
            except BaseException:
                if self._opened is not None:
                    self._opened.requests.stop.set()
                raise
            return done[0]


def _result(work: "Future[T] | None") -> tuple[T] | None:
    assert work is not None, "only rank 0 calls it"
    try:
        return (work.result(timeout=_WAIT_S),)
    except TimeoutError:
        return (work.result(),) if work.done() else None


def _url(config: JobConfig) -> str:
    assert config.train.checkpoint.save_to is not None
    return store.join(config.train.checkpoint.save_to, config.name)


def _copies(config: JobConfig, give_up_s: float = GIVE_UP_S) -> Copies:
    url = _url(config)
    if store.is_local(url):
        url = str(Path(url).absolute())
    return Copies(url, Requests(config.train.checkpoint.save_requests_per_s, give_up_s=give_up_s))
