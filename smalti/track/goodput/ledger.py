"""The ledger: every second of every rank of a run is in exactly one bucket.

A pure function of the history of a run. A rank's time in an attempt is that of the phases in its slot; what is not in
a finished phase is the last phase up to the fault, then detection, then the restart. Docs: concepts/track/goodput.md.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from smalti.track.goodput.history import Attempt, History, last_change_s
from smalti.track.progress import Phase, Progress

BUCKETS: dict[str, str] = {
    "train": "steps whose result is part of the run: forward, backward, optimizer, and logging between steps",
    "data_wait": "waiting for the next batch",
    "compile": "the first step of an attempt that compiles its model",
    "checkpoint": "training was blocked by a save",
    "eval": "evaluations between steps",
    "lost_work": "steps, and waiting for their data, after the checkpoint that the next attempt resumed from",
    "init": "starting and ending processes: imports, rendezvous, building, loading; hooks after the last step",
    "detect": "from a fault to the decision to end the attempt",
    "restart": "from that decision until the ranks of the next attempt are ready to train",
    "degraded": "ranks that the run asked for and did not have",
    "queue": "waiting in the queue of a scheduler",
    "idle": "nothing ran: between the end of a command and the next",
}
"""Bucket -> what is counted in it, in the order of tables."""

_OF_PHASE = {
    Phase.INIT: "init",
    Phase.DATA: "data_wait",
    Phase.FORWARD: "train",
    Phase.BACKWARD: "train",
    Phase.OPTIMIZER: "train",
    Phase.OTHER: "train",
    Phase.COMPILE: "compile",
    Phase.CHECKPOINT: "checkpoint",
    Phase.EVAL: "eval",
    Phase.END: "init",
}
_WORK = ("train", "data_wait")
"""Buckets of the time that a step takes; what is lost of it moves to ``lost_work``."""


@dataclass(frozen=True)
class Interruption:
    """A fault and what followed; times are of the whole job, not multiplied by ranks."""

    attempt: int
    at_s: float
    """Time of the fault, in seconds since 1970."""
    step: int
    """Finished steps at the fault."""
    event: Mapping[str, Any]
    """The event that named it; empty where the whole command was killed."""
    detect_s: float
    lost_s: float
    """Work that was lost, mean over the ranks."""
    restart_s: float
    """From the decision to the first batch, without idle and queue; up to the present if it did not train again."""
    idle_s: float
    """Between the end of the attempt and the next that another command started, without queue."""
    resumed_step: int | None
    """Step from which it trained again; None: it did not."""
    by_itself: bool
    """The same command started the next attempt."""


@dataclass(frozen=True)
class Ledger:
    """Where the time of the ranks went."""

    start_s: float
    end_s: float
    """The end of the last attempt, or the present while it runs; both in seconds since 1970."""
    seconds: dict[str, float]
    """Bucket -> seconds, summed over ranks; all buckets are here."""
    total_s: float
    """Wall time x ranks; where attempts asked for different numbers of ranks, the sum over attempts."""
    interruptions: tuple[Interruption, ...] = ()

    @property
    def wall_s(self) -> float:
        """Seconds from the start of the first attempt to the end."""
        return self.end_s - self.start_s

    @property
    def goodput_frac(self) -> float:
        """The share of ``train``."""
        return self.frac("train")

    def frac(self, bucket: str) -> float:
        """Return the share of a bucket (0..1)."""
        return self.seconds[bucket] / self.total_s if self.total_s else 0.0


def ledger(history: History) -> Ledger | None:
    """Return the ledger of a run; None before its first attempt."""
    attempts = history.attempts
    if not attempts:
        return None
    seconds = dict.fromkeys(BUCKETS, 0.0)
    interruptions = []
    total_s = attempts[0].queued_s * attempts[0].wanted
    seconds["queue"] += total_s
    for index, attempt in enumerate(attempts):
        after_fault = index > 0 and attempts[index - 1].fault is not None
        lost_frac = _lost_frac(history, index)
        lost_s = 0.0
        for rank in range(attempt.ranks):
            of_rank = _of_rank(attempt, rank, lost_frac, after_fault=after_fault)
            lost_s += of_rank.get("lost_work", 0.0)
            for bucket, time_s in of_rank.items():
                seconds[bucket] += time_s
        length_s = attempt.end_s - attempt.start_s
        seconds["degraded"] += length_s * (attempt.wanted - attempt.ranks)
        gap_s, queued_s = _gap(attempts, index)
        following = attempts[index + 1] if index + 1 < len(attempts) else None
        between = "restart" if following is not None and following.continues else "idle"
        seconds["queue"] += queued_s * attempt.wanted
        seconds[between] += (gap_s - queued_s) * attempt.wanted
        total_s += (length_s + gap_s) * attempt.wanted
        if attempt.fault is not None:
            interruptions.append(_interruption(history, index, lost_s / attempt.ranks))
    start_s = attempts[0].start_s - attempts[0].queued_s
    return Ledger(start_s, attempts[-1].end_s, seconds, total_s, tuple(interruptions))


def _of_rank(attempt: Attempt, rank: int, lost_frac: float, *, after_fault: bool) -> dict[str, float]:
    """Return the seconds of a rank by bucket; they sum to the length of the attempt."""
    length_s = attempt.end_s - attempt.start_s
    slot = next((slot for slot in attempt.slots if slot.rank == rank), None)
    seconds: dict[str, float] = {}
    spent_s = {phase: slot.spent_s(phase) for phase in Phase} if slot else {}
    launch_s = min(max(0.0, slot.opened_wall_ns / 1e9 - attempt.start_s), length_s) if slot else 0.0
    known_s = launch_s + sum(spent_s.values())
    shrink = length_s / known_s if known_s > length_s else 1.0  # clocks of two machines, or one that was set
    seconds["init"] = launch_s * shrink
    for phase, time_s in spent_s.items():
        _add(seconds, _OF_PHASE[phase], time_s * shrink)
    tail_s = max(0.0, length_s - known_s)
    for bucket, time_s in _tail(attempt, slot, tail_s).items():
        _add(seconds, bucket, time_s)
    for bucket in _WORK:
        lost_s = seconds.get(bucket, 0.0) * lost_frac
        _add(seconds, bucket, -lost_s)
        _add(seconds, "lost_work", lost_s)
    if after_fault:
        _add(seconds, "restart", seconds.pop("init"))
    return seconds


def _tail(attempt: Attempt, slot: Progress | None, tail_s: float) -> dict[str, float]:
    """Divide the last ``tail_s`` of a rank: its last phase up to the fault, detection, the end of the attempt."""
    bucket = _OF_PHASE[slot.phase if slot else Phase.INIT]
    if attempt.fault is None:
        return {bucket: tail_s}
    began_s = attempt.end_s - tail_s
    decided_s = max(began_s, attempt.fault.decided_s)
    failed_s = min(max(began_s, failure_s(attempt)), decided_s)
    parts: dict[str, float] = {}
    _add(parts, bucket, failed_s - began_s)
    _add(parts, "detect", decided_s - failed_s)
    _add(parts, "restart", attempt.end_s - decided_s)
    return parts


def failure_s(attempt: Attempt) -> float:
    """Return the time of the fault: as measured, else the last change of phase of any rank before the decision."""
    assert attempt.fault is not None
    decided_s = attempt.fault.decided_s
    if attempt.fault.detected_s is not None:
        return max(attempt.start_s, decided_s - attempt.fault.detected_s)
    if not attempt.fault.event:  # the whole command was killed: nobody detected anything
        return decided_s
    return min(decided_s, max([attempt.start_s, *map(last_change_s, attempt.slots)]))


def _lost_frac(history: History, index: int) -> float:
    """Return the share of an attempt's work that was lost: done after the checkpoint that a later one resumed from."""
    attempts, attempt = history.attempts, history.attempts[index]
    later = [each.from_step for each in attempts[index + 1 :] if each.from_step is not None]
    if not later and index == len(attempts) - 1 and (history.is_running or attempt.is_done):
        return 0.0
    saves = attempt.saves or {}
    resumed = min(later) if later else max((step for each in attempts for step in each.saves or {}), default=0)
    first = attempt.from_step or 0
    if resumed <= first:
        return 1.0
    trained_s = saves.get(resumed)
    rank0 = next((slot for slot in attempt.slots if slot.rank == 0), None)
    if trained_s is not None and rank0 is not None:
        worked_s = _worked_s(attempt, rank0)
        return max(0.0, worked_s - trained_s) / worked_s if worked_s else 0.0
    return max(0, attempt.last_step - resumed) / max(1, attempt.last_step - first)


