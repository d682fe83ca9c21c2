"""Reads what the ledger needs from a run folder: the attempts, with their events, progress slots and faults.

Lengths of attempts are of the monotonic clock. A clock of the day that was set in an attempt is corrected after it.
An attempt whose agent was killed has no event of its end. It ends with its last sign of life: an event, a change of
phase in a slot, or (the last attempt) the heartbeat. An event that a command may add at any time is none.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from smalti.base.clock import seconds_of
from smalti.base.errors import ExitCode
from smalti.track.attempts import attempts as attempt_numbers
from smalti.track.attempts import log_folder
from smalti.track.events import read_events
from smalti.track.owner import with_owner
from smalti.track.progress import Progress, read_slots

SILENT_S = 600.0
"""A run without a sign of life for this long, and without an end, is taken as killed at its last sign; at once where
its process is known to have ended."""

_CLOCK_SET_S = 1.0
"""A clock of the day that differs by more from the monotonic one over an attempt was set meanwhile."""
FAULTS = ("node_lost", "rank_died", "rank_hung", "rank_unresponsive", "oom", "not_finite")
"""Events of a fault of an attempt."""
_OF_COMMANDS = ("checkpoint_copied", "checkpoint_deleted")
"""Events that ``smalti runs checkpoints`` also writes, after an attempt has ended."""
_ENDED_BY_REQUEST = (ExitCode.DONE, ExitCode.INTERRUPTED, ExitCode.TERMINATED)


@dataclass(frozen=True)
class Fault:
    """The first fault of an attempt."""

    event: Mapping[str, Any]
    """Its event; empty where the whole command was killed."""
    decided_s: float
    """Time of the decision to end the attempt, in seconds since 1970."""
    detected_s: float | None
    """Seconds from the fault to that decision; None: not measured."""


@dataclass(frozen=True)
class Attempt:
    """One attempt, on the clock of its events (seconds since 1970)."""

    number: int
    start_s: float
    end_s: float
    """Its end, its last sign of life, or the present for one that is running."""
    ranks: int
    wanted: int
    """Ranks that the run asked for: more than ``ranks`` if it continued with fewer."""
    slots: tuple[Progress, ...] = ()
    from_step: int | None = None
    """Step of the checkpoint that it loaded, 0 for a start from the beginning; None: it never came so far."""
    saves: Mapping[int, float | None] | None = None
    """Step of each checkpoint that it saved -> seconds that a rank had trained in it until then, if recorded."""
    fault: Fault | None = None
    is_done: bool = False
    """It reached the last step."""
    continues: bool = False
    """The command that ran the attempt before started it."""
    queued_s: float = 0.0
    """Time in the queue of a scheduler before its start."""

    @property
    def last_step(self) -> int:
        """Finished steps of the run at its end, or the step that it began with."""
        return max([self.from_step or 0, *(slot.step for slot in self.slots)])


@dataclass(frozen=True)
class History:
    """All attempts of a run, oldest first."""

    attempts: tuple[Attempt, ...]
    is_running: bool = False
    """The last attempt is running."""


def read_history(folder: str | Path, now_s: float) -> History:
    """Read a run folder; ``now_s`` is the time of day until which a running attempt is counted."""
    root = Path(folder)
    events = read_events(root)
    numbers = sorted({*attempt_numbers(root), *(n for event in events if isinstance(n := event.get("attempt"), int))})
    status = with_owner(root, _json(root / "status.json"))
    attempts: list[Attempt] = []
    running, set_s = False, 0.0
    for number in numbers:
        of_attempt = [event for event in events if event.get("attempt") == number]
        slots = _slots(log_folder(root, number))
        start_s = _start_s(of_attempt, slots)
        if start_s is None:
            continue
        is_last = number == numbers[-1]
        heartbeat = status.get("heartbeat") if is_last and status.get("attempt") == number else None
        end_s = _end_s(of_attempt, slots, start_s, seconds_of(heartbeat))
        ended = any(event["event"] in ("attempt_ended", "run_finished", "stopped") for event in of_attempt)
        alive = status.get("state") in ("starting", "running")
        if is_last and not ended and alive and abs(now_s - end_s) < SILENT_S:  # its slots were read after now_s
            running, end_s = True, max(now_s, end_s)
        continues = bool(attempts) and _process(root, number) is not None
        continues = continues and _process(root, number) == _process(root, attempts[-1].number)
        attempt = _attempt(
            number, of_attempt, slots, start_s, end_s, is_running=is_last and running, continues=continues
        )
        attempts.append(_moved(attempt, -set_s))
        set_s += _clock_set_s(of_attempt, end_s)
    return History(tuple(_in_order(attempts)), running)


def _attempt(
    number: int,
    events: Sequence[Mapping[str, Any]],
    slots: tuple[Progress, ...],
    start_s: float,
    end_s: float,
    *,
    is_running: bool,
    continues: bool,
) -> Attempt:
    started = _first(events, "attempt_started") or {}
    resumed = _first(events, "resumed")
    trains = _first(events, "auto_resolved") is not None or any(slot.phase_count for slot in slots)
    ranks = int(started.get("ranks") or len(slots) or 1)
    saves = {event["step"]: event.get("trained_s") for event in events if event["event"] == "checkpoint_saved"}
    return Attempt(
        number=number,
        start_s=start_s,
        end_s=end_s,
        ranks=ranks,
        wanted=max(ranks, int(started.get("ranks_wanted") or ranks)),
        slots=slots,
        from_step=int(resumed["step"]) if resumed else 0 if trains else None,
        saves=saves,
        fault=None if is_running else _fault(events, start_s, end_s),
        is_done=_first(events, "run_finished") is not None,
        continues=continues,
        queued_s=float(started.get("queued_s") or 0.0),
    )


def _start_s(events: Sequence[Mapping[str, Any]], slots: Iterable[Progress]) -> float | None:
    """Return when the ranks were started: the event, else the first sign of life."""
    started = _first(events, "attempt_started")
    if started is not None and (time_s := seconds_of(started.get("time"))) is not None:
        return time_s
    return min([*_times(events), *(slot.opened_wall_ns / 1e9 for slot in slots)], default=None)


def _end_s(
    events: Sequence[Mapping[str, Any]], slots: Sequence[Progress], start_s: float, heartbeat_s: float | None
) -> float:
    ended = _first(events, "attempt_ended")
    if ended is not None and isinstance(ended.get("seconds"), int | float):
        return start_s + float(ended["seconds"])
    times = _times(event for event in events if event["event"] not in _OF_COMMANDS)
    signs = [*times, *map(last_change_s, slots), *([] if heartbeat_s is None else [heartbeat_s])]
    return max([start_s, *signs])


def _clock_set_s(events: Sequence[Mapping[str, Any]], end_s: float) -> float:
    """Return the seconds by which the clock of the day was set forward in an attempt that ended at ``end_s``."""
    ended = _first(events, "attempt_ended")
    time_s = seconds_of(ended.get("time")) if ended is not None else None
    jump_s = 0.0 if time_s is None else time_s - end_s
    return jump_s if abs(jump_s) > _CLOCK_SET_S else 0.0


def last_change_s(slot: Progress) -> float:
    """Return the time of day at which a rank entered its phase."""
    return (slot.opened_wall_ns + slot.began_ns - slot.opened_ns) / 1e9


def _fault(events: Sequence[Mapping[str, Any]], start_s: float, end_s: float) -> Fault | None:
    """Return the fault of an attempt that has ended; None if it was done, or stopped by request."""
    ended = _first(events, "attempt_ended")
    event = next((event for event in events if event["event"] in FAULTS), None)
    if event is None:
        by_request = ended is not None and ended.get("code") in _ENDED_BY_REQUEST
        if by_request or any(each["event"] in ("run_finished", "stopped") for each in events):
            return None
        return Fault(ended or {}, end_s, None)
    time_s, last_s = seconds_of(event.get("time")), seconds_of(ended.get("time")) if ended else None
    ending = event.get("ending_s")  # the agent writes the event when the other ranks have ended
    ending_s = float(ending) if isinstance(ending, int | float) else 0.0
    # relative to the end: the clock of the day may have been set in between
    decided_s = end_s - (last_s - time_s) if time_s is not None and last_s is not None else time_s or end_s
    detected = event.get("detected_s")
    measured = float(detected) if isinstance(detected, int | float) else None
    return Fault(event, min(max(decided_s - ending_s, start_s), end_s), measured)


def _in_order(attempts: Sequence[Attempt]) -> Iterable[Attempt]:
    """Yield the attempts without overlaps, which a clock that was set back would give."""
    clock_s = float("-inf")
    for attempt in attempts:
        late_s = max(0.0, clock_s - attempt.start_s)
        clock_s = attempt.end_s + late_s
        yield attempt if not late_s else _moved(attempt, late_s)


def _moved(attempt: Attempt, by_s: float) -> Attempt:
    """Return the attempt with all its times moved."""
    slots = tuple(replace(slot, opened_wall_ns=slot.opened_wall_ns + round(by_s * 1e9)) for slot in attempt.slots)
    fault = attempt.fault and replace(attempt.fault, decided_s=attempt.fault.decided_s + by_s)
    return replace(attempt, start_s=attempt.start_s + by_s, end_s=attempt.end_s + by_s, slots=slots, fault=fault)


def _slots(folder: Path) -> tuple[Progress, ...]:
    return tuple(slot for file in sorted(folder.glob("progress-*.bin")) for slot in read_slots(file))


def _process(root: Path, number: int) -> str | None:
    """Return the process that opened the attempt; None where it is not recorded."""
    for file in (log_folder(root, number) / "provenance.json", root / "provenance.json"):
        if file.is_file():
            return _json(file).get("process")
    return None


def _times(events: Iterable[Mapping[str, Any]]) -> list[float]:
    return [time_s for event in events if (time_s := seconds_of(event.get("time"))) is not None]


def _first(events: Iterable[Mapping[str, Any]], kind: str) -> Mapping[str, Any] | None:
    return next((event for event in events if event["event"] == kind), None)


def _json(path: Path) -> dict[str, Any]:
    with suppress(OSError, ValueError):
        value = json.loads(path.read_text(encoding="utf-8"))
        return value if isinstance(value, dict) else {}
    return {}
