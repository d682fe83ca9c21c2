"""Compares runs with the first of them: config, code and machine, losses at the same step and tokens, ends, evals.

Only the run folders are read. A measured number comes with its noise where that is known (``differences``). A run of
another version or kind of training is compared by its plain config values.
"""

import re
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from smalti.base.errors import UserError
from smalti.config.identity import ABSENT, differing, differing_rows
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
_TAIL_FRAC = 0.1
_TAIL_STEPS = 40
_BINS = 40
_ORIGIN = ("smalti", "git.commit", "git.dirty", "python", "platform", "machine", "cpu", "cpus_usable")
_AUTO = ("device", "ranks", "threads", "compile")


@dataclass(frozen=True)
class Table:
    """Measured numbers at one point of the runs: metric -> difference of each later run from the first."""

    where: str
    rows: dict[str, list[Difference]]


@dataclass(frozen=True)
class Comparison:
    """The differences between runs; lists are in the order of ``names``, absent values are ``absent``."""

    names: list[str]
    folders: list[str]
    identity: dict[str, list[Any]]
    placement: dict[str, list[Any]]
    provenance: dict[str, list[Any]]
    measured: list[Table]
    evals: dict[str, dict[str, list[Difference]]]
    """Suite -> task -> difference of each later run from the first."""
    notes: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object; differences have the name of the later run as key."""
        later = self.names[1:]

        def of_runs(rows: Mapping[str, list[Any]]) -> dict[str, Any]:
            return {key: dict(zip(self.names, values, strict=True)) for key, values in rows.items()}

        def of_later(rows: Mapping[str, list[Difference]]) -> dict[str, Any]:
            return {
                key: {name: difference.to_json() for name, difference in zip(later, row, strict=True)}
                for key, row in rows.items()
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
    """Compare every run with the first."""
    identity, placement, notes = _configs(runs)
    measured = [table for table in (_at_step(runs), _at_tokens(runs), _at_end(runs)) if table is not None]
    names = labels(runs)
    differing_keys = [{key for key, row in identity.items() if row[index] != row[0]} for index in range(1, len(runs))]
    notes += [
        f"{name} is {names[0]} with another seed: what is called lower or higher there is the noise between seeds"
        for name, keys in zip(names[1:], differing_keys, strict=True)
        if keys == {"seed"}
    ]
    notes += _unequal_lengths(names, runs)
    notes += [
        f"{name}: {worse.words()}" for name, run in zip(names, runs, strict=True) for worse in worse_in_stages(run)
    ]
    return Comparison(
        names=names,
        folders=[run.folder for run in runs],
        identity=identity,
        placement=placement,
        provenance=_provenance(runs),
        measured=measured,
        evals=_evals(runs),
        notes=notes,
    )


def labels(runs: Sequence[RunRecord]) -> list[str]:
    """Return the names of the runs, or their folders where two have the same name."""
    names = [run.name for run in runs]
    return names if len(set(names)) == len(names) else [run.folder for run in runs]


def value_text(value: Any, *, longest: int) -> str:
    """Return a value of a config or of provenance on one line: ``-`` if absent, a commit as its first ten digits."""
    if value == ABSENT:
        return "-"
    text = value if isinstance(value, str) else inline(value)
    if _COMMIT.fullmatch(text):
        return text[:10]
    return text if len(text) <= longest else text[: longest - 3] + "..."


def tail_frac(steps: int) -> float:
    """Return the fraction of ``steps``, at their end, that a loss is averaged over: a tenth, but at least 40 steps."""
    return min(1.0, max(_TAIL_FRAC, _TAIL_STEPS / max(steps, 1)))


def _configs(runs: Sequence[RunRecord]) -> tuple[dict[str, list[Any]], dict[str, list[Any]], list[str]]:
    """Return the differences in identity and in placement, and notes. ``name`` is left out, as it heads the columns."""
    loaded = []
    notes = []
    for run in runs:
        try:
            loaded.append(from_dict(RunConfig, run.config).config)
        except UserError as error:
            notes.append(f"{run.name}: config.yaml is not one of this version's 'smalti train': {error.message}")
    if notes:  # without a valid config, identity and placement cannot be distinguished
        rows: tuple[dict[str, list[Any]], ...] = (differing_rows([flatten(run.config) for run in runs]), {})
    else:
        rows = differing(loaded)
    identity, placement = ({key: row for key, row in table.items() if key != "name"} for table in rows)
    of_history = [key for key in identity if key.startswith("data.history")]
    for key in of_history:
        del identity[key]
    if of_history:
        identity["data.history"] = [_history(run) for run in runs]
    return identity, placement, notes


def _history(run: RunRecord) -> str:
    """Return the forks of a run as text: ``until step 100: 400step, lr 0.004``."""
    history = get(run.config, "data.history") or []
    texts = [f"until step {past['at_step']}: {past['duration']}, lr {past['lr']:g}" for past in history]
    return "; ".join(texts) or "no fork"


def _provenance(runs: Sequence[RunRecord]) -> dict[str, list[Any]]:
    rows = []
    for run in runs:
        row = {key: get(run.provenance, key) for key in _ORIGIN}
        row |= {f"packages.{name}": version for name, version in (run.provenance.get("packages") or {}).items()}
        row |= {key: run.of_events(key) for key in _AUTO}
        rows.append({key: value for key, value in row.items() if value is not None})
    return differing_rows(rows)


def _at_step(runs: Sequence[RunRecord]) -> Table | None:
    """Compare the training loss up to the last step that all runs have, and each held-out result at the last step at
    which all measured it; None where a run has no step."""
    if not all(run.rows for run in runs):
        return None
    step = min(int(run.rows[-1]["step"]) for run in runs)
    first = int(step * (1 - tail_frac(step))) + 1
    curves = [{s: v for s, v in zip(*run.series(_LOSS), strict=True) if first <= s <= step} for run in runs]
    rows = {_LOSS: [_same_places(curves[0], curve, "steps") for curve in curves[1:]]}
    for name in _held_out(runs):
        results = [dict(zip(*run.series(name), strict=True)) for run in runs]
        shared = [at for at in results[0] if at <= step and all(at in result for result in results)]
        if shared:
            at = max(shared)
            rows[f"{name} at step {at:.0f}"] = [Difference(results[0][at], result[at]) for result in results[1:]]
    return Table(f"at step {step} (loss: mean over steps {first} to {step})", rows)


def _at_tokens(runs: Sequence[RunRecord]) -> Table | None:
    """Compare the training loss at the same number of tokens; None where equal steps are equal numbers of tokens."""
    ends = [run.last("time/token") for run in runs]
    if any(end is None for end in ends) or len({_tokens_a_step(run) for run in runs}) == 1:
        return None
    end_tokens = min(end for end in ends if end is not None)
    first = end_tokens * (1 - tail_frac(int(end_tokens / max(map(_tokens_a_step, runs)))))
    curves = [_curve(run) for run in runs]
    # No more spans than the run of the largest batch has steps there: a step in two spans would count as two.
    n_spans = max(1, min(_BINS, *(sum(first < tokens <= end_tokens for tokens, _ in curve) for curve in curves)))
    edges = [first + (end_tokens - first) * place / n_spans for place in range(n_spans + 1)]
    spans = [_over_tokens(curve, edges) for curve in curves]
    rows = {_LOSS: [_same_places(spans[0], after, "spans of tokens") for after in spans[1:]]}
    return Table(f"at {end_tokens:.4g} tokens (loss: mean over the tokens from {first:.4g} on)", rows)


def _at_end(runs: Sequence[RunRecord]) -> Table | None:
    rows = {}
    for name in (*_END, *_held_out(runs)):
        read: Callable[[RunRecord], float | None] = _end_of(name)
        values = [read(run) for run in runs]
        if any(value is not None for value in values):
            rows[name] = [Difference(values[0], value) for value in values[1:]]
    steps = ", ".join(str(run.rows[-1]["step"]) if run.rows else "-" for run in runs)
    where = "at the end" if all(run.state == "done" for run in runs) else "newest values"
    return Table(f"{where} (steps {steps}; loss: mean of the last 5 %, speed: median)", rows) if rows else None


def _unequal_lengths(names: Sequence[str], runs: Sequence[RunRecord]) -> list[str]:
    """Return notes of runs that have not ended, and of lengths that differ."""
    notes = [
        f"{name} is {run.state}: its newest values are compared, not those of its end"
        for name, run in zip(names, runs, strict=True)
        if run.rows and run.state != "done"
    ]
    steps = [int(run.rows[-1]["step"]) for run in runs if run.rows]
    if len(set(steps)) > 1:
        notes.append(
            "the runs have different numbers of steps: the tables at one step or number of tokens compare different "
            "parts of their learning rate schedules, the last table different amounts of training"
        )
    return notes


def _end_of(name: str) -> Callable[[RunRecord], float | None]:
    if name == _LOSS:
        return lambda run: run.tail_mean(name, frac=0.05)
    return (lambda run: run.median(name)) if name in _MEDIAN else (lambda run: run.last(name))


def _held_out(runs: Sequence[RunRecord]) -> list[str]:
    names = sorted({name for run in runs for name in run.names if name.startswith("metrics/eval/")})
    bits = [name for name in names if name.endswith("/bits_per_byte")]
    return bits or [name for name in names if name.endswith("/LanguageCrossEntropy")]


def _tokens_a_step(run: RunRecord) -> float:
    tokens = run.last("time/token")
    steps = run.rows[-1]["step"] if run.rows else 0
    return round(tokens / steps, 3) if tokens and steps else 0.0


def _curve(run: RunRecord) -> list[tuple[float, float]]:
    """Return (tokens seen, loss) of the steps that have both."""
    pairs = ((row.get("time/token"), row.get(_LOSS)) for row in run.rows)
    return [(float(at), float(loss)) for at, loss in pairs if at is not None and loss is not None]


def _over_tokens(curve: Sequence[tuple[float, float]], edges: Sequence[float]) -> dict[float, float]:
    """Return the mean loss of each span between neighbouring ``edges`` (tokens), by the span's number.

    The loss of a step counts once for each token since the step before.
    """
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
    suites = dict.fromkeys(results.suite for run in runs for results in run.evals)
    result: dict[str, dict[str, list[Difference]]] = {}
    for suite in suites:
        scores = [next((results.tasks for results in run.evals if results.suite == suite), {}) for run in runs]
        samples = [_samples(run, suite) for run in runs]
        result[suite] = {
            task: [
                of_scores(scores[0].get(task, {}), score.get(task, {}), (samples[0].get(task, []), after.get(task, [])))
                for score, after in zip(scores[1:], samples[1:], strict=True)
            ]
            for task in dict.fromkeys(task for score in scores for task in score)
        }
    return result


def _samples(run: RunRecord, suite: str) -> dict[str, list[dict[str, Any]]]:
    """Return all samples of the newest results of a suite, by task."""
    time = next((results.time for results in run.evals if results.suite == suite), None)
    by_task: dict[str, list[dict[str, Any]]] = {}
    if time is not None:
        for sample in read_lines(f"{run.folder}/evals/{suite}/{time}/samples.jsonl"):
            by_task.setdefault(str(sample.get("task", "")), []).append(sample)
    return by_task
