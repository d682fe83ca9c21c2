"""The self-test: plants copies, edits and unrelated texts made from the corpus, and measures how many are found.

Planted documents pass all stages up to the decision. They depend on the documents and the seed only and never change
the result for real documents (``buckets`` separates them, and they come last in the order of ``decide``). What should
be found is computed separately, from the texts.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from smalti.base.errors import CheckFailed
from smalti.base.rng import derive_key
from smalti.config.dedup import DedupConfig
from smalti.data.documents.parquet import DOCUMENT_SCHEMA
from smalti.data.prepare.dedup.buckets import PLANTED
from smalti.data.prepare.dedup.corpus import Corpus, Task, read_group
from smalti.data.prepare.dedup.shingles import shared, shingle_sets, similarities

EDITED_FRAC = 0.05
KINDS = ("copy", "edited", "unrelated")
_GROUPS = 8
_MIN_WORDS = 5
_MAX_WORDS = 5000
_MAX_CHARS = 20 * _MAX_WORDS
_LONG_DOCUMENTS = 8
_LONG_CHARS = 4 << 20
_PORTION = 500
_UNRELATED_WORDS = 3
"""Minimum words of the shingles by which a text counts as unrelated: equal words in another order are another text."""
_FACTS = [("key", pa.int64()), ("partner", pa.int64()), ("kind", pa.string()), ("partner_text", pa.large_string())]
_PLANTED_SCHEMA = pa.schema([*DOCUMENT_SCHEMA, *_FACTS])

Normalised = Callable[[list[str]], pa.Array]
"""The normalisation of ``Queries``: returns the words of each text, joined by single blanks."""


@dataclass(frozen=True)
class SelftestReport:
    """The result of the self-test."""

    planted: dict[str, int]
    """Kind -> number of planted documents."""
    expected: int
    """Copies and edits that are near to their partner by the config, computed from their texts."""
    detected: int
    """Copies and edits among these that the run dropped."""
    wrong: int
    """Unrelated documents that the run considered near to another."""
    note: str | None = None

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> Self:
        """Return the report of a ``record``."""
        return cls(record["planted"], record["expected"], record["found"], record["wrong"], record["note"])

    def record(self) -> dict[str, Any]:
        """Return the fields as plain values, from which ``of`` restores the report."""
        return {
            "planted": self.planted,
            "expected": self.expected,
            "found": self.detected,
            "wrong": self.wrong,
            "note": self.note,
        }

    @property
    def recall(self) -> float | None:
        """``detected / expected``; None if nothing was expected, so that nothing was tested."""
        return self.detected / self.expected if self.expected else None

    @property
    def precision(self) -> float:
        """``detected / (detected + wrong)``."""
        return self.detected / (self.detected + self.wrong) if self.detected + self.wrong else 1.0

    def as_json(self) -> dict[str, Any]:
        """Convert to plain values."""
        counts = {"expected": self.expected, "found": self.detected, "wrong": self.wrong}
        return {
            "planted": self.planted,
            **counts,
            "recall": self.recall,
            "precision": self.precision,
            "note": self.note,
        }


def plant(corpus: Corpus, config: DedupConfig, normalised: Normalised, path: Path) -> None:
    """Write the planted documents to ``path``; none if no document of the corpus can serve as a partner."""
    rng = np.random.default_rng(derive_key(config.seed, "dedup selftest"))
    partners = _partners(corpus, config.selftest_documents, normalised)
    pool = [word for _, _, words in partners for word in words[:200]]
    rows = []
    # There are few long documents: each is used once for each kind.
    is_long = any(len(text) > _MAX_CHARS for _, text, _ in partners)
    n_planted = min(config.selftest_documents, 4 * len(partners) if is_long else config.selftest_documents)
    for number in range(n_planted if partners else 0):
        key, text, words = partners[number % len(partners)]
        kind = KINDS[(0, 1, 1, 2)[(number // len(partners) if is_long else number) % 4]]
        other = partners[(number + len(partners) // 2) % len(partners)][2]
        planted = text
        if kind != "copy":
            planted = " ".join(edit(words, pool, rng) if kind == "edited" else _unrelated(words, other, rng))
        row = {"id": f"planted-{number}", "text": planted, "group": "", "n_bytes": len(planted.encode())}
        rows.append(row | {"key": PLANTED + number, "partner": key, "kind": kind, "partner_text": text})
    pq.write_table(pa.Table.from_pylist(rows, schema=_PLANTED_SCHEMA), path, row_group_size=max(len(rows), 1))


def planted_tasks(path: Path) -> list[Task]:
    """Return the tasks that read the planted documents; empty if there are none."""
    with pq.ParquetFile(path) as file:
        groups = [file.metadata.row_group(i) for i in range(file.metadata.num_row_groups)]
    n_rows = sum(group.num_rows for group in groups)
    assert len(groups) <= 1, "planted documents are in one row group"
    return [Task(str(path), 0, PLANTED, "", False, groups[0].total_byte_size)] if n_rows else []


def edit(words: Sequence[str], pool: Sequence[str], rng: np.random.Generator) -> list[str]:
    """Replace, delete, or insert a word after 5 % of ``words`` (at least one), in equal shares."""
    pieces = [[word] for word in words]
    n_edits = max(1, round(EDITED_FRAC * len(words)))
    places = rng.choice(len(words), n_edits, replace=False).tolist()
    for place, what in zip(places, rng.integers(3, size=n_edits).tolist(), strict=True):
        new = pool[int(rng.integers(len(pool)))]
        pieces[place] = ([new], [], [words[place], new])[what]
    return [word for piece in pieces for word in piece]


def score(
    path: Path,
    config: DedupConfig,
    normalised: Normalised,
    compared: dict[int, str],
    equal: pa.Table,
    dropped: pa.Table,
) -> SelftestReport:
    """Compare the result of the run with the planted texts.

    ``compared``: key -> the words that are compared, for documents where they are not all words. ``equal`` (key, node;
    sorted by key): the documents with equal words. ``dropped``: the dropped documents.
    """
    rows = pq.read_table(path).to_pylist()
    if not rows:
        nothing = f"NOTHING WAS TESTED: no document has {_MIN_WORDS} words or more"
        return SelftestReport(dict.fromkeys(KINDS, 0), 0, 0, 0, nothing)
    whole = [_normalised(normalised, [row[name] for row in rows]) for name in ("text", "partner_text")]
    same = [text == partner for text, partner in zip(*whole, strict=True)]
    sides = [
        [compared.get(row[key], words) for row, words in zip(rows, texts, strict=True)]
        for key, texts in zip(("key", "partner"), whole, strict=True)
    ]
    is_near = _are_near(sides, config, config.shingle_words)
    repeats = _are_near(sides, config, max(config.shingle_words, _UNRELATED_WORDS))
    node_of = _Nodes(equal)
    dropped_keys = set(dropped.column("key").to_pylist())
    n_near = expected = hits = wrong = 0
    for row, should, equal_words, repeat in zip(rows, is_near, same, repeats, strict=True):
        # Of planted documents with the same words one is the node of all, as for real documents.
        node = node_of(row["key"])
        partner = node_of(row["partner"])
        is_dropped = node < PLANTED or node in dropped_keys
        if row["kind"] == "unrelated":
            wrong += is_dropped and not repeat  # a repetitive text is near to its words in any order
        elif should or equal_words:
            n_near += 1
            if partner not in dropped_keys:  # a document whose partner is dropped may rightly be kept
                expected += 1
                hits += is_dropped
    planted = {kind: sum(row["kind"] == kind for row in rows) for kind in KINDS}
    n = planted["copy"] + planted["edited"]
    note: str | None = None
    if not n_near:
        note = f"NOTHING WAS TESTED: none of {n} copies and 5 % edits is near by threshold={config.threshold}"
    elif not expected:
        note = "NOTHING WAS TESTED: every document that was copied is dropped itself"
    elif config.containment is None and n_near < 0.9 * n:
        note = f"only {n_near} of {n} copies and 5 % edits are near by threshold={config.threshold}"
    return SelftestReport(planted, expected, hits, wrong, note)


def check(config: DedupConfig, test: SelftestReport) -> None:
    """Raise CheckFailed if recall or precision is below its bound."""
    if test.recall is not None and test.recall < config.selftest_recall:
        raise CheckFailed(
            f"the self-test found {test.detected} of {test.expected} planted near-duplicates; nothing was written",
            allowed=f"a recall of selftest_recall={config.selftest_recall} or more",
            hint=f"propose more pairs: bands={2 * config.bands}, or rows={max(1, config.rows - 1)}",
        )
    if test.precision < config.selftest_precision:
        raise CheckFailed(
            f"the self-test found {test.wrong} unrelated planted documents to be near; nothing was written",
            allowed=f"a precision of selftest_precision={config.selftest_precision} or more",
            hint="raise threshold or shingle_words: such documents share most of their shingles by chance",
        )


class _Nodes:
    """Maps a key to the node of the documents with its words."""

    def __init__(self, equal: pa.Table) -> None:
        self._keys, self._nodes = (np.asarray(equal.column(name)) for name in ("key", "node"))

    def __call__(self, key: int) -> int:
        place = int(np.searchsorted(self._keys, key))
        return int(self._nodes[place]) if place < len(self._keys) and self._keys[place] == key else key


def _normalised(normalised: Normalised, texts: list[str]) -> list[str]:
    portions = [normalised(texts[start : start + _PORTION]) for start in range(0, len(texts), _PORTION)]
    return [text for portion in portions for text in portion.to_pylist()]


def _are_near(sides: list[list[str]], config: DedupConfig, shingle_words: int) -> list[bool]:
    result: list[bool] = []
    for start in range(0, len(sides[0]), _PORTION):
        texts = [pa.array(side[start : start + _PORTION], pa.large_string()) for side in sides]
        jaccard, containment = similarities(*shared(*(shingle_sets(text, shingle_words) for text in texts)))
        is_near = jaccard >= config.threshold
        if config.containment is not None:
            is_near |= containment >= config.containment
        result += is_near.tolist()
    return result


def _partners(corpus: Corpus, n_wanted: int, normalised: Normalised) -> list[tuple[int, str, list[str]]]:
    """Return documents (key, text, words), evenly spaced in evenly spaced row groups; long ones only if no others."""
    tasks = corpus.tasks()
    chosen = [tasks[i] for i in np.unique(np.linspace(0, len(tasks) - 1, _GROUPS).astype(int)).tolist()]
    partners: list[tuple[int, str, list[str]]] = []
    long: list[tuple[int, str]] = []
    for task in chosen:
        texts = read_group(task.path, task.row_group, ["text"]).column("text")
        rows = np.unique(np.linspace(0, len(texts) - 1, 4 * n_wanted // len(chosen) + 1).astype(int)).tolist()
        documents = [(task.first_key + row, texts[row].as_py()) for row in rows]
        short = [(key, text) for key, text in documents if len(text) <= _MAX_CHARS]
        long += [(key, text) for key, text in documents if _MAX_CHARS < len(text) <= _LONG_CHARS][:_LONG_DOCUMENTS]
        suitable = [document for document in _with_words(short, normalised) if len(document[2]) >= _MIN_WORDS]
        partners += suitable[:: max(1, len(suitable) * len(chosen) // n_wanted)]
    return partners or _with_words(long[:_LONG_DOCUMENTS], normalised)


def _with_words(documents: list[tuple[int, str]], normalised: Normalised) -> list[tuple[int, str, list[str]]]:
    words = normalised([text for _, text in documents]).to_pylist() if documents else []
    return [(key, text, line.split(" ")) for (key, text), line in zip(documents, words, strict=True)]


def _unrelated(words: Sequence[str], other: Sequence[str], rng: np.random.Generator) -> list[str]:
    """Return ``words`` in random order after some of ``other``, so that words and the beginning are shared."""
    head = other[: min(len(words) // 5, len(other) // 2)]
    return [*head, *(words[i] for i in rng.permutation(len(words)).tolist())]
