"""What sets runs apart: config, code and machine, curves at the same step and the same tokens, ends, evals.

Guarantees: each run is held against the first; a number that was measured comes with its noise where that is known
(``differences``); reads the run folders alone. A run of another version or kind is compared by its plain values.
"""

import re
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from smalti.base.errors import UserError
from smalti.config.identity import ABSENT, differing, rows_apart
from smalti.config.load import from_dict
from smalti.config.run import RunConfig
from smalti.config.show import flatten
from smalti.config.yaml_lines import inline
from smalti.track.compare.differences import Difference, of_curves, of_scores
from smalti.track.line_file import read_lines
from smalti.track.report.read import RunRecord, get
from smalti.track.report.worse import worse_in_stages

_COMMIT = re.compile("[0-9a-f]{40}")
_LOSS = "loss/train/total"
_END = (_LOSS, "time/token", "time/train", "throughput/tokens_per_sec", "throughput/device/mfu", "moe/load_imbalance")
_MEDIAN = ("throughput/tokens_per_sec", "throughput/device/mfu")
_TAIL_FRAC, _TAIL_STEPS, _BINS = 0.1, 40, 40
_ORIGIN = ("smalti", "git.commit", "git.dirty", "python", "platform", "machine", "cpu", "cpus_usable")
_AUTO = ("device", "ranks", "threads", "compile")


@dataclass(frozen=True)
class Table:
    """Measured numbers at one place: metric -> the difference of each later run to the first."""

    where: str
    rows: dict[str, list[Difference]]


@dataclass(frozen=True)
class Comparison:
    """What differs between runs; lists are in the order of ``names``, absent values are ``absent``."""

    names: list[str]
    folders: list[str]
    identity: dict[str, list[Any]]
    placement: dict[str, list[Any]]
    provenance: dict[str, list[Any]]
    measured: list[Table]
    evals: dict[str, dict[str, list[Difference]]]
    """Suite -> task -> difference of each later run to the first."""
    notes: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """A JSON object; differences stand under the name of the run that is held against the first."""
        later = self.names[1:]

        def of_runs(rows: Mapping[str, list[Any]]) -> dict[str, Any]:
            return {key: dict(zip(self.names, values, strict=True)) for key, values in rows.items()}

        def of_later(rows: Mapping[str, list[Difference]]) -> dict[str, Any]:
            return {
                key: {name: one.to_json() for name, one in zip(later, row, strict=True)} for key, row in rows.items()
            }

        return {
            "runs": dict(zip(self.names, self.folders, strict=True)),
            "against": self.names[0],
            "identity": of_runs(self.identity),
            "placement": of_runs(self.placement),
            "provenance": of_runs(self.provenance),
            "measured": [{"where": table.where, "metrics": of_later(table.rows)} for table in self.measured],
            "evals": {suite: of_later(tasks) for suite, tasks in self.evals.items()},
            "notes": self.notes,
        }


def compare(runs: Sequence[RunRecord]) -> Comparison:
    """Hold every run against the first."""
    same, other, notes = _configs(runs)
    measured = [table for table in (_at_step(runs), _at_tokens(runs), _at_end(runs)) if table is not None]
    names = labels(runs)
    apart = [{key for key, row in same.items() if row[index] != row[0]} for index in range(1, len(runs))]
    notes += [
        f"{name} is {names[0]} with another seed: what is called lower or higher there is the noise between seeds"
        for name, keys in zip(names[1:], apart, strict=True)
        if keys == {"seed"}
    ]
    notes += [f"{name}: {one.words()}" for name, run in zip(names, runs, strict=True) for one in worse_in_stages(run)]
    return Comparison(
        names=names,
        folders=[run.folder for run in runs],
        identity=same,
        placement=other,
        provenance=_provenance(runs),
        measured=measured,
        evals=_evals(runs),
        notes=notes,
    )


def labels(runs: Sequence[RunRecord]) -> list[str]:
    """The names of the runs; their folders where two have the same name."""
    names = [run.name for run in runs]
    return names if len(set(names)) == len(names) else [run.folder for run in runs]


