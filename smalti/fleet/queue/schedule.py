"""Which runs start, on which machine, and which are preempted, as a pure function of the queue and the machines.

The waiting run of the highest priority, of these the first launched, starts next. Where it lacks room, running
preemptible runs of lower priority are stopped for it: the lowest priority first, of these the last started; of several
machines on the one where the fewest are. Nothing overtakes it, but a preemptible run of lower priority may use the room
that it waits for and would have to give it back.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
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
    host: str = ""
    """The machine that it is on; while it waits the one before, which is taken if no other has room."""
    hosts: tuple[str, ...] = ("",)
    """Machines that it may be started on."""
    cluster: str = ""
    """Runs of one cluster wait for each other."""
    member_of: int | None = None
    """The run that it is a part of. Parts of a run have the same need and are on different machines."""

    @property
    def group(self) -> int:
        """Number of its run."""
        return self.number if self.member_of is None else self.member_of


@dataclass(frozen=True)
class Schedule:
    """What to do next, by number of the run."""

    start: Mapping[int, str] = field(default_factory=dict)
    """The machine of each run to start."""
    preempt: tuple[int, ...] = ()


def schedule(entries: Iterable[Entry], rooms: Mapping[str, Room]) -> Schedule:
    """Return the runs to start, which fit beside those that run, and the runs to preempt. rooms: of each machine.

    A run that needs more than any machine has waits and holds up no other.
    """
    entries = list(entries)
    running = [entry for entry in entries if entry.phase == "running"]
    free, coming = dict(rooms), dict(rooms)
    apart: dict[int, set[str]] = {}
    for entry in entries:
        if entry.phase != "waiting":
            apart.setdefault(entry.group, set()).add(entry.host)
        if entry.phase != "waiting" and entry.host in rooms:
            free[entry.host] -= entry.need
            if entry.phase == "running":
                coming[entry.host] -= entry.need
    start: dict[int, str] = {}
    preempt: list[int] = []
    blocked: dict[str, Entry] = {}
    served: set[str] = set()
    for together in _together(entries):
        first, others = together[0], apart.setdefault(together[0].group, set())
        hosts = [host for host in first.hosts if host in rooms and rooms[host].holds(first.need) and host not in others]
        passed = blocked.get(first.cluster)
        if len(hosts) < len(together) or first.cluster in served:
            continue
        if passed is not None and not (first.preemptible and first.priority < passed.priority):
            continue
        fitting = [host for host in hosts if free[host].holds(first.need)]
        if len(fitting) >= len(together):
            for entry in together:
                host = min(fitting, key=lambda host: (host == entry.host, -free[host].cores, -free[host].gpus))
                fitting.remove(host)
                start[entry.number] = host
                others.add(host)
                free[host], coming[host] = free[host] - entry.need, coming[host] - entry.need
        elif passed is None:
            stops = {host: _preempted(first, [each for each in running if each.host == host], coming[host])
                     for host in hosts}  # fmt: skip
            possible = {host: stopped for host, stopped in stops.items() if stopped is not None}
            if len(possible) < len(together):
                blocked[first.cluster] = first
                continue
            for host in sorted(possible, key=lambda host: _cost(possible[host]))[: len(together)]:
                for stopped in possible[host]:
                    preempt.append(stopped.number)
                    coming[host] += stopped.need
                    running.remove(stopped)
                free[host], coming[host] = free[host] - first.need, coming[host] - first.need
            served.add(first.cluster)  # the room is coming, and no other may take it
    return Schedule(start, tuple(preempt))


def _together(entries: list[Entry]) -> list[list[Entry]]:
    """Return the waiting runs in their order; a group whose first run waits is started as a whole."""
    waiting = [entry for entry in entries if entry.phase == "waiting"]
    numbers = {entry.number for entry in waiting}
    units: dict[int, list[Entry]] = {}
    for entry in sorted(waiting, key=lambda entry: (-entry.priority, entry.number)):
        units.setdefault(entry.group if entry.group in numbers else entry.number, []).append(entry)
    return list(units.values())


def _preempted(waiting: Entry, running: list[Entry], free: Room) -> list[Entry] | None:
    """Return the fewest runs to stop, in their order, so that ``waiting`` fits; None where all are not enough."""
    candidates = [entry for entry in running if entry.preemptible and entry.priority < waiting.priority]
    candidates.sort(key=_first_stopped)
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
    return needed


def _first_stopped(entry: Entry) -> tuple[float, ...]:
    return entry.priority, -entry.started_s, -entry.number


def _cost(stopped: list[Entry]) -> tuple[int, list[tuple[float, ...]]]:
    return len(stopped), [_first_stopped(entry) for entry in stopped]
