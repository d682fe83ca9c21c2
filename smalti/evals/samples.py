"""Samples of one or two results folders, in one form for ranked, generated and held-out tasks.

Reads what ``evals.results`` writes. Fields that it does not know are shown as they are.
"""

import json
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from smalti.base import store
from smalti.base.errors import DataError
from smalti.base.hashing import digest_json
from smalti.track.line_file import read_lines
from smalti.track.run import resolve, runs_beside

_LEVELS = ("evals/*/*", ".", "*", "*/*")
"""Where results are in a run, a results folder, the folder of a suite and ``evals``."""
DIGEST_LENGTH = 16


@dataclass(frozen=True)
class Sample:
    """An item of a task with a model's result on it."""

    task: str
    index: int
    id: str | None
    prompt: str
    """The text before the answer; the beginning of the document where held-out text is scored."""
    choices: tuple[str, ...] = ()
    continuation: str | None = None
    """The text after each of the choices, where these are contexts."""
    gold: int | None = None
    choice: int | None = None
    log_likelihoods: tuple[float, ...] = ()
    """In nats, one for each choice."""
    gold_probability: float | None = None
    completion: str | None = None
    """The generated text; None for ranked tasks and held-out text."""
    parsed: str | None = None
    answers: tuple[str, ...] = ()
    """The accepted answers of a generation task."""
    truncated: bool = False
    unparsed: bool = False
    correct: bool | None = None
    score: float | None = None
    """The grade of an answer that is not right or wrong, such as F1."""
    cluster: str | None = None
    category: str = ""
    nats: float | None = None
    n_bytes: int | None = None
    more: dict[str, Any] = field(default_factory=dict)
    other: "Sample | None" = None
    """The same item with the result of the second model."""

    @property
    def key(self) -> str:
        """The id, or the index where there is no id."""
        return str(self.index) if self.id is None else self.id

    @property
    def name(self) -> str:
        """``TASK:KEY``, as ``--flag`` and the page's address take it."""
        return f"{self.task}:{self.key}"

    @property
    def answer(self) -> str | None:
        """The text of the preferred choice, or the generated text."""
        return self.completion if self.completion is not None else _at(self.choices, self.choice)

    @property
    def gold_answers(self) -> tuple[str, ...]:
        """The texts of the right answers."""
        right = _at(self.choices, self.gold)
        return self.answers if right is None else (right,)

    @cached_property
    def digest(self) -> str:
        """A digest of prompt, right answers and continuation, by which a flag knows its item again."""
        continuation = [] if self.continuation is None else [self.continuation]
        return digest_json([self.prompt, sorted(self.gold_answers), *continuation])[:DIGEST_LENGTH]

    @cached_property
    def probabilities(self) -> tuple[float, ...]:
        """The probability of each choice, scaled to sum to 1; of a single choice that of its text."""
        if not self.log_likelihoods:
            return ()
        best = max(self.log_likelihoods)
        weights = [math.exp(value - best) for value in self.log_likelihoods]
        return (math.exp(min(best, 0.0)),) if len(weights) == 1 else tuple(weight / sum(weights) for weight in weights)

    @property
    def confidence(self) -> float | None:
        """The probability of the preferred choice; None for a task without choices."""
        if len(self.probabilities) > 1 and self.choice is not None and 0 <= self.choice < len(self.probabilities):
            return self.probabilities[self.choice]
        return None

    @property
    def bits_per_byte(self) -> float | None:
        """Of held-out text."""
        return self.nats / math.log(2) / self.n_bytes if self.nats is not None and self.n_bytes else None


_KNOWN = {*(field.name for field in fields(Sample)), "candidates", "answer", "beginning", "n_tokens"} - {
    "more",
    "other",
}


@dataclass(frozen=True)
class Results:
    """A results folder: ``results.json`` and its samples in the order of the file."""

    folder: Path
    about: Mapping[str, Any]
    samples: Sequence[Sample]

    @property
    def suite(self) -> str:
        """The suite's name."""
        return str(self.about.get("suite") or self.folder.parent.name)

    @property
    def model(self) -> str:
        """The model's name, with its step where that is known."""
        name, step = str(self.about.get("model") or self.folder.name), self.about.get("step")
        return name if step is None else f"{name}, step {step:,}" if isinstance(step, int) else f"{name}, step {step}"


def find_folder(name: str, *, suite: str | None = None, runs: str = "runs") -> Path:
    """Return the newest results folder with samples of a run, of a folder with ``evals/``, or the folder itself.

    ``suite`` is preferred where a run has results of several. Raises DataError where there are no samples.
    """
    path = resolve(name, runs=runs)
    for level in _LEVELS:
        places = path.glob(level) if level != "." else [path]
        folders = [place for place in places if not place.name.startswith(".") and _has_samples(place)]
        if folders:
            of_suite = [folder for folder in folders if folder.parent.name == suite]
            return max(of_suite or folders, key=lambda folder: (folder.name, folder.parent.name))
    if not path.exists():
        raise DataError(
            f"there is no folder '{name}', and no run of that name in {runs}/",
            allowed="a run with evals/, or a folder that 'smalti eval run' wrote",
            hint=runs_beside(path),
        )
    raise DataError(
        f"there are no samples in {path}",
        allowed="a run with evals/, or a folder that 'smalti eval run' wrote",
        hint=f"smalti eval run {name}" + (" --output FOLDER" if (path / "config.json").is_file() else ""),
    )


