"""Compares the results of two models task by task and average by average, paired by item.

Guarantees: both sides of a comparison have exactly the same items; with no true difference, any winner is named in at
most 5 % of comparisons (``statistics.paired``).
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from smalti.base.errors import DataError, UserError
from smalti.evals.gauntlet.table import BENCHMARKS, CORE
from smalti.evals.samples import Results, Sample, different, find_folder, pairs, read_results
from smalti.evals.statistics import paired
from smalti.evals.statistics.paired import Difference, Verdict

CORE_AVERAGE = "core_average"
_SETTINGS = ("seq_len", "overlap_tokens", "mode", "shots", "max_new_tokens", "sha256")
"""Keys of a task's score; ``seq_len`` is that of held-out text, ``sha256`` the digest of the task's file."""

Pair = tuple[Sample, Sample]
"""An item with the results of A and of B."""


@dataclass(frozen=True)
class Row:
    """The comparison of a task, or of an average of tasks."""

    name: str
    metric: str
    difference: Difference
    p: float
    """Corrected for the number of rows."""
    comparisons: int = 1
    """The number of rows."""
    higher_is_better: bool = True

    @property
    def verdict(self) -> Verdict:
        """The better model, where the difference exceeds the noise."""
        return self.difference.verdict(self.p, higher_is_better=self.higher_is_better)

    @property
    def detectable(self) -> float | None:
        """The smallest true difference for which a winner is named with 80 % power, if all rows were alike."""
        return self.difference.detectable(self.comparisons)

    def to_json(self) -> dict[str, Any]:
        """Return JSON values."""
        difference = self.difference
        return {
            "metric": self.metric,
            "a": difference.a,
            "b": difference.b,
            "difference": difference.value,
            "stderr": difference.stderr,
            "interval": difference.interval,
            "smallest_detectable_difference": self.detectable,
            "p": difference.p,
            "p_corrected": self.p,
            "verdict": self.verdict,
            "n": difference.n,
            "differing": difference.differing,
            "clusters": difference.clusters,
        }


@dataclass(frozen=True)
class Comparison:
    """All rows, and the tasks that only one model has."""

    a: Results
    b: Results
    rows: Sequence[Row]
    only_a: Sequence[str]
    only_b: Sequence[str]

    def to_json(self) -> dict[str, Any]:
        """Return JSON values; ``difference`` is B - A."""
        sides = {"a": self.a, "b": self.b}
        return {
            **{name: {"folder": str(side.folder), "model": side.model} for name, side in sides.items()},
            "level": paired.LEVEL,
            "comparisons": {row.name: row.to_json() for row in self.rows},
            "only_a": list(self.only_a),
            "only_b": list(self.only_b),
        }


def compare(a: str, b: str, *, suite: str | None = None, tasks: Sequence[str] = ()) -> Comparison:
    """Compare the newest results of two runs, or two folders of results, on the tasks that both have.

    ``suite``: results of this suite alone; None: the newest of A, and of the same suite for B where it has one.
    ``tasks``: these tasks alone. Raises DataError where the items of a shared task differ.
    """
    first = _read(a, suite, strict=suite is not None)
    second = _read(b, suite or first.suite, strict=suite is not None)
    if first.folder.resolve() == second.folder.resolve():
        raise UserError(
            f"A and B are the same results: {first.folder}",
            allowed="the results of two models",
            hint=f"smalti eval compare {a} OTHER   (other results of a run: RUN/evals/SUITE/TIME)",
        )
    samples = (_by_task(first), _by_task(second))
    shared = [task for task in samples[0] if task in samples[1] and (not tasks or task in tasks)]
    unknown = [task for task in tasks if task not in shared]
    if unknown or not shared:
        what = f"the task '{unknown[0]}' is not in both results" if unknown else "the results have no task in common"
        names = ", ".join(task for task in samples[0] if task in samples[1])
        raise DataError(what, allowed=names or f"A has {', '.join(samples[0])}; B has {', '.join(samples[1])}")
    for task in shared:
        _require_equal_settings(task, first, second)
    items = {task: _pairs(task, samples[0][task], samples[1][task]) for task in shared}
    texts = {task for task in shared if _is_text(items[task])}
    differences = {task: (_of_text if task in texts else _of_answers)(items[task]) for task in shared}
    differences |= _averages(first.about.get("gauntlet"), second.about.get("gauntlet"), differences)
    corrected = paired.holm([difference.p for difference in differences.values()])
    rows = [
        Row(
            name,
            _metric(items[name], _score(first, name)) if name in items else "average above chance",
            difference,
            p,
            comparisons=len(differences),
            higher_is_better=name not in texts and _score(first, name).get("higher_is_better") is not False,
        )
        for (name, difference), p in zip(differences.items(), corrected, strict=True)
    ]
    only = [[task for task in mine if task not in other] for mine, other in (samples, samples[::-1])]
    return Comparison(first, second, rows, *([] if tasks else each for each in only))


def _read(name: str, suite: str | None, *, strict: bool) -> Results:
    results = read_results(find_folder(name, suite=suite))
    if strict and results.suite != suite:
        raise DataError(
            f"'{name}' has no results of the suite '{suite}'",
            allowed=f"--suite {results.suite}",
            hint=f"smalti eval run {name} --suite {suite}",
        )
    return results


def _by_task(results: Results) -> dict[str, list[Sample]]:
    by_task: dict[str, list[Sample]] = {}
    for sample in results.samples:
        by_task.setdefault(sample.task, []).append(sample)
    return by_task


def _score(results: Results, task: str) -> Mapping[str, Any]:
    tasks = results.about.get("tasks")
    return (tasks.get(task) if isinstance(tasks, dict) else None) or {}


def _require_equal_settings(task: str, a: Results, b: Results) -> None:
    """Raise DataError where settings differ that a score depends on."""
    scores = [_score(results, task) for results in (a, b)]
    settings = [{key: score.get(key) for key in _SETTINGS} for score in scores]
    for results, score, values in zip((a, b), scores, settings, strict=True):
        values["a chat template"] = "chat" in score
        definition = {key: value for key, value in (score.get("task") or {}).items() if key not in ("file", "name")}
        values["the task"] = json.dumps(definition, sort_keys=True)
        if any(each.get("cut_frac") for each in scores):
            values["seq_len, with prompts that were cut"] = results.about.get("seq_len")
    for key, value in settings[0].items():
        if value != settings[1][key]:
            raise different(task, key, f"{value} and {settings[1][key]}")


def _is_text(pairs: Sequence[Pair]) -> bool:
    """Whether the samples are documents, with a likelihood in place of a grade."""
    return all(sample.correct is None and sample.score is None for pair in pairs for sample in pair)


def _metric(pairs: Sequence[Pair], score: Mapping[str, Any]) -> str:
    if _is_text(pairs):
        return "bits_per_byte"
    return str(score.get("metric", "score")) if any(x.score is not None for pair in pairs for x in pair) else "accuracy"


def _grade(sample: Sample) -> float:
    return float(bool(sample.correct)) if sample.score is None else sample.score


def _of_text(pairs: Sequence[Pair]) -> Difference:
    bits_a, bits_b = ([(sample.nats or 0.0) / math.log(2) for sample in side] for side in zip(*pairs, strict=True))
    return paired.of_ratios(bits_a, bits_b, [sample.n_bytes or 0 for sample, _ in pairs])


def _of_answers(pairs: Sequence[Pair]) -> Difference:
    """Compare accuracies, or other grades; those of categories have equal weights, as in the score of the task."""
    parts: dict[str, list[Pair]] = {}
    for pair in pairs:
        parts.setdefault(pair[0].category, []).append(pair)
    differences = [
        paired.of_items([_grade(x) for x, _ in part], [_grade(y) for _, y in part], _clusters(part))
        for part in parts.values()
    ]
    return differences[0] if len(differences) == 1 else paired.average(differences)


def _clusters(pairs: Sequence[Pair]) -> list[str | None] | None:
    names = [sample.cluster for sample, _ in pairs]
    return names if any(name is not None for name in names) else None


def _pairs(task: str, before: list[Sample], after: list[Sample]) -> list[Pair]:
    """Return the samples of both sides. Raises DataError where an item differs, or is on one side alone."""
    both = pairs(before, after)
    matched = {id(sample) for pair in both for sample in pair}
    for side, samples in (("B", before), ("A", after)):
        for sample in samples:
            if id(sample) not in matched:
                why = f"{side} does not have it: {len(before)} and {len(after)} items"
                raise different(task, f"item {sample.key}", why)
    for sample in (*before, *after):
        if sample.correct is None and sample.score is None and (sample.nats is None or sample.n_bytes is None):
            raise DataError(f"{task}: item {sample.key} has neither a grade nor a likelihood, so it cannot be compared")
    return both


def _averages(a: Any, b: Any, tasks: Mapping[str, Difference]) -> dict[str, Difference]:
    """Return the categories and the core average of the Gauntlet, where both results have them of the same tasks."""
    if not (isinstance(a, dict) and isinstance(b, dict)):
        return {}
    categories: dict[str, Difference] = {}
    for category in dict.fromkeys(benchmark.category for benchmark in BENCHMARKS):
        members = [benchmark for benchmark in BENCHMARKS if benchmark.category == category]
        names = [{name for name in side.get("scores", {}) if name in _names(members)} for side in (a, b)]
        present = [each for each in members if each.name in names[0]]
        baselines = [
            {each.name: side.get("baselines", {}).get(each.name, each.chance) for each in present} for side in (a, b)
        ]
        is_whole = all(category in side.get("categories", {}) for side in (a, b))
        if is_whole and names[0] == names[1] and baselines[0] == baselines[1] and names[0] <= tasks.keys():
            categories[category] = paired.average(
                [tasks[name].rescaled(baseline) for name, baseline in baselines[0].items()]
            )
    core = [categories[category] for category in CORE if category in categories]
    has_core = all(side.get(CORE_AVERAGE) and side[CORE_AVERAGE].get("n") == len(core) for side in (a, b))
    return {**categories, CORE_AVERAGE: paired.average(core)} if core and has_core else categories


def _names(benchmarks: Sequence[Any]) -> set[str]:
    return {benchmark.name for benchmark in benchmarks}
