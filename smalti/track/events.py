"""``events.jsonl``: the events of a run, one on each line: ``{"time", "attempt", "event", ...}``.

The agent and rank 0 both append to it. An event that is not in ``EVENTS`` raises SmaltiError.
"""

from pathlib import Path
from typing import Any

from smalti.base.clock import utc_text
from smalti.base.errors import SmaltiError, nearest
from smalti.track.line_file import LineFile, read_lines

FILE_NAME = "events.jsonl"

EVENTS: dict[str, str] = {
    "attempt_started": "the ranks of an attempt are being started",
    "forked": "the run continues from this step with another config; its steps before remain",
    "resumed": "training continues from a checkpoint; source 'peer memory': from its copy in shared memory",
    "auto_resolved": "the values that 'auto' was resolved to on this machine",
    "checkpoint_saved": "a complete checkpoint was saved in the run folder",
    "checkpoint_interval": "the interval that train.checkpoint.every=auto chose, from the measured time of a save",
    "checkpoint_best": "the checkpoint of this step has the best value of train.checkpoint.best so far",
    "checkpoint_blessed": "the run stayed healthy for train.checkpoint.keep.blessed_after beyond this checkpoint",
    "checkpoint_deleted": "a checkpoint was deleted: it is not to be kept, the disk had no space, or by command",
    "checkpoint_failed": "a checkpoint could not be written; the earlier ones remain",
    "checkpoint_rejected": "a checkpoint failed verification and was skipped",
    "checkpoint_copied": "a checkpoint was copied, to train.checkpoint.save_to or by command; with bytes and seconds",
    "checkpoint_copy_failed": "a checkpoint was not copied to train.checkpoint.save_to; it remains in the run folder",
    "checkpoint_restored": "a copy in train.checkpoint.save_to, newer than the run folder's checkpoints, was put there",
    "peer_copy_failed": "the state was not copied to shared memory (train.checkpoint.peer_copies); training continues",
    "data_slow": "a step waited for its data; at most one event a minute",
    "profile_saved": "a window of steps was profiled; its files are in the run folder",
    "eval": "held-out loss was measured in the loop",
    "eval_generated": "tasks with generated answers were run on a checkpoint, in a child process",
    "eval_skipped": "a checkpoint that waited for these tasks was replaced by a newer one",
    "eval_failed": "the child process of these tasks failed; with the last lines of its output",
    "router_collapsed": "routers send most tokens to few experts, or none to some; once until they have recovered",
    "forgetting": "a set of data.retain became worse than its bound, relative to before the first step",
    "stopped": "training stopped before its end, after saving a checkpoint",
    "tracker_opened": "the run is copied to a tracker; with its address there",
    "tracker_lost": "a tracker does not accept metrics; they are sent when it is back",
    "tracker_back": "a tracker accepts metrics again",
    "tracker_behind": "the attempt ended while a tracker lacked lines of metrics.jsonl",
    "oom": "a rank ran out of memory; the next attempt uses half the microbatch, with the same order and batch",
    "not_finite": "a loss or a gradient norm was not finite: the update was skipped and the run ended",
    "fault_injected": "a fault of the section chaos is about to happen to this rank",
    "rank_died": "a rank ended by a signal or with an error",
    "node_lost": "a node with ranks of the attempt is gone or was silent; all ranks of the others were killed",
    "rank_hung": "a rank made no progress; it and the others were killed",
    "straggler": "the own work of a rank takes longer than that of the others; once until it is no longer slow",
    "node_checked": "the command of train.health has run on this node; with its result and last lines",
    "rank_unresponsive": "a rank did not respond to the others, which ended; it was killed",
    "attempt_ended": "all ranks of an attempt have ended",
    "run_finished": "the last step is finished and saved",
}
"""Event -> meaning."""


class EventLog:
    """Appends to a run's events."""

    def __init__(self, folder: str | Path, attempt: int = 0) -> None:
        self._file = LineFile(Path(folder) / FILE_NAME)
        self.attempt = attempt

    def write(self, kind: str, **fields: Any) -> None:
        """Append an event with its fields (JSON values)."""
        if kind not in EVENTS:
            close = nearest(kind, EVENTS)
            raise SmaltiError(
                f"event '{kind}' is not in smalti/track/events.py", hint=f"did you mean '{close}'?" if close else None
            )
        self._file.write({"time": utc_text(), "attempt": self.attempt, "event": kind, **fields})

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class NoEventLog:
    """An event log that drops all events: that of every rank but the first."""

    def write(self, kind: str, **fields: Any) -> None:
        """Do nothing."""


def read_events(folder: str | Path) -> list[dict[str, Any]]:
    """Return all events of a run folder, oldest first; lines without an event are skipped."""
    return [line for line in read_lines(Path(folder) / FILE_NAME) if isinstance(line.get("event"), str)]
