"""Finds held-out sets that got worse within a stage, as after a mixture change or too many repeats.

A set is reported if its last two measurements of a stage (or the only one) are both more than 2 % above its lowest
value in the stage, including that at its start. The held-out windows are the same each time, so only the weights
change the values. Noise of 0.5 % reports fewer than 1 of 100 stages (tests/track/test_report_worse.py).
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
        """Return the warning, one line."""
        return (
            f"held-out '{self.name}' got worse in stage {self.stage}: {self.lowest:.4f} at step {self.lowest_step:,}, "
            f"{self.last:.4f} at step {self.last_step:,} ({self.last / self.lowest - 1:+.1%} {self.measure})"
        )


def worse_in_stages(run: RunRecord) -> list[Worse]:
    """Return the sets that got worse, by stage and name; none for a run whose config has no stages."""
    bits = run.sources("metrics/eval/", "/bits_per_byte")
    suffix, measure = ("/bits_per_byte", "bits per byte") if bits else ("/LanguageCrossEntropy", "nats per token")
    names = bits or run.sources("metrics/eval/", suffix)
    worse = []
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
                worse.append(Worse(name, stage, lowest, step, inside[-1][1], inside[-1][0], measure))
    return worse


def _edges(run: RunRecord) -> list[int]:
    """Return the first step of each stage, and the end of the last."""
    length, stages = RunLength.of_plain(run.config), get(run.config, "data.stages")
    if length is None or not isinstance(stages, list):
        return []
    ends = [stage.get("until", "1run") if isinstance(stage, dict) else "1run" for stage in stages]
    return [0, *(length.step_at(str(end)) for end in ends)]
