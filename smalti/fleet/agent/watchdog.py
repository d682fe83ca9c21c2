"""Detects ranks that make no progress, from their slots (``track/progress.py``), with limits learned for each phase.

The rank that is furthest behind decides: ranks that wait for it are not taken for hanging. How long a rank is still is
counted by the agent's looks, so a machine that was suspended gives no false alarm.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from smalti.base import clock
from smalti.fleet.agent.evidence import Look, waits_in_collective
from smalti.fleet.launch.local import Rank
from smalti.track.collectives import behind
from smalti.track.progress import Phase, Progress, unopened

_EVERY_S = 1.0
_MOST_PER_LOOK_S = 2.0
"""A longer time between two looks is not the rank's: the agent itself did not run."""
_FACTOR = 3.0
_OBSERVATIONS = 3
_LEARNED = (Phase.DATA, Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER)
"""Phases whose limit may be below the initial one. Evaluations, saves and hooks vary too much."""
_SET_UP = (Phase.INIT, Phase.COMPILE)
"""Phases of parts, each with a sign of life at its end. The limit is that of the longest part, and is lowered only by
attempts that have loaded a checkpoint: without one, the longest part of the next attempt is missing."""
_SET_UP_FLOOR_S = 60.0


class Limits:
    """Limit of each phase; kept over the attempts of a command."""

    def __init__(self, floor_s: float, initial_s: float, *, floors_s: dict[Phase, float] | None = None) -> None:
        """initial_s: before a phase was observed, and the least for evaluations, saves, compilation and hooks.

        floors_s: floors of phases that need another one than ``floor_s``.
        """
        self.floor_s, self.initial_s = floor_s, max(initial_s, floor_s)
        self._floors_s = floors_s or {}
        self._largest_s: dict[tuple[Phase, int], float] = defaultdict(float)
        self._seen: Counter[tuple[Phase, int]] = Counter()
        self.resumes = False
        """The present attempt loads a checkpoint, and not from memory, which takes less time than a later load."""

    def learn(self, phase: Phase, seconds: float, row_tokens: int = 0) -> None:
        """Observe that a phase took at most so long with rows of that length."""
        self._largest_s[phase, row_tokens] = max(self._largest_s[phase, row_tokens], seconds)
        self._seen[phase, row_tokens] += 1

    def of(self, phase: Phase, row_tokens: int = 0) -> float:
        """Return the limit of a phase, in seconds; rows of another length have one of their own."""
        floor_s = self.initial_s
        if phase in _SET_UP and self._seen[phase, 0]:
            return max(self.floor_s, _SET_UP_FLOOR_S, _FACTOR * self._largest_s[phase, 0])
        if phase in _LEARNED and self._seen[phase, row_tokens] >= _OBSERVATIONS:
            floor_s = max(self.floor_s, self._floors_s.get(phase, 0.0))
        return max(floor_s, _FACTOR * self._largest_s[phase, row_tokens])


@dataclass(frozen=True)
class Hang:
    """A rank that makes no progress; ``rank`` is None where none is guilty alone."""

    rank: int | None
    phase: Phase
    step: int
    still_s: float
    """Seconds without progress when it was detected."""
    why: str
    """Why this rank: ``it is stopped (SIGSTOP)``."""