def value_text(value: Any, *, longest: int) -> str:
    """A value of a config or of provenance on one line: ``-`` where absent, a commit by its first ten digits."""
    if value == ABSENT:
        return "-"
    text = value if isinstance(value, str) else inline(value)
    if _COMMIT.fullmatch(text):
        return text[:10]
    return text if len(text) <= longest else text[: longest - 3] + "..."


def tail_frac(steps: int) -> float:
    """The share at the end of so many steps that a loss is averaged over: a tenth, or 40 steps where that is more."""
    return min(1.0, max(_TAIL_FRAC, _TAIL_STEPS / max(steps, 1)))


def _configs(runs: Sequence[RunRecord]) -> tuple[dict[str, list[Any]], dict[str, list[Any]], list[str]]:
    """What differs in identity, in placement, and notes; ``name`` is left out, it heads the columns."""
    loaded, notes = [], []
    for run in runs:
        try:
            loaded.append(from_dict(RunConfig, run.config).config)
        except UserError as error:
            notes.append(f"{run.name}: config.yaml is not one of this version's 'smalti train': {error.message}")
    if notes:  # identity and placement cannot be told apart then
        found: tuple[dict[str, list[Any]], ...] = (rows_apart([flatten(run.config) for run in runs]), {})
    else:
        found = differing(loaded)
    same, other = ({key: row for key, row in rows.items() if key != "name"} for rows in found)
    of_history = [key for key in same if key.startswith("data.history")]
    for key in of_history:
        del same[key]
    if of_history:
        same["data.history"] = [_history(run) for run in runs]
    return same, other, notes


def _history(run: RunRecord) -> str:
    """The forks of a run: ``until step 100: 400step, lr 0.004``."""
    past = get(run.config, "data.history") or []
    told = [f"until step {one['at_step']}: {one['duration']}, lr {one['lr']:g}" for one in past]
    return "; ".join(told) or "no fork"


def _provenance(runs: Sequence[RunRecord]) -> dict[str, list[Any]]:
    rows = []
    for run in runs:
        found = {key: get(run.provenance, key) for key in _ORIGIN}
        found |= {f"packages.{name}": version for name, version in (run.provenance.get("packages") or {}).items()}
        found |= {key: run.of_events(key) for key in _AUTO}
        rows.append({key: value for key, value in found.items() if value is not None})
    return rows_apart(rows)


def _at_step(runs: Sequence[RunRecord]) -> Table | None:
    """The training loss up to the last step that all have, and held-out results at the last one that all measured."""
    if not all(run.rows for run in runs):
        return None
    step = min(int(run.rows[-1]["step"]) for run in runs)
    first = int(step * (1 - tail_frac(step))) + 1
    curves = [{s: v for s, v in zip(*run.series(_LOSS), strict=True) if first <= s <= step} for run in runs]
    rows = {_LOSS: [_same_places(curves[0], curve, "steps") for curve in curves[1:]]}
    for name in _held_out(runs):
        found = [dict(zip(*run.series(name), strict=True)) for run in runs]
        shared = [place for place in found[0] if place <= step and all(place in one for one in found)]
        if shared:
            at = max(shared)
            rows[f"{name} at step {at:.0f}"] = [Difference(found[0][at], one[at]) for one in found[1:]]
    return Table(f"at step {step} (loss: mean over steps {first} to {step})", rows)


def _at_tokens(runs: Sequence[RunRecord]) -> Table | None:
    """The training loss at the same number of tokens; None where the same step is the same number of tokens."""
    ends = [run.last("time/token") for run in runs]
    if any(end is None for end in ends) or len({_tokens_a_step(run) for run in runs}) == 1:
        return None
    most = min(end for end in ends if end is not None)
    first = most * (1 - tail_frac(int(most / max(map(_tokens_a_step, runs)))))
    curves = [_curve(run) for run in runs]
    # No more spans than the run of the largest batch has steps there: a step in two spans would count as two.
    n_spans = max(1, min(_BINS, *(sum(first < tokens <= most for tokens, _ in curve) for curve in curves)))
    edges = [first + (most - first) * place / n_spans for place in range(n_spans + 1)]
    spans = [_over_tokens(curve, edges) for curve in curves]
    rows = {_LOSS: [_same_places(spans[0], after, "spans of tokens") for after in spans[1:]]}
    return Table(f"at {most:.4g} tokens (loss: mean over the tokens from {first:.4g} on)", rows)


