"""The score of each task before and after the flags, with n and a 95 % interval each."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from smalti.evals.reader.flags import Flag
from smalti.evals.reader.samples import Sample
from smalti.evals.statistics.intervals import Z_95
from smalti.evals.tasks.accuracy import accuracy


@dataclass(frozen=True)
class Score:
    """A value with its n and interval."""

    value: float
    n: int
    interval: tuple[float, float] | None


@dataclass(frozen=True)
class TaskScores:
    """The scores of a task; ``after`` is None where the flags leave no item."""

    task: str
    metric: str
    before: Score
    after: Score | None
    excluded: int
    accepted: int
    """Wrong answers that count as correct after the flags."""

    def to_json(self) -> dict[str, Any]:
        """Return JSON values."""
        return asdict(self)


def task_scores(samples: Iterable[Sample], flags: Mapping[str, Flag]) -> list[TaskScores]:
    """Return the scores of the tasks, in the order of the samples. A task without graded samples is left out."""
    by_task: dict[str, list[Sample]] = {}
    for sample in samples:
        by_task.setdefault(sample.task, []).append(sample)
    scores = [_scores(task, members, flags) for task, members in by_task.items()]
    return [score for score in scores if score is not None]


def _scores(task: str, samples: Sequence[Sample], flags: Mapping[str, Flag]) -> TaskScores | None:
    remaining = [sample for sample in samples if not ((flag := flags.get(sample.name)) and flag.excludes)]
    accepted = {
        sample.name
        for sample in remaining
        if sample.correct is False and (flag := flags.get(sample.name)) and flag.accepts(sample)
    }
    before, after = _accuracy(samples, frozenset()), _accuracy(remaining, accepted)
    metric = "accuracy"
    if before is None:
        before, after, metric = _bits_per_byte(samples), _bits_per_byte(remaining), "bits_per_byte"
    if before is None:
        return None
    return TaskScores(task, metric, before, after, len(samples) - len(remaining), len(accepted))


def _accuracy(samples: Sequence[Sample], accepted: frozenset[str] | set[str]) -> Score | None:
    graded = [
        {"correct": sample.correct or sample.name in accepted, "category": sample.category, "cluster": sample.cluster}
        for sample in samples
        if sample.correct is not None
    ]
    if not graded:
        return None
    score = accuracy(graded, chance=0.0)
    return Score(score["value"], score["n"], tuple(score["interval"]) if score["interval"] else None)


def _bits_per_byte(samples: Sequence[Sample]) -> Score | None:
    """Return the bits of all documents over their bytes, with the standard error of a ratio of sums.

    stderr^2 = n / (n - 1) * sum((bits_i - value * bytes_i)^2) / (sum bytes)^2 (W. G. Cochran, Sampling Techniques,
    1977, chapter 6). The bootstrap of ``smalti eval run`` gives about the same, and the page can compute this one.
    """
    sizes = [
        (sample.nats / math.log(2), sample.n_bytes)
        for sample in samples
        if sample.nats is not None and sample.n_bytes is not None
    ]
    n, total = len(sizes), sum(n_bytes for _, n_bytes in sizes)
    if not total:
        return None
    value = sum(bits for bits, _ in sizes) / total
    if n == 1:
        return Score(value, n, None)
    half = Z_95 * math.sqrt(n / (n - 1) * sum((bits - value * size) ** 2 for bits, size in sizes)) / total
    return Score(value, n, (value - half, value + half))