def read_results(folder: Path) -> Results:
    """Read a results folder. Raises DataError where it has no samples."""
    about = store.read_json(folder / "results.json")
    samples = [_sample(line, number) for number, line in enumerate(read_lines(folder / "samples.jsonl"))]
    if not samples:
        raise DataError(f"{folder}/samples.jsonl has no samples", hint="run the evaluation again: smalti eval run")
    counts = Counter(sample.task for sample in samples)
    for task, score in (about.get("tasks") or {}).items() if isinstance(about, dict) else ():
        if isinstance(score.get("n"), int) and counts[task] < score["n"]:
            raise DataError(
                f"{folder}/samples.jsonl has {counts[task]} of the {score['n']} samples of {task}",
                allowed="the files as 'smalti eval run' wrote them",
                hint="copy the folder again, or run the evaluation again: smalti eval run",
            )
    uses = Counter(sample.name for sample in samples)
    samples = [replace(sample, id=None) if uses[sample.name] > 1 else sample for sample in samples]
    return Results(folder, about if isinstance(about, dict) else {}, samples)


def _has_samples(folder: Path) -> bool:
    return (folder / "samples.jsonl").is_file() and (folder / "results.json").is_file()


_PARTS: Mapping[str, Callable[[Sample], Any]] = {
    "its prompt is": lambda sample: sample.prompt,
    "its right answer is": lambda sample: sorted(sample.gold_answers),
    "its options are": lambda sample: (sample.choices, sample.continuation),
    "its size is": lambda sample: sample.n_bytes,
}
"""What must be equal in two results of an item."""


def of_task(results: Results, task: str | None) -> Results:
    """Return the results with the samples of one task alone; of all for None. Raises DataError for an unknown task."""
    if task is None:
        return results
    samples = [sample for sample in results.samples if sample.task == task]
    if not samples:
        tasks = ", ".join(dict.fromkeys(sample.task for sample in results.samples))
        raise DataError(f"{results.folder} has no samples of the task '{task}'", allowed=tasks)
    return replace(results, samples=samples)


def pairs(mine: Sequence[Sample], other: Sequence[Sample]) -> list[tuple[Sample, Sample]]:
    """Return the items that both have, in the order of ``mine``.

    Items of a task are matched by id where all samples of both have one, else by index. Raises DataError where matched
    items differ.
    """
    unnamed = {sample.task for sample in (*mine, *other) if sample.id is None}

    def place(sample: Sample) -> tuple[str, str | int]:
        return sample.task, sample.index if sample.task in unnamed else str(sample.id)

    by_place = {place(sample): sample for sample in other}
    both = [(sample, by_place[place(sample)]) for sample in mine if place(sample) in by_place]
    for sample, match in both:
        part = next((part for part, value in _PARTS.items() if value(match) != value(sample)), None)
        if part is not None:
            raise different(sample.task, f"item {sample.key}", f"{part} not the same")
    return both


def different(task: str, what: str, why: str) -> DataError:
    """Return the error of two results that cannot be compared."""
    return DataError(
        f"{task}: A and B differ in {what}: {why}",
        allowed="two results on the same items",
        hint="evaluate both models with the same suite, mode, shots, seed and limit; --task NAME shows other tasks",
    )


def paired(results: Results, other: Results) -> Results:
    """Return the results with ``other`` of each sample set to the same item of another model, where it has it.

    Raises DataError where matched items differ, and where no item is in both.
    """
    matches = {id(sample): match for sample, match in pairs(results.samples, other.samples)}
    if not matches:
        raise DataError(
            f"{results.folder} and {other.folder} have no item in common", allowed="two results on the same items"
        )
    return replace(results, samples=[replace(sample, other=matches.get(id(sample))) for sample in results.samples])


def _sample(line: Mapping[str, Any], number: int) -> Sample:
    choices = tuple(map(_text, _list(line.get("choices", line.get("candidates")))))
    log_likelihoods = tuple(_number(value, -math.inf) for value in _list(line.get("log_likelihoods")))
    name, cluster, correct = line.get("id"), line.get("cluster"), line.get("correct")
    index, n_bytes = line.get("index"), line.get("n_bytes")
    return Sample(
        task=_text(line.get("task", "")),
        index=index if isinstance(index, int) else number,
        id=None if name is None else _text(name),
        prompt=_text(line.get("prompt", line.get("beginning", ""))),
        choices=choices,
        continuation=None if line.get("continuation") is None else _text(line["continuation"]),
        gold=_whole(line.get("gold")),
        choice=_whole(line.get("choice")),
        log_likelihoods=log_likelihoods if any(map(math.isfinite, log_likelihoods)) else (),
        gold_probability=_number(line.get("gold_probability"), None),
        completion=_text(line["answer"]) if line.get("answer") is not None else None,
        parsed=None if line.get("parsed") is None else _text(line["parsed"]),
        answers=tuple(map(_text, _list(line.get("answers")))),
        truncated=bool(line.get("truncated")),
        unparsed="parsed" in line and line["parsed"] is None,
        correct=None if correct is None else bool(correct),
        score=_number(line.get("score"), None),
        cluster=None if cluster is None else _text(cluster),
        category=_text(line.get("category", "")),
        nats=_number(line.get("nats"), None),
        n_bytes=_whole(n_bytes),
        more={key: value for key, value in line.items() if key not in _KNOWN},
    )


def _at(texts: Sequence[str], index: int | None) -> str | None:
    return texts[index] if index is not None and 0 <= index < len(texts) else None


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [] if value is None else [value]


def _text(value: Any) -> str:
    """Return a text as it is, messages as their turns, and another value as JSON."""
    if isinstance(value, list) and all(isinstance(turn, dict) and "content" in turn for turn in value):
        return "\n\n".join(f"{turn.get('role', '')}: {turn['content']}" for turn in value)
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text.encode("utf-8", "replace").decode()  # lone surrogates cannot be written to files


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _number(value: Any, absent: Any) -> Any:
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else absent