def _at_end(runs: Sequence[RunRecord]) -> Table | None:
    rows = {}
    for name in (*_END, *_held_out(runs)):
        read: Callable[[RunRecord], float | None] = _end_of(name)
        found = [read(run) for run in runs]
        if any(value is not None for value in found):
            rows[name] = [Difference(found[0], one) for one in found[1:]]
    steps = ", ".join(str(run.rows[-1]["step"]) if run.rows else "-" for run in runs)
    return Table(f"at the end (steps {steps}; loss: mean of the last 5 %, speed: median)", rows) if rows else None


def _end_of(name: str) -> Callable[[RunRecord], float | None]:
    if name == _LOSS:
        return lambda run: run.tail_mean(name, frac=0.05)
    return (lambda run: run.median(name)) if name in _MEDIAN else (lambda run: run.last(name))


def _held_out(runs: Sequence[RunRecord]) -> list[str]:
    names = sorted({name for run in runs for name in run.names if name.startswith("metrics/eval/")})
    bits = [name for name in names if name.endswith("/bits_per_byte")]
    return bits or [name for name in names if name.endswith("/LanguageCrossEntropy")]


def _tokens_a_step(run: RunRecord) -> float:
    tokens, steps = run.last("time/token"), run.rows[-1]["step"] if run.rows else 0
    return round(tokens / steps, 3) if tokens and steps else 0.0


def _curve(run: RunRecord) -> list[tuple[float, float]]:
    """(tokens seen, loss) of the steps that have both."""
    pairs = ((row.get("time/token"), row.get(_LOSS)) for row in run.rows)
    return [(float(at), float(loss)) for at, loss in pairs if at is not None and loss is not None]


def _over_tokens(curve: Sequence[tuple[float, float]], edges: Sequence[float]) -> dict[float, float]:
    """Mean loss between neighbouring edges, in tokens; a step's loss counts for each token since the step before."""
    sums, weights = [0.0] * (len(edges) - 1), [0.0] * (len(edges) - 1)
    start = 0.0
    for end, loss in curve:
        for place in range(max(bisect_right(edges, start) - 1, 0), len(sums)):
            if edges[place] >= end:
                break
            overlap = min(end, edges[place + 1]) - max(start, edges[place])
            sums[place] += overlap * loss
            weights[place] += overlap
        start = end
    return {float(place): total / weights[place] for place, total in enumerate(sums) if weights[place] > 0}


def _same_places(before: Mapping[float, float], after: Mapping[float, float], what: str) -> Difference:
    shared = [place for place in before if place in after]
    return of_curves([before[place] for place in shared], [after[place] for place in shared], what=what)


def _evals(runs: Sequence[RunRecord]) -> dict[str, dict[str, list[Difference]]]:
    suites = dict.fromkeys(found.suite for run in runs for found in run.evals)
    result: dict[str, dict[str, list[Difference]]] = {}
    for suite in suites:
        scores = [next((one.tasks for one in run.evals if one.suite == suite), {}) for run in runs]
        asked = [_samples(run, suite) for run in runs]
        result[suite] = {
            task: [
                of_scores(scores[0].get(task, {}), score.get(task, {}), (asked[0].get(task, []), own.get(task, [])))
                for score, own in zip(scores[1:], asked[1:], strict=True)
            ]
            for task in dict.fromkeys(task for score in scores for task in score)
        }
    return result


def _samples(run: RunRecord, suite: str) -> dict[str, list[dict[str, Any]]]:
    """Every sample of the newest results, by task."""
    time = next((one.time for one in run.evals if one.suite == suite), None)
    by_task: dict[str, list[dict[str, Any]]] = {}
    if time is not None:
        for sample in read_lines(f"{run.folder}/evals/{suite}/{time}/samples.jsonl"):
            by_task.setdefault(str(sample.get("task", "")), []).append(sample)
    return by_task
