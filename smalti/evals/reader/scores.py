"""The score of each task before and after the flags, with n and a 95 % interval each."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from smalti.evals.reader.flags import Flag
from smalti.evals.samples import Sample
from smalti.evals.statistics.intervals import Estimate, bits_per_byte, mean
from smalti.evals.tasks.accuracy import accuracy


@dataclass(frozen=True)
class TaskScores:
    """The scores of a task; ``after`` is None where the flags leave no item."""

    task: str
    metric: str
    before: Estimate
    after: Estimate | None
    excluded: int
    accepted: int
    """Wrong answers that count as correct after the flags."""
    weights: Mapping[str, float] = field(default_factory=dict)
    """Of an average: task -> how much it grows with the task's value."""

    def to_json(self) -> dict[str, Any]:
        """Return JSON values."""
        sides = {"before": self.before.to_score(), "after": self.after and self.after.to_score()}
        return {"task": self.task, "metric": self.metric, **sides, "excluded": self.excluded, "accepted": self.accepted}


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
        before, after, metric = _mean_score(samples), _mean_score(remaining), "score"
    if before is None:
        before, after, metric = _bits_per_byte(samples), _bits_per_byte(remaining), "bits_per_byte"
    if before is None:
        return None
    return TaskScores(task, metric, before, after, len(samples) - len(remaining), len(accepted))


def _accuracy(samples: Sequence[Sample], accepted: frozenset[str] | set[str]) -> Estimate | None:
    graded = [
        {"correct": sample.correct or sample.name in accepted, "category": sample.category, "cluster": sample.cluster}
        for sample in samples
        if sample.correct is not None
    ]
    if not graded:
        return None
    return Estimate.from_score(accuracy(graded, chance=0.0))


def _mean_score(samples: Sequence[Sample]) -> Estimate | None:
    graded = [(sample.score, sample.cluster) for sample in samples if sample.score is not None]
    return mean([score for score, _ in graded], [cluster for _, cluster in graded]) if graded else None


def _bits_per_byte(samples: Sequence[Sample]) -> Estimate | None:
    """Return the bits of all documents over their bytes; the bootstrap of ``smalti eval run`` gives about the same."""
    documents = [
        (sample.nats, sample.n_bytes) for sample in samples if sample.nats is not None and sample.n_bytes is not None
    ]
    return bits_per_byte(*zip(*documents, strict=True)) if any(size for _, size in documents) else None
