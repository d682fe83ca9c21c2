"""Checks a task's file for defects that change what its score means. Nothing is scored.

Tests against chance report an excess of more than 4.5 standard errors and 0.05, so that a set without defects has no
findings (none of 1,000 random sets of 120 rows had one).
"""

import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from smalti.base import store
from smalti.base.errors import DataError
from smalti.config.task import Kind, TaskConfig
from smalti.evals.graders.answers import normalized
from smalti.evals.rows import read_rows
from smalti.evals.tasks.items import NEEDED, Item, read_items

_LEAST_ROWS = 8
"""Fewer rows have no distribution to test."""
_STANDARD_ERRORS = 4.5
_LEAST_EXCESS = 0.05
_COMMON_ANSWER = 0.25
"""Share of rows from which one answer is too common, for kinds without options."""
_READING_SHARE = 0.25
"""Where the answer is in the prompt of more rows than this, the task is to find it there."""
_SEPARATORS = re.compile("[\v\f\x1c\x1d\x1e\x85\u2028\u2029]")


@dataclass(frozen=True)
class Finding:
    """A defect of a file, and the lines that have it (all lines of the file where it is one of the whole)."""

    file: str
    check: str
    message: str
    lines: tuple[int, ...]

    def row(self) -> dict[str, Any]:
        """Return it as plain values."""
        return {"file": self.file, "check": self.check, "message": self.message, "lines": list(self.lines)}


Check = Callable[[Sequence[Item], Kind], Iterator[tuple[str, str, Sequence[Item]]]]
"""Yields (name of the check, message, items) for each defect."""


def lint_file(path: str) -> list[Finding]:
    """Check a JSONL file whose columns have LLM Foundry's names; they decide the kind."""
    return lint_task(TaskConfig(kind=kind_of(path), file=path))


def lint_task(task: TaskConfig) -> list[Finding]:
    """Check the file of a task."""
    try:
        items = read_items(task)
    except DataError as error:
        if not store.exists(task.file):
            raise
        line = re.match(rf"{re.escape(task.file)}:(\d+): ", error.message)
        return [Finding(task.file, "bad row", error.message, (int(line[1]),) if line else ())]
    return [
        Finding(task.file, check, message, tuple(item.line for item in rows))
        for run_check in _CHECKS
        for check, message, rows in run_check(items, task.kind)
    ] + _line_separators(task.file)


def lint_results(tasks: Mapping[str, Mapping[str, Any]], file: str) -> list[Finding]:
    """Check the scores of a results file: tasks that the model solves, or does not begin to."""
    findings = []
    for name, score in tasks.items():
        if score.get("metric") != "accuracy" or not score["interval"]:
            continue
        low, high = score["interval"]
        if low > 0.95:
            message = f"{name}: the interval {low:.3f} to {high:.3f} is above 0.95: no room for a better model"
            findings.append(Finding(file, "ceiling", message, ()))
        elif low <= score["chance"]:
            message = f"{name}: the interval {low:.3f} to {high:.3f} is not above chance, {score['chance']:.3f}"
            findings.append(Finding(file, "floor", message, ()))
    return findings


def kind_of(path: str) -> Kind:
    """Return the kind of task that the columns of a file are for."""
    line, row = read_rows(path)[0]
    for kind in NEEDED:
        if set(NEEDED[kind].values()) <= set(row):
            return kind
    needed = "; ".join(f"{kind}: {', '.join(columns.values())}" for kind, columns in NEEDED.items())
    raise DataError(
        f"{path}:{line}: the columns {', '.join(row)} are those of no kind of task",
        allowed=needed,
        hint="give a task's YAML file, which names the columns",
    )


def _gold(items: Sequence[Item], kind: Kind) -> Iterator[tuple[str, str, Sequence[Item]]]:
    if kind == "ifeval":
        return
    if kind in ("exact", "generation"):
        answers = Counter((item.choices or item.answers)[0] for item in items)
        answer, count = answers.most_common(1)[0]
        if len(items) >= _LEAST_ROWS and count > max(1, _COMMON_ANSWER * len(items)):
            rows = [item for item in items if (item.choices or item.answers)[0] == answer]
            yield "skewed gold", f"{_share(count, items)} have the answer {answer[:40]!r}", rows
        return
    place, count = Counter(item.gold for item in items).most_common(1)[0]
    rows = [item for item in items if item.gold == place]
    if len(items) >= _LEAST_ROWS and count == len(items):
        yield "constant gold", f"the right option is always option {place}", rows
    elif _above_chance(count, items):
        chance = sum(1 / len(item.options) for item in items) / len(items)
        yield (
            "skewed gold",
            f"{_share(count, items)} have option {place} as the right one; chance is {chance:.3f}",
            rows,
        )


