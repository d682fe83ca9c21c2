"""Planted documents: copies, edits and unrelated texts made from the corpus, sent through all stages, and scored.

Promises: the choice depends on the documents and the seed alone; what should be found is computed apart, from the
texts; planted documents never change what becomes of real ones (``buckets`` keeps them apart, and they come last in the
order of ``decide``). They go as far as the decision; nothing of them is written to the output.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
_MIN_WORDS, _MAX_WORDS = 5, 5000
_MAX_CHARS = 20 * _MAX_WORDS
_LONG_DOCUMENTS, _LONG_CHARS = 8, 4 << 20
_PORTION = 500
_UNRELATED_WORDS = 3
"""What is unrelated is so by runs of so many words: single words in another order are another text."""
_FACTS = [("key", pa.int64()), ("partner", pa.int64()), ("kind", pa.string()), ("partner_text", pa.large_string())]
_PLANTED_SCHEMA = pa.schema([*DOCUMENT_SCHEMA, *_FACTS])

Normalised = Callable[[list[str]], pa.Array]
"""The plan's own normalisation: the words of each text with single blanks between them."""


@dataclass(frozen=True)
class SelftestReport:
    """What became of the planted documents."""

    planted: dict[str, int]
    """Kind -> how many."""
    expected: int
    """Copies and edits that are near to their partner by the config, counted on their texts."""
    found: int
    """How many of these the run found."""
    wrong: int
    """Unrelated ones that were taken for near to something."""
    note: str | None = None

    @property
    def recall(self) -> float | None:
        """Found among expected; None when nothing was expected, so nothing was tested."""
        return self.found / self.expected if self.expected else None

    @property
    def precision(self) -> float:
        """Rightly found among all that were found."""
        return self.found / (self.found + self.wrong) if self.found + self.wrong else 1.0

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        counts = {"expected": self.expected, "found": self.found, "wrong": self.wrong}
        return {
            "planted": self.planted,
            **counts,
            "recall": self.recall,
            "precision": self.precision,
            "note": self.note,
        }


