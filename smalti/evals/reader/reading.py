"""What is read: the samples of one or two models, the list of flags, and the scores that follow from both."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from smalti.base.errors import UserError
from smalti.evals.reader.flags import Applied, Line, apply_flags, default_path, line_of, list_version, read_flags
from smalti.evals.reader.order import ordered
from smalti.evals.reader.scores import TaskScores, task_scores
from smalti.evals.samples import Results, Sample, find_folder, of_task, paired, read_results


@dataclass(frozen=True)
class Reading:
    """Results, those of a second model, and a list of flags with the lines that are to be appended to it."""

    results: Results
    other: Results | None
    flags_path: Path
    lines: Sequence[Line]

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the models, which differ."""
        if self.other is None:
            return (self.results.model,)
        both = (self.results, self.other)
        alike = self.results.model == self.other.model
        return tuple(f"{results.model} ({results.folder})" if alike else results.model for results in both)

    @cached_property
    def applied(self) -> Applied:
        """The flags that hold for the samples."""
        return apply_flags(self.lines, self.results.samples)

    @cached_property
    def scores(self) -> list[TaskScores]:
        """The scores of the model, averages of the Gauntlet last."""
        return self._scores(self.results, self.results.samples)

    @cached_property
    def other_scores(self) -> list[TaskScores]:
        """The scores of the second model, on the items that both have."""
        others = [sample.other for sample in self.results.samples if sample.other is not None]
        return [] if self.other is None else self._scores(self.other, others)

    def _scores(self, results: Results, samples: Sequence[Sample]) -> list[TaskScores]:
        scores = task_scores(samples, self.applied.flags)
        gauntlet = results.about.get("gauntlet")
        if gauntlet is None or not gauntlet["scores"].keys() <= {score.task for score in scores}:
            return scores  # without some benchmarks, as with --task, there is no average
        from smalti.evals.reader.averages import average_scores

        return [*scores, *average_scores(gauntlet, [score for score in scores if score.task in gauntlet["scores"]])]

    def with_lines(self, lines: Sequence[Line]) -> "Reading":
        """Return the same with more lines at the end of the list."""
        return replace(self, lines=[*self.lines, *lines])

    def line(self, text: str, note: str) -> Line:
        """Return the line for ``TASK:ID=FLAG``; FLAG ``none`` removes. Raises UserError for an unknown item or flag."""
        name, _, flag = text.rpartition("=")
        sample = next((sample for sample in self.results.samples if sample.name == name), None)
        if sample is None:
            example = self.results.samples[0].name
            raise UserError(
                f"--flag {text}: there is no item '{name}'", allowed=f"TASK:ID=FLAG, such as {example}=ambiguous"
            )
        return line_of(sample, None if flag == "none" else flag, note)

    def to_json(self, order: str, limit: int) -> dict[str, Any]:
        """Return scores, flags and the first samples of an order as JSON values."""
        samples = ordered(self.results.samples, order)
        changed = list(self.applied.changed)
        return {
            "folder": str(self.results.folder),
            "model": self.results.model,
            "other": self.other and {"folder": str(self.other.folder), "model": self.other.model},
            "flags": {
                "file": str(self.flags_path),
                "version": list_version(self.flags_path),
                "applied": len(self.applied.flags),
                "changed": changed,
            },
            "scores": [score.to_json() for score in self.scores],
            "other_scores": [score.to_json() for score in self.other_scores],
            "sort": order,
            "n": len(samples),
            "samples": [self.sample_json(sample) for sample in samples[:limit]],
        }

    def sample_json(self, sample: Sample) -> dict[str, Any]:
        """Return a sample and its flag as JSON values, without the fields that it does not have."""
        flag = self.applied.flags.get(sample.name)
        values = {
            "task": sample.task,
            "index": sample.index,
            "id": sample.id,
            "digest": sample.digest,
            "cluster": sample.cluster,
            "category": sample.category or None,
            "prompt": sample.prompt,
            "choices": list(sample.choices),
            "continuation": sample.continuation,
            "gold": sample.gold,
            "answers": list(sample.answers),
            **_result(sample),
            "n_bytes": sample.n_bytes,
            "more": sample.more,
            "flag": flag and {"flag": flag.flag, "note": flag.note, "answers": list(flag.answers)},
            "other": sample.other and _present(_result(sample.other)),
        }
        return _present(values)


def read(run: str, *, other: str | None = None, task: str | None = None, flags: str | None = None) -> Reading:
    """Read the newest results of a run or folder, those of ``other`` on the same items, and the list of flags.

    ``flags``: absent, the run's ``evals/flags.jsonl``. Raises DataError where something is missing or does not match.
    """
    results = of_task(read_results(find_folder(run)), task)
    second = None
    if other is not None:
        second = of_task(read_results(find_folder(other, suite=results.suite)), task)
        results = paired(results, second)
    path = default_path(results.folder) if flags is None else Path(flags)
    return Reading(results, second, path, read_flags(path))


def _result(sample: Sample) -> dict[str, Any]:
    """Return what a model made of an item."""
    return {
        "choice": sample.choice,
        "answer": sample.answer,
        "parsed": sample.parsed,
        "unparsed": sample.unparsed,
        "truncated": sample.truncated,
        "correct": sample.correct,
        "probabilities": [round(value, 4) for value in sample.probabilities],
        "log_likelihoods": [round(value, 4) for value in sample.log_likelihoods],
        "confidence": _rounded(sample.confidence),
        "gold_probability": _rounded(sample.gold_probability),
        "nats": sample.nats,
        "bits_per_byte": _rounded(sample.bits_per_byte),
    }


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)


def _present(values: dict[str, Any]) -> dict[str, Any]:
    """Leave out what is absent, empty or, but for ``correct``, false."""
    absent: tuple[Any, ...] = (None, [], {})
    return {
        key: value for key, value in values.items() if key == "correct" or (value not in absent and value is not False)
    }
