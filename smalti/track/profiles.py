"""Profiles of a run: what is written for a window of steps, and what it says was the bottleneck.

    profile/steps-00000010-00000012/rank-000/{summary.json, trace.json.gz, collectives.jsonl, memory.pickle}

Promises: the parts of a summary add up to its window. A part's gain is what a step would be faster by if the part took
no time at all and nothing else changed (Amdahl 1967): an upper bound. Knows no torch: ``train/profile.py`` fills it.
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
"""What the log of collectives takes of the host; there only while a profile is taken."""
WORK = ("matrix products", "attention", COUNTING)
"""Parts that a model consists of, and what no step has without a profile: never called a bottleneck while anything else
takes a tenth of a step."""


@dataclass(frozen=True)
class Part:
    """What one kind of work took of a window."""

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
    """From start to end, whatever ran beside it; None where it was not timed."""
    planned_calls: int | None = None
    """As the planner reckons them; None where it knows of none."""
    planned_bytes: int | None = None


@dataclass(frozen=True)
class Summary:
    """What one rank did in a window of steps."""

    first_step: int
    last_step: int
    rank: int
    device: str
    window_s: float
    parts: tuple[Part, ...]
    """The largest first; they add up to the window."""
    operators: tuple[Operator, ...]
    traffic: tuple[Traffic, ...]
    peak_bytes: int | None
    """The most that the device's allocator had given out; None on a CPU."""

    @property
    def steps(self) -> int:
        """Steps of the window."""
        return self.last_step - self.first_step + 1

    @property
    def bottleneck(self) -> Part:
        """The largest part that is not the model's own work, where one takes a tenth; else the largest of all."""
        others = [part for part in self.parts if part.name not in WORK and part.s >= 0.1 * self.window_s]
        own = [part for part in self.parts if part.name != COUNTING]
        return max(others or own or self.parts, key=lambda part: part.s)

    def gain(self, part: Part) -> float:
        """How many times faster a step would be without the part."""
        rest_s = self.window_s - part.s
        return self.window_s / rest_s if rest_s > 0 else float("inf")

    def to_json(self) -> dict[str, Any]:
        """A JSON object, with what follows from the parts."""
        named = self.bottleneck
        said = {"name": named.name, "frac": named.s / self.window_s, "gain": self.gain(named)}
        return {**asdict(self), "step_s": self.window_s / self.steps, "bottleneck": said}


def split(window: Interval, busy: Sequence[Interval], collectives: Sequence[Interval]) -> tuple[float, float]:
    """(seconds of collectives beside which nothing ran, seconds in which nothing at all ran) of a window."""
    working = joined(busy, window)
    either = joined([*busy, *collectives], window)
    length = sum(end - begin for begin, end in either)
    busy_s = sum(end - begin for begin, end in working)
    return length - busy_s, window[1] - window[0] - length


def joined(intervals: Iterable[Interval], window: Interval) -> list[Interval]:
    """Intervals inside ``window`` that do not overlap, rising."""
    found: list[Interval] = []
    for begin, end in sorted((max(begin, window[0]), min(end, window[1])) for begin, end in intervals):
        if end <= begin:
            continue
        if found and begin <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((begin, end))
    return found


def folder_of(run: Path, first_step: int, last_step: int, rank: int) -> Path:
    """Where a rank writes its profile of a window."""
    return run / "profile" / f"steps-{first_step:08d}-{last_step:08d}" / f"rank-{rank:03d}"


def write(folder: Path, summary: Summary) -> None:
    """Write ``summary.json``, whole."""
    store.write_json(folder / "summary.json", summary.to_json())


def read(run: Path) -> list[Summary]:
    """All summaries of a run, by window and rank; UserError where there is none."""
    files = sorted(run.glob("profile/steps-*/rank-*/summary.json"))
    if not files:
        raise UserError(
            f"{run} has no profile",
            allowed="a run that was profiled",
            hint="smalti train RECIPE profile.steps=[10,12]",
        )
    return [_parsed(json.loads(file.read_text())) for file in files]


def _parsed(tree: dict[str, Any]) -> Summary:
    known = {name: tree[name] for name in Summary.__dataclass_fields__}
    known["parts"] = tuple(Part(**one) for one in tree["parts"])
    known["operators"] = tuple(Operator(**one) for one in tree["operators"])
    known["traffic"] = tuple(Traffic(**one) for one in tree["traffic"])
    return Summary(**known)