def plant(corpus: Corpus, config: DedupConfig, normalised: Normalised, path: Path) -> None:
    """Write the planted documents to ``path``; none where the corpus has no document that serves as a partner."""
    rng = np.random.default_rng(derive_key(config.seed, "dedup selftest"))
    partners = _partners(corpus, config.selftest_documents, normalised)
    pool = [word for _, _, words in partners for word in words[:200]]
    rows = []
    # Long documents are few: each serves once for each kind.
    is_long = any(len(text) > _MAX_CHARS for _, text, _ in partners)
    n_planted = min(config.selftest_documents, 4 * len(partners) if is_long else config.selftest_documents)
    for number in range(n_planted if partners else 0):
        key, text, words = partners[number % len(partners)]
        kind = KINDS[(0, 1, 1, 2)[(number // len(partners) if is_long else number) % 4]]
        other = partners[(number + len(partners) // 2) % len(partners)][2]
        made = text
        if kind != "copy":
            made = " ".join(edit(words, pool, rng) if kind == "edited" else _unrelated(words, other, rng))
        row = {"id": f"planted-{number}", "text": made, "group": "", "n_bytes": len(made.encode())}
        rows.append(row | {"key": PLANTED + number, "partner": key, "kind": kind, "partner_text": text})
    pq.write_table(pa.Table.from_pylist(rows, schema=_PLANTED_SCHEMA), path, row_group_size=max(len(rows), 1))


def planted_tasks(path: Path) -> list[Task]:
    """The tasks that read the planted documents; none when none were planted."""
    with pq.ParquetFile(path) as file:
        groups = [file.metadata.row_group(i) for i in range(file.metadata.num_row_groups)]
    n_rows = sum(group.num_rows for group in groups)
    assert len(groups) <= 1, "planted documents lie in one row group"
    return [Task(str(path), 0, PLANTED, "", False, groups[0].total_byte_size)] if n_rows else []


def edit(words: Sequence[str], pool: Sequence[str], rng: np.random.Generator) -> list[str]:
    """``words`` with 5 % of them (one at least) replaced, deleted, or followed by a new one, in equal shares."""
    pieces = [[word] for word in words]
    n_edits = max(1, round(EDITED_FRAC * len(words)))
    places = rng.choice(len(words), n_edits, replace=False).tolist()
    for place, what in zip(places, rng.integers(3, size=n_edits).tolist(), strict=True):
        new = pool[int(rng.integers(len(pool)))]
        pieces[place] = ([new], [], [words[place], new])[what]
    return [word for piece in pieces for word in piece]


def score(
    path: Path, config: DedupConfig, normalised: Normalised, compared: dict[int, str], equal: pa.Table, gone: pa.Table
) -> SelftestReport:
    """Hold what the run found against what the texts say.

    ``compared``: key -> the words that are compared instead of all, for documents where these are others. ``equal``
    (key, node; sorted by key) are the documents that share their words, ``gone`` those that go.
    """
    rows = pq.read_table(path).to_pylist()
    if not rows:
        nothing = f"NOTHING WAS TESTED: no document has {_MIN_WORDS} words or more"
        return SelftestReport(dict.fromkeys(KINDS, 0), 0, 0, 0, nothing)
    whole = [_normalised(normalised, [row[name] for row in rows]) for name in ("text", "partner_text")]
    same = [one == two for one, two in zip(*whole, strict=True)]
    sides = [
        [compared.get(row[key], words) for row, words in zip(rows, texts, strict=True)]
        for key, texts in zip(("key", "partner"), whole, strict=True)
    ]
    is_near = _are_near(sides, config, config.shingle_words)
    repeats = _are_near(sides, config, max(config.shingle_words, _UNRELATED_WORDS))
    node_of = _Nodes(equal)
    goners = set(gone.column("key").to_pylist())
    n_near = expected = hits = wrong = 0
    for row, should, equal_words, repeat in zip(rows, is_near, same, repeats, strict=True):
        # Of planted documents with the same words one stands for all, as it does among real ones.
        node, partner = node_of(row["key"]), node_of(row["partner"])
        goes = node < PLANTED or node in goners
        if row["kind"] == "unrelated":
            wrong += goes and not repeat  # a text that repeats itself is near to its own words in any order
        elif should or equal_words:
            n_near += 1
            if partner not in goners:  # what is near to a document that goes itself may rightly stay
                expected += 1
                hits += goes
    planted = {kind: sum(row["kind"] == kind for row in rows) for kind in KINDS}
    n = planted["copy"] + planted["edited"]
    note: str | None = None
    if not n_near:
        note = f"NOTHING WAS TESTED: none of {n} copies and 5 % edits is near by threshold={config.threshold}"
    elif not expected:
        note = "NOTHING WAS TESTED: every document that was copied goes itself"
    elif config.containment is None and n_near < 0.9 * n:
        note = f"only {n_near} of {n} copies and 5 % edits are near by threshold={config.threshold}"
    return SelftestReport(planted, expected, hits, wrong, note)


def check(config: DedupConfig, test: SelftestReport) -> None:
    """CheckFailed where too little was found, or too much."""
    if test.recall is not None and test.recall < config.selftest_recall:
        raise CheckFailed(
            f"the self-test found {test.found} of {test.expected} planted near-duplicates; nothing was written",
            allowed=f"a recall of selftest_recall={config.selftest_recall} or more",
            hint=f"propose more pairs: bands={2 * config.bands}, or rows={max(1, config.rows - 1)}",
        )
    if test.precision < config.selftest_precision:
        raise CheckFailed(
            f"the self-test took {test.wrong} unrelated planted documents for near; nothing was written",
            allowed=f"a precision of selftest_precision={config.selftest_precision} or more",
            hint="raise threshold or shingle_words: such documents share most of their shingles by chance",
        )


class _Nodes:
    """Key -> the key that stands for all with its words."""

    def __init__(self, equal: pa.Table) -> None:
        self._keys, self._nodes = (np.asarray(equal.column(name)) for name in ("key", "node"))

    def __call__(self, key: int) -> int:
        place = int(np.searchsorted(self._keys, key))
        return int(self._nodes[place]) if place < len(self._keys) and self._keys[place] == key else key


def _normalised(normalised: Normalised, texts: list[str]) -> list[str]:
    portions = [normalised(texts[at : at + _PORTION]) for at in range(0, len(texts), _PORTION)]
    return [text for portion in portions for text in portion.to_pylist()]


def _are_near(sides: list[list[str]], config: DedupConfig, shingle_words: int) -> list[bool]:
    found: list[bool] = []
    for at in range(0, len(sides[0]), _PORTION):
        texts = [pa.array(side[at : at + _PORTION], pa.large_string()) for side in sides]
        jaccard, containment = similarities(*shared(*(shingle_sets(text, shingle_words) for text in texts)))
        is_near = jaccard >= config.threshold
        if config.containment is not None:
            is_near |= containment >= config.containment
        found += is_near.tolist()
    return found


def _partners(corpus: Corpus, n_wanted: int, normalised: Normalised) -> list[tuple[int, str, list[str]]]:
    """Documents with their keys and words, evenly spaced in some evenly spaced row groups; long ones only where there
    are no others."""
    tasks = corpus.tasks()
    chosen = [tasks[i] for i in np.unique(np.linspace(0, len(tasks) - 1, _GROUPS).astype(int)).tolist()]
    found: list[tuple[int, str, list[str]]] = []
    long: list[tuple[int, str]] = []
    for task in chosen:
        texts = read_group(task.path, task.row_group, ["text"]).column("text")
        rows = np.unique(np.linspace(0, len(texts) - 1, 4 * n_wanted // len(chosen) + 1).astype(int)).tolist()
        some = [(task.first_key + row, texts[row].as_py()) for row in rows]
        short = [(key, text) for key, text in some if len(text) <= _MAX_CHARS]
        long += [(key, text) for key, text in some if _MAX_CHARS < len(text) <= _LONG_CHARS][:_LONG_DOCUMENTS]
        fit = [one for one in _with_words(short, normalised) if len(one[2]) >= _MIN_WORDS]
        found += fit[:: max(1, len(fit) * len(chosen) // n_wanted)]
    return found or _with_words(long[:_LONG_DOCUMENTS], normalised)


def _with_words(some: list[tuple[int, str]], normalised: Normalised) -> list[tuple[int, str, list[str]]]:
    words = normalised([text for _, text in some]).to_pylist() if some else []
    return [(key, text, line.split(" ")) for (key, text), line in zip(some, words, strict=True)]


def _unrelated(words: Sequence[str], other: Sequence[str], rng: np.random.Generator) -> list[str]:
    """``words`` in random order behind a little of ``other``: shared words and a shared beginning."""
    head = other[: min(len(words) // 5, len(other) // 2)]
    return [*head, *(words[i] for i in rng.permutation(len(words)).tolist())]