def _duplicates(items: Sequence[Item], kind: Kind) -> Iterator[tuple[str, str, Sequence[Item]]]:
    first: dict[tuple[object, ...], int] = {}
    copies = []
    for item in items:
        content = (item.contexts, tuple(sorted(item.choices)), item.answers)
        if first.setdefault(content, item.line) != item.line:
            copies.append(item)
    if copies:
        yield "duplicate", f"{_share(len(copies), items)} are copies of earlier ones", copies
    equal = [item for item in items if len(set(item.options)) < len(item.options)]
    if equal:
        yield "equal options", f"{_share(len(equal), items)} have an option twice", equal


def _empty(items: Sequence[Item], kind: Kind) -> Iterator[tuple[str, str, Sequence[Item]]]:
    blank = [item for item in items if any(not text.strip() for text in (*item.choices, *item.answers))]
    if blank:
        yield "empty answer", f"{_share(len(blank), items)} have an empty answer", blank
    if kind != "generation":
        return
    short = [item for item in items if len(item.answers[0]) == 1]
    if short:
        yield "one-character answer", f"{_share(len(short), items)}: longer answers begin with it", short
    labels = [item for item in items if any(text.strip() and not normalized(text) for text in item.answers)]
    if labels:
        message = f"{_share(len(labels), items)} have an answer that is empty without punctuation and articles"
        yield "empty label", message, labels


def _lengths(items: Sequence[Item], kind: Kind) -> Iterator[tuple[str, str, Sequence[Item]]]:
    if len({tuple(sorted(item.options)) for item in items}) == 1:
        return  # the options are labels
    for name, sign in (("longest", 1), ("shortest", -1)):
        extreme: dict[int, Item] = {}
        right = []
        for item in items:
            lengths = [sign * len(text) for text in item.options]
            if len(lengths) > 1 and lengths.count(max(lengths)) == 1:
                extreme[item.index] = item
                if lengths.index(max(lengths)) == item.gold:
                    right.append(item)
        if _above_chance(len(right), list(extreme.values())):
            yield "length", f"the {name} option is right in {len(right)} of {len(extreme)} rows that have one", right


def _in_prompt(items: Sequence[Item], kind: Kind) -> Iterator[tuple[str, str, Sequence[Item]]]:
    if kind in ("schema", "ifeval"):
        return
    if kind in ("exact", "generation"):
        rows = [item for item in items if _contains(item.prompt, (item.choices or item.answers)[0])]
        if rows and len(rows) <= _READING_SHARE * len(items):
            yield "answer in prompt", f"the prompts of {_share(len(rows), items)} contain the answer", rows
        return
    alone, right = [], []
    for item in items:
        places = [place for place, text in enumerate(item.choices) if _contains(item.prompt, text)]
        if len(places) == 1:
            alone.append(item)
            if places[0] == item.gold:
                right.append(item)
    if _above_chance(len(right), alone):
        message = f"one option is in the prompt of {len(alone)} rows; it is right in {len(right)} of them"
        yield "answer in prompt", message, right


def _line_separators(file: str) -> list[Finding]:
    """Some readers take other characters than a line feed for the end of a line (Python's splitlines)."""
    lines = store.read_bytes(file).decode().split("\n")
    numbers = tuple(number for number, line in enumerate(lines, 1) if _SEPARATORS.search(line))
    message = "characters inside a row that some readers take for the end of a line (U+2028, U+0085 ...)"
    return [Finding(file, "line separator", message, numbers)] if numbers else []


_CHECKS: tuple[Check, ...] = (_gold, _duplicates, _empty, _lengths, _in_prompt)


def _above_chance(count: int, items: Sequence[Item]) -> bool:
    """Whether ``count`` right answers of a rule are more than a random option's, by far."""
    if len(items) < _LEAST_ROWS:
        return False
    shares = [1 / len(item.options) for item in items]
    error = math.sqrt(sum(share * (1 - share) for share in shares))
    return count - sum(shares) > max(_STANDARD_ERRORS * error, _LEAST_EXCESS * len(items))


def _contains(prompt: str, text: str) -> bool:
    """Whether a text of at least four characters and a letter is in the prompt as whole words."""
    text = text.strip().lower()
    prompt = prompt.lower()
    if len(text) < 4 or text not in prompt or not re.search(r"[^\W\d_]", text):
        return False
    return re.search(rf"(?<!\w){re.escape(text)}(?!\w)", prompt) is not None


def _share(count: int, items: Sequence[Item]) -> str:
    return f"{count:,} of {len(items):,} rows"
