"""The checkpoints of a run: begins a save, and reports it when it is complete, while training continues.

One save runs at a time; the next one waits for it. A save that fails is reported, and training continues to the next.
"""

from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from smalti.base import clock, env, log
from smalti.base.disk import room
from smalti.base.errors import RetryableError, UserError
from smalti.base.units import format_seconds
from smalti.config.run import JobConfig
from smalti.cost.failures import FAILURES_PER_1000_GPU_DAYS, mtbf_s, optimal_s
from smalti.distributed.checkpoint.saver import Save, Saver, check
from smalti.distributed.group.world import RaisedOnAllRanks, broadcast_from_rank0, may_leave
from smalti.track.checkpoints import manifest
from smalti.track.checkpoints.names import size_bytes
from smalti.track.checkpoints.retention import Keep, Report, make_room
from smalti.track.progress import Phase
from smalti.track.run import config_text

FIRST_BLOCKED_S = 1.0
"""Assumed time that a save blocks training, before the first one of an attempt."""

if TYPE_CHECKING:
    from smalti.train.loop import Job


class Saving:
    """The saves of one attempt. All ranks call it together; as a context manager, it waits for the last save."""

    def __init__(self, job: "Job") -> None:
        self.step = job.state.step
        """Step of the newest checkpoint, which may still be written; -1 after a save that failed."""
        self._job = job
        self._mtbf_s = mtbf_s(FAILURES_PER_1000_GPU_DAYS, job.mesh.layout.world_size)
        self._blocked_s, self._save_s = FIRST_BLOCKED_S, 0.0
        self._trained_s: float | None = None
        """Seconds of this attempt in steps, when the running save began."""
        self._reported_s = 0.0
        """The automatic interval that was last reported."""
        self._report = partial(job.events.write, "checkpoint_deleted")
        make_room = partial(_make_room, job.folder.checkpoints, self._report)
        device, verify = next(job.state.model.parameters()).device, job.config.train.checkpoint.verify
        self._memory = peer_memory(job.config)
        self._saver = Saver(job.folder.checkpoints, device, make_room, verify=verify, memory=self._memory,
                            world=env.world())  # fmt: skip
        job.state.before_update = self._wait_copied

    @property
    def is_running(self) -> bool:
        """Return whether a save was begun and not yet reported."""
        return self._saver.is_running

    @property
    def is_writing(self) -> bool:
        """Return whether this rank still writes a checkpoint."""
        return self._saver.is_writing

    def _wait_copied(self) -> None:
        if not self.is_running:
            return
        with self._job.state.progress.within(Phase.CHECKPOINT):
            self._saver.wait_copied()

    def interval_s(self) -> float:
        """Return the automatic interval between saves: by the last save, that loses the least time."""
        return max(optimal_s(max(self._blocked_s, 1e-3), self._mtbf_s), 2 * self._save_s)

    def start(self, *, extra: int = 0, in_memory: bool = True) -> None:
        """Begin to save the current step; when it is complete, delete the checkpoints that the config does not keep.

        extra: so many more of the newest are kept. in_memory: whether it is copied to the shared memory too, if the run
        has any. Raises RetryableError where the run folder has been moved.
        """
        self.finish()
        job, began_s = self._job, clock.now_s()
        self._trained_s = job.state.progress.trained_s()
        broadcast_from_rank0(job.folder.require_in_place)
        keep = Keep.of(job.config.train.checkpoint.keep_section, job.length, self._report, extra=extra)
        in_memory = in_memory and self._memory is not None
        self._saver.start(job.state.step, job.tensors(), checkpoint_metadata(job), keep=keep, in_memory=in_memory)
        self.step = job.state.step
        job.recorder.add_non_step_time(clock.now_s() - began_s)

    def copy_to_memory(self) -> None:
        """Begin to copy the current step to the shared memory alone; no save runs."""
        job, began_s = self._job, clock.now_s()
        state = checkpoint_metadata(job)
        self._saver.start(job.state.step, job.tensors(), state, keep=1, on_disk=False, in_memory=True)
        job.recorder.add_non_step_time(clock.now_s() - began_s)

    def finish(self, *, must_succeed: bool = False) -> None:
        """Wait for the running save, if any, and report it. Raises RetryableError only with ``must_succeed``."""
        job, began_s = self._job, clock.now_s()
        save = self._saver.result(job.state.progress.beat)
        if save is None:
            return
        job.recorder.add_non_step_time(clock.now_s() - began_s)
        if save.in_memory:
            self._report_copy(save)
        if not save.on_disk:
            return
        try:
            check(save)
        except RetryableError as error:
            self.failed(save.step, error, must_succeed=must_succeed)
            return
        self._blocked_s, self._save_s = save.blocked_s, save.seconds
        self._report_interval(save.step)
        n_bytes = {"ckpt/bytes": size_bytes(save.path)} if job.is_first else {}
        n_bytes["ckpt/staging_bytes"] = save.staging_bytes
        job.recorder.write(save.step, {"ckpt/save_s": save.seconds, "ckpt/block_s": save.blocked_s, **n_bytes})
        times = {"seconds": round(save.seconds, 3), "blocked_s": round(save.blocked_s, 3)}
        if self._trained_s is not None:
            times["trained_s"] = round(self._trained_s, 3)
        job.events.write("checkpoint_saved", step=save.step, path=save.path, **times)
        for hook in job.hooks:
            hook.on_checkpoint(job, save.path)

    def _report_copy(self, save: Save) -> None:
        """Report the copy in shared memory."""
        if save.memory_failure is not None:
            self._job.events.write("peer_copy_failed", step=save.step, reason=save.memory_failure)
            log.get("train").warning(
                "step %d was not copied to %s: %s; %s; training continues",
                *(save.step, self._memory, save.memory_failure, room(str(self._memory))),
            )
            return
        blocked = {} if save.on_disk else {"ckpt/peer_block_s": save.blocked_s}
        self._job.recorder.write(save.step, {"ckpt/peer_s": save.memory_s, **blocked})

    def _report_interval(self, step: int) -> None:
        """Report the automatic interval, and later one that differs by a third."""
        seconds = self.interval_s()
        if self._job.config.train.checkpoint.every == "auto" and not 0.75 < self._reported_s / seconds < 1.33:
            self._reported_s = seconds
            log.get("train").info(
                "a checkpoint every %s: one blocks training for %s, and a failure is expected every %s",
                *map(format_seconds, (seconds, self._blocked_s, self._mtbf_s)),
            )
            self._job.events.write("checkpoint_interval", step=step, seconds=round(seconds, 1))

    def failed(self, step: int, error: RetryableError, *, must_succeed: bool) -> None:
        """Report a save that failed; raise its error with ``must_succeed``."""
        self.step = -1
        self._job.events.write("checkpoint_failed", step=step, reason=error.message)
        if must_succeed:
            raise error from RaisedOnAllRanks("the save failed")
        log.get("train").warning("%s; training continues until the next checkpoint", error.message)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if may_leave(error):
            self.finish()


