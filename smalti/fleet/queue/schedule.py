"""Which runs start and which are preempted, as a pure function of the queue and the machine.

The waiting run of the highest priority, of these the first launched, starts next. Where it lacks room, running
preemptible runs of lower priority are stopped for it: the lowest priority first, of these the last started. Nothing
overtakes it, but a preemptible run of lower priority may use the room that it waits for and would have to give it back.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

Phase = Literal["waiting", "running", "leaving"]


@dataclass(frozen=True)
class Room:
    """Cores and GPUs."""

    cores: int = 0
    gpus: int = 0

    def __add__(self, other: "Room") -> "Room":
        return Room(self.cores + other.cores, self.gpus + other.gpus)

    def __sub__(self, other: "Room") -> "Room":
        return Room(self.cores - other.cores, self.gpus - other.gpus)

    def holds(self, need: "Room") -> bool:
        """Return whether ``need`` fits."""
        return need.cores <= self.cores and need.gpus <= self.gpus


@dataclass(frozen=True)
class Entry:
    """A run in the queue."""

    number: int
    """Number of the run; an earlier launch has a lower one."""
    phase: Phase
    need: Room
    priority: int
    preemptible: bool
    started_s: float = 0.0
    """Start of its attempt, if it runs."""


@dataclass(frozen=True)
class Schedule:
    """What to do next, by number of the run."""

    start: tuple[int, ...] = ()
    preempt: tuple[int, ...] = ()


def schedule(entries: Iterable[Entry], room: Room) -> Schedule:
    """Return the runs to start, which fit beside those that run, and the runs to preempt.

    A run that needs more than the machine has waits and holds up no other.
    """
    entries = list(entries)
    running = [entry for entry in entries if entry.phase == "running"]
    free, leaving = room, Room()
    for entry in entries:
        if entry.phase != "waiting":
            free -= entry.need
        if entry.phase == "leaving":
            leaving += entry.need
    start: list[int] = []
    blocked: Entry | None = None
    for entry in sorted(entries, key=lambda entry: (-entry.priority, entry.number)):
        if entry.phase != "waiting" or not room.holds(entry.need):
            continue
        if blocked is not None and not (entry.preemptible and entry.priority < blocked.priority):
            continue
        if free.holds(entry.need):
            start.append(entry.number)
            free -= entry.need
        elif blocked is None:
            preempted = _preempted(entry, running, free + leaving)
            if preempted is not None:  # room is coming, which no other may take
                return Schedule(tuple(start), tuple(preempted))
            blocked = entry
    return Schedule(tuple(start))


def _preempted(waiting: Entry, running: list[Entry], free: Room) -> list[int] | None:
    """Return the fewest runs to stop, in their order, so that ``waiting`` fits; None where all are not enough."""
    candidates = [entry for entry in running if entry.preemptible and entry.priority < waiting.priority]
    candidates.sort(key=lambda entry: (entry.priority, -entry.started_s, -entry.number))
    chosen: list[Entry] = []
    for entry in [*candidates, None]:
        if free.holds(waiting.need):
            break
        if entry is None:
            return None
        chosen.append(entry)
        free += entry.need
    needed = list(chosen)
    for entry in chosen:  # one that was chosen for nothing: those after it make the room alone
        if (free - entry.need).holds(waiting.need):
            free -= entry.need
            needed.remove(entry)
    return [entry.number for entry in needed]