class Watchdog:
    """Looks at the slots of one attempt about once a second."""

    def __init__(self, limits: Limits, read: Callable[[], list[Progress]]) -> None:
        """read: returns the slots of the ranks."""
        self._limits, self._read = limits, read
        self._looked_s = clock.now_s()
        self._before: dict[int, Progress] = {}
        self._still_s: dict[int, float] = defaultdict(float)
        self._longest_s: dict[int, float] = defaultdict(float)
        """Longest time without a sign of life in the present phase of each rank."""

    def look(self, ranks: Sequence[Rank]) -> list[Progress]:
        """Return the slots of the running ranks if one of them hangs, else []."""
        now_s = clock.now_s()
        passed_s = now_s - self._looked_s
        if passed_s < _EVERY_S:
            return []
        self._looked_s = now_s
        running = {rank.rank: rank for rank in ranks if rank.code is None}
        slots = [slot for slot in self._read() if slot.rank in running]
        for slot in slots:
            self._observe(slot, min(passed_s, _MOST_PER_LOOK_S))
        if not slots:
            return []
        slots += self._not_open(running, slots)
        least = min(map(_position, slots))
        behind = [slot for slot in slots if _position(slot) == least]
        hangs = any(self._still_s[slot.rank] >= self._limits.of(slot.phase, slot.row_tokens) for slot in behind)
        still = [slot for slot in slots if self._still_s[slot.rank] >= self._limits.floor_s]
        return slots if hangs or any(running[slot.rank].is_stopped for slot in still) else []

    def name(self, slots: Sequence[Progress], ranks: Sequence[Rank], seen: Look) -> Hang:
        """Name the guilty rank: stopped; behind; without its batch; fewer collectives; not waiting in a collective.

        The last needs the stacks of all ranks of other nodes: one that has not arrived says nothing about its rank.
        """
        stopped = {rank.rank for rank in ranks if rank.is_stopped}
        unseen = any(rank.node is not None and not seen.stacks.get(rank.rank) for rank in ranks)
        working = [] if unseen else [slot for slot in slots if not waits_in_collective(seen.stacks.get(slot.rank, ""))]
        late = behind(seen.counts)
        tests = (
            ("it is stopped (SIGSTOP or a debugger)", [slot for slot in slots if slot.rank in stopped]),
            ("it is behind the other ranks", _least(slots, _position)),
            ("it waits for its own data", [slot for slot in slots if slot.lacks_batch]),
            ("it has started fewer collectives", _least(slots, lambda slot: slot.collectives)),
            ("the others wait in a collective that it has not started", [slot for slot in slots if slot.rank in late]),
            ("the others wait in a collective", working),
        )
        for why, guilty in tests:
            if guilty and (len(guilty) < len(slots) or len(slots) == 1):
                return self._hang(guilty[0], guilty[0].rank, why if len(slots) > 1 else "")
        slot = max(slots, key=lambda each: self._still_s[each.rank])
        return self._hang(slot, None, "all ranks are alike")

    def _hang(self, slot: Progress, rank: int | None, why: str) -> Hang:
        return Hang(rank, slot.phase, slot.step, self._still_s[slot.rank], why)

    def _observe(self, slot: Progress, passed_s: float) -> None:
        rank, before = slot.rank, self._before.get(slot.rank)
        self._before[rank] = slot
        self._still_s[rank] += passed_s
        self._longest_s[rank] = max(self._longest_s[rank], self._still_s[rank])
        if before is None or (before.phase_count, before.beats) != (slot.phase_count, slot.beats):
            self._still_s[rank] = 0.0
        if before is None or before.phase_count == slot.phase_count:
            return
        for phase in Phase:
            grown_s = slot.spent_s(phase) - before.spent_s(phase)
            if grown_s > 0 and phase not in _SET_UP:
                self._limits.learn(phase, grown_s, slot.row_tokens)
        if before.phase in _SET_UP and self._limits.resumes:
            self._limits.learn(before.phase, self._longest_s[rank])
        self._longest_s[rank] = 0.0

    def _not_open(self, running: Mapping[int, Rank], slots: Sequence[Progress]) -> list[Progress]:
        """Return slots for the ranks that have opened none: they are behind all others, and as still as those.

        A rank whose slot could not be created trains on, and so the others make progress.
        """
        opened = {slot.rank for slot in slots}
        still_s = min(self._still_s[rank] for rank in opened)
        absent = [rank for number, rank in running.items() if number not in opened]
        self._still_s |= dict.fromkeys((rank.rank for rank in absent), still_s)
        return [unopened(rank.rank, rank.pid) for rank in absent]


def _position(slot: Progress) -> tuple[int, int]:
    """Return how far a rank is: all pass the same parts of the set-up, but not of an evaluation."""
    return slot.phase_count, slot.beats if slot.phase == Phase.INIT else 0


def _least(slots: Sequence[Progress], key) -> list[Progress]:  # type: ignore[no-untyped-def]
    least = min(map(key, slots))
    return [slot for slot in slots if key(slot) == least]