def _make_room(folder: Path, report: Report) -> None:
    """Remove leftovers, and old checkpoints from a full disk; where that fails, the save may fail too."""
    try:
        make_room(folder, report=report)
    except OSError as error:
        log.get("checkpoint").warning("no room could be made in %s: %s", folder, error)


def checkpoint_metadata(job: "Job") -> dict[str, Any]:
    """Return the part of a checkpoint that is not tensors."""
    return {
        "step": job.state.step,
        "tokens": job.recorder.tokens,
        "train_s": job.recorder.train_s,
        "val_s": job.recorder.val_s,
        "collapsed_layers": sorted(watch.collapsed) if (watch := job.recorder.watch) else [],
        "stream": job.batches.state(job.state.step),
        manifest.CONFIG: config_text(job.config),
        **job.frozen,
    }


def peer_memory(config: JobConfig) -> Path | None:
    """Return the folder of shared memory of this run, None without ``train.checkpoint.peer_copies``.

    Raises UserError where the process that has started the ranks owns no memory that outlives them.
    """
    if config.train.checkpoint.peer_copies is None:
        return None
    memory = env.peer_memory()
    if memory is None:
        raise UserError(
            f"train.checkpoint.peer_copies={config.train.checkpoint.peer_copies} has no effect here: nothing outlives "
            "the ranks that could own the copies",
            allowed="ranks that 'smalti train' has started",
            hint="remove train.checkpoint.peer_copies, or start the run with 'smalti train'",
        )
    return Path(memory)
