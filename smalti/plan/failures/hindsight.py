"""What would have helped a run that was interrupted: the closed form of goodput, with the run's own measured times.

The times between failures, of detection and restart are means over few failures, so this ranks changes; it does not
predict the next run. A change is judged alone: what several save together is less than the sum. None saves more than
the seconds of the ledger's buckets that it shortens.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from smalti.base.units import format_seconds
from smalti.cost.failures import optimal_s
from smalti.plan.failures.goodput import Recovery, Timing, goodput_frac
from smalti.track.checkpoints.names import PEER_MEMORY
from smalti.track.goodput import Ledger

_UP = ("train", "data_wait", "compile", "checkpoint", "eval", "lost_work")
_NOT_RUNNING = ("idle", "queue", "degraded")
_HALF = 0.5


@dataclass(frozen=True)
class Change:
    """A change and what it would have saved."""

    words: str
    goodput_frac: float | None
    """Goodput by the closed form with the change, of the time without idle and queue; None: it does not change."""
    saved_s: float
    """Rank-seconds that the same work would have taken less."""


@dataclass(frozen=True)
class Hindsight:
    """The measured times of a run, and the changes that would have saved time, the best first."""

    timing: Timing
    goodput_frac: float
    """Goodput by the closed form with the measured times."""
    changes: tuple[Change, ...]


def hindsight(ledger: Ledger, events: Sequence[Mapping[str, Any]]) -> Hindsight | None:
    """Return what would have helped; None without an interruption, or before a second of training."""
    timing = measured_timing(ledger, events)
    if timing is None:
        return None
    before = goodput_frac(timing)
    total_s = ledger.total_s - sum(ledger.seconds[bucket] for bucket in _NOT_RUNNING)
    changes = []
    restarted = any(each.resumed_step is not None for each in ledger.interruptions)
    rows = _changes(timing, ledger.seconds, intervals=_by_saves_alone(events), restarts=restarted)
    for words, changed, most_s in rows:
        saved_s = min(total_s * (1 - before / goodput_frac(changed)), most_s)
        if saved_s > 0:
            changes.append(Change(words, before / (1 - saved_s / total_s), saved_s))
    idle_s = sum(each.idle_s for each in ledger.interruptions) * ledger.total_s / ledger.wall_s
    idle_s = min(idle_s, ledger.seconds["idle"])  # attempts may have asked for different numbers of ranks
    if idle_s > 0:
        changes.append(Change("restarts by itself: no idle time after a fault", None, idle_s))
    return Hindsight(timing, before, tuple(sorted(changes, key=lambda change: -change.saved_s)))


def measured_timing(ledger: Ledger, events: Sequence[Mapping[str, Any]]) -> Timing | None:
    """Return the run's mean times, of the whole job; None without an interruption, or before a second of training."""
    faults = ledger.interruptions
    ranks = ledger.total_s / ledger.wall_s if ledger.wall_s else 0.0
    up_s = sum(ledger.seconds[bucket] for bucket in _UP) / ranks if ranks else 0.0
    if not faults or up_s < 1.0:
        return None
    saves = [event for event in events if event.get("event") == "checkpoint_saved"]
    number = max(1, len(saves))
    # saving is blocked in the phase of checkpoints; the rest of a save runs beside training
    stall_s = ledger.seconds["checkpoint"] / ranks / number
    upload_s = sum(max(0.0, _number(event, "seconds") - _number(event, "blocked_s")) for event in saves) / number
    return Timing(
        mtbf_s=up_s / len(faults),
        stall_s=stall_s,
        interval_s=max(up_s / number - stall_s, 1e-3),
        recoveries=(
            Recovery(
                sum(each.detect_s for each in faults) / len(faults),
                sum(each.restart_s for each in faults) / len(faults),
            ),
        ),
        upload_s=upload_s,
    )


def _by_saves_alone(events: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether the work that was lost follows from the interval of saves, which were measured.

    Without a save nothing is known of its time; after a recovery from memory less was lost.
    """
    kinds = [(event.get("event"), event.get("source")) for event in events]
    return ("checkpoint_saved", None) in kinds and ("resumed", PEER_MEMORY) not in kinds


def _changes(
    timing: Timing, seconds: Mapping[str, float], *, intervals: bool, restarts: bool
) -> list[tuple[str, Timing, float]]:
    """Return each change, the times with it, and the most rank-seconds that it can save.

    seconds: those of the ledger, by bucket. intervals: whether other intervals of saves are considered. restarts:
    whether an attempt has followed.
    """
    (recovery,) = timing.recoveries
    best_s = max(optimal_s(max(timing.stall_s, 1e-3), timing.mtbf_s), timing.upload_s)
    detect_s, restart_s = recovery.detect_s * _HALF, recovery.restart_s * _HALF
    interval, measured = format_seconds(best_s), format_seconds(timing.interval_s)
    lost_s, faults_s = seconds["lost_work"], seconds["detect"] + seconds["restart"] + seconds["lost_work"]
    checkpoints = [
        (
            f"a checkpoint every {interval} instead of {measured}",
            replace(timing, interval_s=best_s),
            seconds["checkpoint"] + lost_s,
        )
    ]
    restart = [
        (
            f"restart in {format_seconds(restart_s)}, half",
            _recovering(timing, recovery.detect_s, restart_s),
            seconds["restart"] * _HALF,
        )
    ]
    return [
        *(checkpoints if intervals else []),
        (
            f"detection in {format_seconds(detect_s)}, half",
            _recovering(timing, detect_s, recovery.restart_s),
            seconds["detect"] * _HALF,
        ),
        *(restart if restarts else []),
        ("half as many interruptions", replace(timing, mtbf_s=timing.mtbf_s / _HALF), faults_s * _HALF),
    ]


def _recovering(timing: Timing, detect_s: float, restart_s: float) -> Timing:
    return replace(timing, recoveries=(Recovery(detect_s, restart_s),))


def _number(event: Mapping[str, Any], name: str) -> float:
    value = event.get(name)
    return float(value) if isinstance(value, int | float) else 0.0
