"""Blesses checkpoints after which the run stayed healthy (``track/checkpoints/blessed.py``)."""

from smalti.base import log
from smalti.track.checkpoints.blessed import bless, healthy_since
from smalti.track.checkpoints.names import step_of
from smalti.train.hooks import Hook
from smalti.train.loop import Job


class Bless(Hook):
    """Marks older checkpoints on rank 0 at each save: all steps before a save are known to be finite."""

    def __init__(self, after: str) -> None:
        """after: how far the run must be beyond a checkpoint, a duration."""
        self._after = after
        self._since = 0

    def on_start(self, job: Job) -> None:
        """Find out since which step the run is healthy."""
        if job.is_first:
            self._since = healthy_since(job.folder.events())

    def on_checkpoint(self, job: Job, path: str) -> None:
        """Bless the checkpoints that the one at ``path`` is far enough beyond. A disk that fails is a warning."""
        if not job.is_first:
            return
        try:
            folder = job.folder.checkpoints
            blessed = bless(folder, step_of(path), since=self._since, after=self._after, length=job.length)
        except OSError as error:
            log.get("checkpoint").warning("no checkpoint in %s could be blessed: %s", job.folder.checkpoints, error)
            return
        for step in blessed:
            job.events.write("checkpoint_blessed", step=step)
