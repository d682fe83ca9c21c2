"""What a build did with each document, and independent measures of it: own words, own hashes, all windows compared."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow.parquet as pq

from build_planted.document import tokens, words

U64 = npt.NDArray[np.uint64]
_FACTOR = np.uint64(0x9E3779B97F4A7C15)


@dataclass
class Outcome:
    """By ``source/id``."""

    drops: dict[str, dict[str, Any]] = field(default_factory=dict)
    kept: dict[str, str] = field(default_factory=dict)
    """Texts."""
    language: dict[str, str] = field(default_factory=dict)
    """What was identified, also of documents that were dropped."""
    before: dict[str, str] = field(default_factory=dict)
    """Texts of all documents that could be read, after cleaning and before anything is dropped, in order."""
    is_code: set[str] = field(default_factory=set)
    twice: list[str] = field(default_factory=list)
    """Documents that are both kept and dropped, or listed twice; and those in neither."""


def read(output: Path, annotated: Path, order: dict[str, tuple[str, str, int]]) -> Outcome:
    """Read the output of a build, and the texts that its second step left in the work folder.

    order: document -> source, file, and row of the file.
    """
    outcome = Outcome()
    for path in sorted((output / "drops").glob("*.parquet")):
        for row in pq.read_table(path).to_pylist():
            key = f"{row['source']}/{row['id']}"
            if key in outcome.drops:
                outcome.twice.append(key)
            outcome.drops[key] = row
    for path in sorted((output / "documents").rglob("*.parquet")):
        for row in pq.read_table(path, columns=["id", "source", "text"]).to_pylist():
            key = f"{row['source']}/{row['id']}"
            if key in outcome.kept or key in outcome.drops:
                outcome.twice.append(key)
            outcome.kept[key] = row["text"]
    rows: dict[str, tuple[str, str, str | None]] = {}
    for path in annotated.glob("*.parquet"):
        table = pq.read_table(path, columns=["id", "source", "text", "kind", "problem", "language"])
        for row in table.to_pylist():
            rows[f"{row['source']}/{row['id']}"] = (row["text"], row["kind"], row["problem"])
            outcome.language[f"{row['source']}/{row['id']}"] = row["language"]
    for key in sorted(rows, key=lambda key: _place(key, order)):
        text, kind, problem = rows[key]
        if problem is None:
            outcome.before[key] = text
        if kind == "code":
            outcome.is_code.add(key)
        if key not in outcome.kept and key not in outcome.drops:
            outcome.twice.append(key)
    return outcome


def _place(key: str, order: dict[str, tuple[str, str, int]]) -> tuple[str, str, int]:
    source, _, name = key.partition("/")
    return order.get(key, (source, name, 0))


def rule_of(outcome: Outcome, key: str) -> str | None:
    """Return the rule that dropped a document, or None."""
    row = outcome.drops.get(key)
    return None if row is None else str(row["rule"])


def is_last(outcome: Outcome, key: str) -> bool:
    """Whether a document came as far as the last step, which cuts repeats."""
    return key in outcome.kept or (rule_of(outcome, key) or "").startswith("repeats/")


def hashed(listed: Iterable[str], n: int = -1) -> U64:
    """Return a number for each word."""
    return np.fromiter((hash(word) & 0xFFFFFFFFFFFFFFFF for word in listed), np.uint64, n)


def windows(numbers: U64, width: int) -> U64:
    """Return the hash of every run of ``width`` numbers."""
    n = len(numbers) - width + 1
    if n <= 0:
        return np.empty(0, np.uint64)
    total = np.zeros(n, np.uint64)
    for offset in range(width):
        total = (total ^ (total >> np.uint64(29))) * _FACTOR + numbers[offset : offset + n]
    return total


def among(numbers: U64, wanted: U64) -> npt.NDArray[np.bool_]:
    """Return which numbers are in ``wanted``, which is sorted."""
    if not len(wanted):
        return np.zeros(len(numbers), np.bool_)
    return np.asarray(wanted[np.minimum(np.searchsorted(wanted, numbers), len(wanted) - 1)] == numbers)


def sharing(outcome: Outcome, items: Sequence[str], width: int) -> set[str]:
    """Return the documents that share ``width`` consecutive words with an item."""
    wanted = np.unique(np.concatenate([windows(hashed(words(item)), width) for item in items]))
    return {
        key for key, text in outcome.before.items() if bool(among(windows(hashed(words(text)), width), wanted).any())
    }


def cuts(outcome: Outcome, width: int) -> tuple[dict[str, Counter[str]], dict[str, Counter[str]]]:
    """Return the words that should be cut of each document, and those that were.

    A run of ``width`` words that came earlier, in the order of sources and names, is cut; source code is left out.
    """
    keys = [key for key in outcome.before if key not in outcome.is_code and is_last(outcome, key)]
    everything = [windows(hashed(tokens(outcome.before[key])), width) for key in keys]
    values, counts = np.unique(np.concatenate([np.empty(0, np.uint64), *everything]), return_counts=True)
    repeated = values[counts > 1]
    first_end: dict[int, tuple[int, int]] = {}
    expected: dict[str, Counter[str]] = {}
    actual: dict[str, Counter[str]] = {}
    for number, (key, hashes) in enumerate(zip(keys, everything, strict=True)):
        listed = tokens(outcome.before[key])
        cut = np.zeros(len(listed), np.bool_)
        for place in np.flatnonzero(among(hashes, repeated)).tolist():
            value = int(hashes[place])
            earlier = first_end.setdefault(value, (number, place + width))
            if earlier[0] < number or earlier[1] <= place:
                cut[place : place + width] = True
        if cut.any():
            expected[key] = Counter(word for word, is_cut in zip(listed, cut, strict=True) if is_cut)
        after = tokens(outcome.kept.get(key, ""))
        if len(after) != len(listed):
            actual[key] = Counter(listed) - Counter(after)
    return expected, actual


def by_text(outcome: Outcome) -> dict[str, list[str]]:
    """Return text -> documents that have it, for texts that several have."""
    groups: dict[str, list[str]] = defaultdict(list)
    for key, text in outcome.before.items():
        groups[text].append(key)
    return {text: keys for text, keys in groups.items() if len(keys) > 1}
