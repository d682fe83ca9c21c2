"""Held-out sets that got worse within a stage: what a change of the mixture, or too many repeats, has cost.

Guarantees: from the run folder alone. A set is named where its last two measurements of a stage (the only one, where
there is one) both are more than 2 % above its lowest since the stage began, the measurement that the stage began with
included. The held-out windows are the same every time, so the weights alone move it from one measurement to the next;
noise of 0.5 % trips the rule in fewer than 1 of 100 stages (tests/track/test_report_worse.py).
"""

from dataclasses import dataclass
from itertools import pairwise

from smalti.config.durations import RunLength
from smalti.track.report.read import RunRecord, get

_WORSE_FRAC = 0.02


@dataclass(frozen=True)
class Worse:
    """A held-out set that ended a stage above its lowest."""

    name: str
    stage: int
    lowest: float
    lowest_step: int
    last: float
    last_step: int
    measure: str
    """``bits per byte``, or ``nats per token`` where no bits were measured."""

    def words(self) -> str:
        """One line."""
        return (
            f"held-out '{self.name}' got worse in stage {self.stage}: {self.lowest:.4f} at step {self.lowest_step:,}, "
            f"{self.last:.4f} at step {self.last_step:,} ({self.last / self.lowest - 1:+.1%} {self.measure})"
        )


def worse_in_stages(run: RunRecord) -> list[Worse]:
    """By stage and name; nothing for a run whose config does not tell its stages."""
    bits = run.sources("metrics/eval/", "/bits_per_byte")
    suffix, measure = ("/bits_per_byte", "bits per byte") if bits else ("/LanguageCrossEntropy", "nats per token")
    names = bits or run.sources("metrics/eval/", suffix)
    found = []
    for stage, (begin, end) in enumerate(pairwise(_edges(run))):
        for name in names:
            series = zip(*run.series(f"metrics/eval/{name}{suffix}"), strict=True)
            points = [(int(step), value) for step, value in series if step <= end and value > 0]
            before = [point for point in points if point[0] <= begin][-1:]
            inside = [point for point in points if point[0] > begin]
            if not before + inside[:-1] or not inside:
                continue
            step, lowest = min(before + inside, key=lambda point: point[1])
            if all(value > lowest * (1 + _WORSE_FRAC) for _, value in inside[-2:]):
                found.append(Worse(name, stage, lowest, step, inside[-1][1], inside[-1][0], measure))
    return found


def _edges(run: RunRecord) -> list[int]:
    """The steps at which stages begin, and the end."""
    length, stages = RunLength.of_plain(run.config), get(run.config, "data.stages")
    if length is None or not isinstance(stages, list):
        return []
    ends = [stage.get("until", "1run") if isinstance(stage, dict) else "1run" for stage in stages]
    return [0, *(length.step_at(str(end)) for end in ends)]
