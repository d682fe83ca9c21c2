"""Profiles of windows of steps: their files, the parts of a step and its bottleneck.

    profile/steps-00000010-00000012/rank-000/{summary.json, trace.json.gz, collectives.jsonl, memory.pickle}

The parts of a summary add up to its window. A part's gain is the speedup of a step if the part took no time and nothing
else changed (Amdahl 1967): an upper bound. ``train/profile.py`` records profiles.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from smalti.base import store
from smalti.base.errors import UserError

Interval = tuple[float, float]

NETWORK, HOST = "network, not hidden", "host between operators"
COUNTING = "the counting itself"
"""Host time of the log of collectives; only spent while profiling."""
WORK = ("matrix products", "attention", COUNTING)
"""The model's own work and the cost of profiling: never the bottleneck while another part takes a tenth of a step."""


@dataclass(frozen=True)
class Part:
    """Time that one kind of work took in a window."""

    name: str
    s: float
    calls: int


@dataclass(frozen=True)
class Operator:
    """One of the slowest operators."""

    name: str
    s: float
    calls: int


@dataclass(frozen=True)
class Traffic:
    """Collectives of one kind along one axis in a window."""

    op: str
    axis: str
    calls: int
    bytes: int
    s: float | None
    """Seconds from start to end, including those hidden behind compute; None where it was not timed."""
    planned_calls: int | None = None
    """Calls that the planner predicts; None where it predicts none."""
    planned_bytes: int | None = None


@dataclass(frozen=True)
class Summary:
    """The profile of one rank over a window of steps."""

    first_step: int
    last_step: int
    rank: int
    device: str
    window_s: float
    parts: tuple[Part, ...]
    """The parts of the window, largest first; they add up to it."""
    operators: tuple[Operator, ...]
    traffic: tuple[Traffic, ...]
    peak_bytes: int | None
    """Peak memory of the device's allocator; None on a CPU."""

    @property
    def steps(self) -> int:
        """Number of steps in the window."""
        return self.last_step - self.first_step + 1

    @property
    def bottleneck(self) -> Part:
        """The largest part outside ``WORK`` that takes a tenth of the window; else the largest part."""
        others = [part for part in self.parts if part.name not in WORK and part.s >= 0.1 * self.window_s]
        measured = [part for part in self.parts if part.name != COUNTING]
        return max(others or measured or self.parts, key=lambda part: part.s)

    def gain(self, part: Part) -> float:
        """Return how many times faster a step would be without the part."""
        rest_s = self.window_s - part.s
        return self.window_s / rest_s if rest_s > 0 else float("inf")

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object, with step time and bottleneck."""
        part = self.bottleneck
        bottleneck = {"name": part.name, "frac": part.s / self.window_s, "gain": self.gain(part)}
        return {**asdict(self), "step_s": self.window_s / self.steps, "bottleneck": bottleneck}


def split(window: Interval, busy: Sequence[Interval], collectives: Sequence[Interval]) -> tuple[float, float]:
    """Return (seconds of collectives with nothing in parallel, idle seconds) of a window."""
    working = joined(busy, window)
    either = joined([*busy, *collectives], window)
    length = sum(end - begin for begin, end in either)
    busy_s = sum(end - begin for begin, end in working)
    return length - busy_s, window[1] - window[0] - length


def joined(intervals: Iterable[Interval], window: Interval) -> list[Interval]:
    """Return the union of the intervals inside ``window``, ascending and disjoint."""
    union: list[Interval] = []
    for begin, end in sorted((max(begin, window[0]), min(end, window[1])) for begin, end in intervals):
        if end <= begin:
            continue
        if union and begin <= union[-1][1]:
            union[-1] = (union[-1][0], max(union[-1][1], end))
        else:
            union.append((begin, end))
    return union


def folder_of(run: Path, first_step: int, last_step: int, rank: int) -> Path:
    """Return the folder of a rank's profile of a window."""
    return run / "profile" / f"steps-{first_step:08d}-{last_step:08d}" / f"rank-{rank:03d}"


def write(folder: Path, summary: Summary) -> None:
    """Write ``summary.json`` atomically."""
    store.write_json(folder / "summary.json", summary.to_json())


def read(run: Path) -> list[Summary]:
    """Return all summaries of a run, by window and rank. Raises UserError where there is none."""
    files = sorted(run.glob("profile/steps-*/rank-*/summary.json"))
    if not files:
        raise UserError(
            f"{run} has no profile",
            allowed="a run with profile.steps",
            hint="smalti train RECIPE profile.steps=[10,12]",
        )
    return [_parsed(json.loads(file.read_text())) for file in files]


def _parsed(tree: dict[str, Any]) -> Summary:
    known = {name: tree[name] for name in Summary.__dataclass_fields__}
    known["parts"] = tuple(Part(**part) for part in tree["parts"])
    known["operators"] = tuple(Operator(**operator) for operator in tree["operators"])
    known["traffic"] = tuple(Traffic(**traffic) for traffic in tree["traffic"])
    return Summary(**known)
