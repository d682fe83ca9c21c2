"""``events.jsonl``: what happened to a run, a line each: ``{"time", "attempt", "event", ...}``.

The agent and rank 0 both append to it. An event that is not in the table is our bug and raises.
"""

from pathlib import Path
from typing import Any

from smalti.base.clock import utc_text
from smalti.base.errors import SmaltiError, nearest
from smalti.track.append import LineFile, read_lines

FILE_NAME = "events.jsonl"

EVENTS: dict[str, str] = {
    "attempt_started": "the ranks of an attempt are being started",
    "forked": "the run has another future from this step on; its past stays",
    "resumed": "training goes on from a checkpoint",
    "auto_resolved": "what a value 'auto' became on this machine",
    "checkpoint_saved": "a complete checkpoint lies in the run folder",
    "checkpoint_failed": "a checkpoint could not be written; the earlier ones stand",
    "checkpoint_rejected": "a checkpoint did not verify and was passed over",
    "data_slow": "a step waited for its data; at most one a minute",
    "profile_saved": "a window of steps was profiled; its files lie in the run folder",
    "eval": "held-out loss was measured in the loop",
    "forgetting": "a set of data.retain got worse than its bound, against before the first step",
    "stopped": "training stopped before its end, after saving",
    "tracker_opened": "the run is copied to a tracker; with the tracker's name for it",
    "tracker_lost": "a tracker takes nothing; what it lacks is sent when it is back",
    "tracker_back": "a tracker takes lines again",
    "tracker_behind": "the attempt ended while a tracker lacked lines of metrics.jsonl",
    "oom": "a rank ran out of memory; the next attempt takes half the microbatch, with the same order and batch",
    "not_finite": "a loss or a gradient norm was not finite: the update was skipped and the run ended",
    "rank_died": "a rank ended by a signal or with an error",
    "rank_unresponsive": "a rank did not answer the others, which ended; it was killed",
    "attempt_ended": "all ranks of an attempt are gone",
    "run_finished": "the last step is done and saved",
}
"""Kind -> meaning."""


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


def read_events(folder: str | Path) -> list[dict[str, Any]]:
    """All events of a run folder, oldest first; lines that are none are skipped."""
    return [line for line in read_lines(Path(folder) / FILE_NAME) if isinstance(line.get("event"), str)]
