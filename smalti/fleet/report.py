"""What went wrong in the runs of the queue, by cause, and its cost. Read from the database and the run folders."""

import sqlite3
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from smalti.base import clock, database
from smalti.fleet.clusters import clusters
from smalti.fleet.queue import runs
from smalti.fleet.queue.runs import Run
from smalti.track.events import read_events
from smalti.track.goodput import ledger, read_history

_WAITING = ("QUEUED", "RECOVERING")
"""States in which a run could train if the machine had room; a dependency (PENDING) is its own wish."""


@dataclass(frozen=True)
class FaultCount:
    """The faults of one cause inside of runs, whether ``smalti train`` or the queue restarted them."""

    cause: str
    """As in train.restart, ``oom``; ``unknown`` where the whole command was killed and recorded none."""
    count: int
    lost_s: float
    """Work that was done again."""
    restart_s: float
    """Detection, and until the ranks trained again, without time between two commands."""
    device_s: float
    """Both, times the cores or GPUs of the run."""


@dataclass(frozen=True)
class FleetReport:
    """Sums over all runs of the queue; times are of runs, not multiplied by their cores or GPUs, unless they say so."""

    states: dict[str, int]
    ran_s: float
    device_s: float
    """Time x cores or GPUs."""
    waited_s: float
    ends: dict[str, int]
    """Cause -> attempts that ended so: done, preempted, user, fault ..."""
    faults: tuple[FaultCount, ...]
    """The most costly cause first."""
    usd: float | None
    """Price of ``device_s``, of runs on clusters that have one (``usd_per_device_hour``); None where none has."""
    lost_usd: float | None
    """Price of the time that faults cost."""

    @property
    def scheduling_frac(self) -> float | None:
        """Scheduling goodput: the share of time that runs trained, of the time that they could have."""
        total_s = self.ran_s + self.waited_s
        return self.ran_s / total_s if total_s else None

    @property
    def lost_s(self) -> float:
        """Time that faults cost: work done again, detection, and until the ranks trained again."""
        return sum(fault.lost_s + fault.restart_s for fault in self.faults)

    @property
    def lost_device_s(self) -> float:
        """The same, times cores or GPUs."""
        return sum(fault.device_s for fault in self.faults)

    @property
    def mtbf_s(self) -> float | None:
        """Mean time between faults: time that runs ran for each fault; None without one."""
        count = sum(fault.count for fault in self.faults)
        return self.ran_s / count if count else None

    @property
    def device_mtbf_s(self) -> float | None:
        """Time x cores or GPUs for each fault; None without one."""
        count = sum(fault.count for fault in self.faults)
        return self.device_s / count if count else None


def read(now_s: float | None = None) -> FleetReport:
    """Return the report of all runs, up to the present."""
    now_s = clock.wall_s() if now_s is None else now_s
    with database.transaction(write=False) as db:
        everything = runs.select(db)
        ran_s = {run.number: _ran_s(db, run) for run in everything}
        launched = [run for run in everything if run.member_of is None]
        events = {run.number: runs.events(db, run.number) for run in launched}
    held_s = {run.number: max(run.cores, run.gpus) * ran_s[run.number] for run in everything}
    sizes = Counter(run.group for run in everything)
    prices = {name: cluster.usd_per_device_hour for name, cluster in clusters().items()}
    priced = {run.number: price for run in everything if (price := prices.get(run.cluster)) is not None}
    devices = {run.folder: max(run.cores, run.gpus) * sizes[run.number] for run in launched if run.folder is not None}
    price_of = {run.folder: priced[run.number] for run in launched if run.folder and run.number in priced}
    faults, lost_usd = _faults(devices, price_of, now_s)
    return FleetReport(
        states=dict(Counter(run.state for run in launched)),
        ran_s=sum(ran_s[run.number] for run in launched),
        device_s=sum(held_s.values()),
        waited_s=sum(_waited_s(events[run.number], now_s) for run in launched),
        ends=dict(Counter(cause for run in launched for cause in _ends(events[run.number])).most_common()),
        faults=faults,
        usd=_usd((held_s[run.number], priced.get(run.number)) for run in everything),
        lost_usd=lost_usd,
    )


def _usd(times: Iterable[tuple[float, float | None]]) -> float | None:
    """Return the price of times of devices, of those that have one; None where none has."""
    priced = [device_s / 3600 * price for device_s, price in times if price is not None]
    return sum(priced) if priced else None


def _ran_s(db: sqlite3.Connection, run: Run) -> float:
    return sum(attempt.duration_s() for attempt in runs.attempts(db, run.number))


def _waited_s(events: Sequence[Mapping[str, Any]], now_s: float) -> float:
    """Return the time that a run waited for room, from its events."""
    starts_s = [clock.seconds_of(event["time"]) or now_s for event in events]
    spans = zip(events, starts_s, [*starts_s[1:], now_s], strict=True)
    return sum(max(0.0, end_s - start_s) for event, start_s, end_s in spans if event["state"] in _WAITING)


def _ends(events: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the causes of the ends of a run's attempts."""
    after = ("RECOVERING", "COMPLETED", "FAILED", "STOPPED", "QUEUED")
    return [event["cause"] for event in events if event["attempt"] is not None and event["state"] in after]


def _faults(
    devices: Mapping[str, int], prices: Mapping[str, float], now_s: float
) -> tuple[tuple[FaultCount, ...], float | None]:
    """Return the faults in run folders, each folder once although several launches may have trained in it, and the
    price of the time that they cost. ``devices``, ``prices``: of a folder."""
    totals: dict[str, FaultCount] = {}
    times: list[tuple[float, float | None]] = [(0.0, price) for price in prices.values()]
    for folder in sorted(devices):
        result = ledger(read_history(folder, now_s)) if Path(folder, "config.yaml").is_file() else None
        if result is None:
            continue
        causes = {
            event["attempt"]: event.get("cause") for event in read_events(folder) if event["event"] == "attempt_ended"
        }
        for each in result.interruptions:
            cause = causes.get(each.attempt) or "unknown"
            before = totals.get(cause, FaultCount(cause, 0, 0.0, 0.0, 0.0))
            restart_s = each.detect_s + each.restart_s
            device_s = devices[folder] * (each.lost_s + restart_s)
            times.append((device_s, prices.get(folder)))
            totals[cause] = FaultCount(
                cause,
                before.count + 1,
                before.lost_s + each.lost_s,
                before.restart_s + restart_s,
                before.device_s + device_s,
            )
    return tuple(sorted(totals.values(), key=lambda fault: (-fault.lost_s - fault.restart_s, fault.cause))), _usd(times)