def _worked_s(attempt: Attempt, slot: Progress) -> float:
    """Return the seconds of a rank in the steps of an attempt, up to the fault."""
    parts = _of_rank(attempt, slot.rank, 0.0, after_fault=False)
    return sum(parts.get(bucket, 0.0) for bucket in _WORK)


def _gap(attempts: Sequence[Attempt], index: int) -> tuple[float, float]:
    """Return the seconds from the end of an attempt to the next, and how many of them were in a queue."""
    if index + 1 == len(attempts):
        return 0.0, 0.0
    following = attempts[index + 1]
    gap_s = following.start_s - attempts[index].end_s
    return gap_s, min(gap_s, following.queued_s)


def _interruption(history: History, index: int, lost_s: float) -> Interruption:
    attempts, attempt = history.attempts, history.attempts[index]
    fault = attempt.fault
    assert fault is not None
    failed_s = failure_s(attempt)
    restart_s = attempt.end_s - fault.decided_s
    following = attempts[index + 1] if index + 1 < len(attempts) else None
    gap_s, queued_s = _gap(attempts, index)
    if following is not None:
        parts = [_of_rank(following, rank, 0.0, after_fault=False)["init"] for rank in range(following.ranks)]
        restart_s += sum(parts) / len(parts) + (gap_s if following.continues else 0.0)
    return Interruption(
        attempt=attempt.number,
        at_s=failed_s,
        step=attempt.last_step,
        event=fault.event,
        detect_s=fault.decided_s - failed_s,
        lost_s=lost_s,
        restart_s=restart_s,
        idle_s=0.0 if following is None or following.continues else gap_s - queued_s,
        resumed_step=following.from_step if following is not None else None,
        by_itself=following is not None and following.continues,
    )


def _add(seconds: dict[str, float], bucket: str, time_s: float) -> None:
    seconds[bucket] = seconds.get(bucket, 0.0) + time_s
