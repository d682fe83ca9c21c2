"""Planted documents: copies, edits and unrelated texts made from the corpus, sent through the whole job, and scored.

Promises: the choice depends on the documents and the seed alone; what should be found is computed apart, from the
texts; planted documents never change what becomes of real ones (``buckets`` keeps them apart, ``decide`` never sees
them).
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from smalti.base.rng import derive_key
from smalti.config.dedup import DedupConfig
from smalti.data.curate.tables import DOCUMENT_SCHEMA
from smalti.data.dedup.buckets import PLANTED
from smalti.data.dedup.corpus import Corpus, Task, read_group
from smalti.data.dedup.shingles import shared, shingle_sets, similarities

EDITED_FRAC = 0.05
KINDS = ("copy", "edited", "unrelated")
_GROUPS = 8
_MIN_WORDS, _MAX_WORDS = 20, 5000
_FACTS = [("key", pa.int64()), ("partner", pa.int64()), ("kind", pa.string()), ("partner_text", pa.large_string())]
_PLANTED_SCHEMA = pa.schema([*DOCUMENT_SCHEMA, *_FACTS])


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
    def recall(self) -> float:
        """Found among expected."""
        return self.found / self.expected if self.expected else 1.0

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


def plant(corpus: Corpus, config: DedupConfig, path: Path) -> None:
    """Write the planted documents to ``path``; none where the corpus has no document that serves as a partner."""
    rng = np.random.default_rng(derive_key(config.seed, "dedup selftest"))
    partners = _partners(corpus, config.selftest_documents)
    pool = [word for _, text in partners for word in text.split()[:200]]
    rows = []
    for number in range(config.selftest_documents if partners else 0):
        key, text = partners[number % len(partners)]
        kind = KINDS[(0, 1, 1, 2)[number % 4]]
        other = partners[(number + len(partners) // 2) % len(partners)][1]
        made = text
        if kind != "copy":
            made = edit(text, pool, rng) if kind == "edited" else _unrelated(text, other, rng)
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


def edit(text: str, pool: Sequence[str], rng: np.random.Generator) -> str:
    """``text`` with 5 % of its words (one at least) replaced, deleted, or followed by a new one, in equal shares."""
    pieces = re.split(r"(\s+)", text)
    words = [place for place, piece in enumerate(pieces) if place % 2 == 0 and piece]
    n_edits = max(1, round(EDITED_FRAC * len(words)))
    for place, what in zip(
        rng.choice(words, n_edits, replace=False).tolist(), rng.integers(3, size=n_edits), strict=True
    ):
        new = pool[int(rng.integers(len(pool)))]
        pieces[place] = (new, "", f"{pieces[place]} {new}")[what]
    return "".join(pieces)


def score(
    path: Path,
    config: DedupConfig,
    normalised: Callable[[list[str]], pa.Array],
    node_of: dict[int, int],
    near: pa.Table,
) -> SelftestReport:
    """Hold what the run found against what the texts say.

    ``node_of`` gives the node of keys that share their words; ``near`` are the verified near pairs (a, b) with a
    planted b; ``normalised`` is the plan's own normalisation.
    """
    rows = pq.read_table(path).to_pylist()
    if not rows:
        nothing = f"no document has {_MIN_WORDS} to {_MAX_WORDS:,} words, so none was planted"
        return SelftestReport(dict.fromkeys(KINDS, 0), 0, 0, 0, nothing)
    width = config.shingle_words
    sets = [
        shingle_sets(normalised([row[name] for row in rows[at : at + 500]]), width)
        for name in ("text", "partner_text")
        for at in range(0, len(rows), 500)
    ]
    half = len(sets) // 2
    pairs = [similarities(*shared(one, two)) for one, two in zip(sets[:half], sets[half:], strict=True)]
    jaccard, containment = (np.concatenate([pair[side] for pair in pairs]) for side in (0, 1))
    is_near = jaccard >= config.threshold
    if config.containment is not None:
        is_near |= containment >= config.containment
    found = set(zip(near.column("b").to_pylist(), near.column("a").to_pylist(), strict=True))
    found_any = {key for key, _ in found} | {key for key, node in node_of.items() if key >= PLANTED > node}
    expected = hits = wrong = 0
    for row, should in zip(rows, is_near.tolist(), strict=True):
        partner = node_of.get(row["partner"], row["partner"])
        if row["kind"] == "unrelated":
            wrong += not should and row["key"] in found_any
        elif should:
            expected += 1
            # Of planted documents with the same words one stands for all, as it does among real ones.
            node = node_of.get(row["key"], row["key"])
            hits += node == partner or (node, partner) in found
    planted = {kind: sum(row["kind"] == kind for row in rows) for kind in KINDS}
    note: str | None = None
    if config.containment is None and expected < 0.9 * (planted["copy"] + planted["edited"]):
        n = planted["copy"] + planted["edited"]
        note = f"only {expected} of {n} copies and 5 % edits are near by threshold={config.threshold}"
    return SelftestReport(planted, expected, hits, wrong, note)


def _partners(corpus: Corpus, n_wanted: int) -> list[tuple[int, str]]:
    """Documents of fitting length with their keys, evenly spaced in some evenly spaced row groups."""
    tasks = corpus.tasks()
    chosen = [tasks[i] for i in np.unique(np.linspace(0, len(tasks) - 1, _GROUPS).astype(int)).tolist()]
    found: list[tuple[int, str]] = []
    for task in chosen:
        texts = read_group(task.path, task.row_group, ["text"]).column("text")
        rows = np.unique(np.linspace(0, len(texts) - 1, 4 * n_wanted // len(chosen) + 1).astype(int)).tolist()
        fit = [(task.first_key + row, text) for row in rows if _fits(text := texts[row].as_py())]
        found += fit[:: max(1, len(fit) * len(chosen) // n_wanted)]
    return found


def _fits(text: str) -> bool:
    return _MIN_WORDS <= len(text[: 20 * _MAX_WORDS].split()) <= _MAX_WORDS and len(text) < 20 * _MAX_WORDS


def _unrelated(text: str, other: str, rng: np.random.Generator) -> str:
    """The words of ``text`` in random order behind a little of ``other``: shared words and a shared beginning."""
    words = text.split()
    head = other.split()[: len(words) // 5]
    return " ".join([*head, *(words[i] for i in rng.permutation(len(words)))])
