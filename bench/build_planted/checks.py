"""Compares what a build did with the key of the plants, and every other removal with an independent measure."""

import random
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from build_planted.document import LANGUAGES, Document, head_of, is_prose, jaccard, label_of, shingles, words
from build_planted.outcome import Outcome, by_text, cuts, is_last, rule_of, sharing
from build_planted.personal import PLACEHOLDERS

THRESHOLD, WINDOW, PASSAGE = 0.65, 13, 50
"""Of near-duplicates, of the contamination check and of repeated passages: what the documentation says."""
_COMMON_LINE = 10
"""A line in so many documents is left out of a comparison that the whole texts do not explain."""
_MARGIN = 0.02
_DISTINCT_FRAC = 0.5
"""Of the runs of three words: a text with fewer is repetitive, a duplicate only of one with the same words in order."""

Key = list[dict[str, Any]]


@dataclass
class Row:
    """A line of the table. ``missed`` and ``wrong`` are documents, for reading."""

    name: str
    planted: int
    hits: int
    """Of the planted."""
    removed: int
    """All that were removed or changed for this reason, planted or not."""
    right: int
    """Of ``removed``: those for which an independent check says so."""
    bounds: tuple[float, float]
    unjudged: int = 0
    """Planted in documents that went for another stated reason first."""
    missed: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    @property
    def recall(self) -> float:
        """Share of the planted that were found."""
        return self.hits / self.planted if self.planted else 1.0

    @property
    def precision(self) -> float:
        """Share of the removed that should be."""
        return self.right / self.removed if self.removed else 1.0

    @property
    def is_within(self) -> bool:
        """Whether both are at their bounds or above."""
        return self.recall >= self.bounds[0] and self.precision >= self.bounds[1]

    def figures(self) -> dict[str, Any]:
        """Return plain values, with ten documents of each kind of error."""
        names = ("planted", "hits", "removed", "right", "unjudged", "recall", "precision", "is_within")
        errors = {"missed": self.missed[:10], "wrong": self.wrong[:10]}
        return {name: getattr(self, name) for name in names} | {"bound": list(self.bounds)} | errors


def table(outcome: Outcome, key: Key, documents: list[Document], items: list[str]) -> list[Row]:
    """Return a row for each kind of plant."""
    rows = [
        _exact(outcome, key),
        _near(outcome, key),
        _passages(outcome, key),
        *_personal(outcome, key),
        _contamination(outcome, key, items),
        _language(outcome, documents),
        *_files(outcome, key, {document.key: document for document in documents}),
    ]
    return rows


def _is_duplicate(rule: str | None) -> bool:
    return rule is not None and rule.startswith("dedup/")


def _pairs(outcome: Outcome, key: Key, plants: tuple[str, ...]) -> Iterator[tuple[dict[str, Any], bool | None]]:
    """Yield planted copies and whether they were found; None: one of the pair went for another stated reason."""
    for item in key:
        if item["plant"] not in plants:
            continue
        fates = [rule_of(outcome, item[name]) for name in ("id", "of")]
        if any(_is_duplicate(rule) for rule in fates):
            yield item, True
        else:
            yield item, None if any(rule is not None for rule in fates) else False


def _exact(outcome: Outcome, key: Key) -> Row:
    row = Row("exact duplicates", 0, 0, 0, 0, (1.0, 1.0))
    for item, is_found in _pairs(outcome, key, ("exact",)):
        if is_found is None:
            row.unjudged += 1
            continue
        row.planted += 1
        row.hits += is_found
        row.missed += [] if is_found else [item["id"]]
    for name, drop in outcome.drops.items():
        if drop["rule"] in ("dedup/exact", "dedup/same-words"):
            row.removed += 1
            text, other = outcome.before[name], outcome.before[drop["partner"]]
            is_right = text == other or (drop["rule"] != "dedup/exact" and _same_words(text, other))
            row.right += is_right
            row.wrong += [] if is_right else [name]
    for keys in by_text(outcome).values():
        copies = [name for name in keys if is_last(outcome, name)]
        if len(copies) > 1:
            row.planted += len(copies) - 1
            row.missed += copies[1:]
    return row


def _same_words(first: str, second: str) -> bool:
    """Whether all words are equal, or all that follow the head of source code."""
    return words(first) == words(second) or words(first[head_of(first) :]) == words(second[head_of(second) :])


def _near(outcome: Outcome, key: Key) -> Row:
    row = Row("near-duplicates", 0, 0, 0, 0, (0.99, 0.99))
    common = _common_lines(outcome)
    for item, is_found in _pairs(outcome, key, ("near",)):
        pair = [outcome.before.get(item[name], "") for name in ("id", "of")]
        if is_found is None or "" in pair:
            row.unjudged += 1
            continue
        cores = [_core(text, common) for text in pair]
        is_repetitive = any(len(shingles(text)) < _DISTINCT_FRAC * len(words(text)) for text in pair)
        if is_repetitive or min(jaccard(*map(shingles, texts)) for texts in (pair, cores)) < THRESHOLD + _MARGIN:
            row.unjudged += 1
            continue
        row.planted += 1
        row.hits += is_found
        row.missed += [] if is_found else [item["id"]]
    for name, drop in outcome.drops.items():
        if drop["rule"] != "dedup/near":
            continue
        row.removed += 1
        texts = [outcome.before[name], outcome.before[drop["partner"]]]
        bodies = [text[head_of(text) :] for text in texts]
        is_right = max(jaccard(*map(shingles, pair)) for pair in (texts, bodies)) >= THRESHOLD
        if not is_right:
            is_right = jaccard(*(shingles(_core(text, common)) for text in texts)) >= THRESHOLD - _MARGIN
        row.right += is_right
        row.wrong += [] if is_right else [f"{name} ~ {drop['partner']} ({drop['reason'][:20]})"]
    return row


def _core(text: str, common: frozenset[str]) -> str:
    """Leave out comments at the head, and lines that many documents share, such as navigation."""
    return "\n".join(line for line in text[head_of(text) :].split("\n") if line.strip() not in common)


def _common_lines(outcome: Outcome) -> frozenset[str]:
    counts: Counter[str] = Counter()
    for text in outcome.before.values():
        counts.update({line.strip() for line in text.split("\n")})
    return frozenset(line for line, count in counts.items() if count >= _COMMON_LINE)


def _passages(outcome: Outcome, key: Key) -> Row:
    row = Row("repeated passages", 0, 0, 0, 0, (0.99, 0.99))
    by_passage: dict[str, list[dict[str, Any]]] = {}
    for item in key:
        if item["plant"] == "passage":
            by_passage.setdefault(item["name"], []).append(item)
    for group in by_passage.values():
        inside = [item for item in group if _plain(item["passage"]) in _plain(outcome.before.get(item["id"], ""))]
        left = [item["id"] for item in inside if _plain(item["passage"]) in _plain(outcome.kept.get(item["id"], ""))]
        there = [item for item in inside if is_last(outcome, item["id"])]
        row.unjudged += len(group) - len(there)
        row.planted += max(len(there) - 1, 0)
        row.hits += min(len(there) - len(left), max(len(there) - 1, 0))
        row.missed += left[1:]
    expected, actual = cuts(outcome, PASSAGE)
    for name, words_cut in actual.items():
        n = words_cut.total()
        n_right = (words_cut & expected.get(name, Counter())).total()
        row.removed += n
        row.right += n_right
        row.wrong += [] if n == n_right else [f"{name}: {n - n_right} words"]
    short = {name: (count - actual.get(name, Counter())).total() for name, count in expected.items()}
    row.missed += [f"{name}: {n} words stay" for name, n in short.items() if n]
    return row


def _plain(text: str) -> str:
    return " ".join(text.split())


def _personal(outcome: Outcome, key: Key) -> list[Row]:
    rows = {kind: Row(f"personal data: {kind}", 0, 0, 0, 0, (0.98, 0.98)) for kind in PLACEHOLDERS}
    for item in key:
        if item["plant"] != "pii":
            continue
        text = outcome.kept.get(item["id"])
        for piece in item["pieces"]:
            match = re.search(rf"{piece['mark']}\n(.*?)\n{piece['mark']}", text or "", re.DOTALL)
            kind = piece["kind"]
            if match is None:
                if kind:
                    rows[kind].unjudged += 1
                continue
            is_right = _plain(match[1]) == _plain(piece["expected"])
            if kind:
                rows[kind].planted += 1
                rows[kind].hits += is_right
                rows[kind].missed += [] if is_right else [f"{item['id']}: {piece['text'][:80]!r} -> {match[1][:80]!r}"]
            for name, placeholder in PLACEHOLDERS.items():
                n = match[1].count(placeholder)
                rows[name].removed += n
                rows[name].right += n if is_right else 0
                rows[name].wrong += [f"{piece['text'][:80]!r} -> {match[1][:80]!r}"] if n and not is_right else []
    return list(rows.values())


def _contamination(outcome: Outcome, key: Key, items: list[str]) -> Row:
    row = Row("contamination", 0, 0, 0, 0, (0.99, 0.99))
    should = sharing(outcome, items, WINDOW)
    for item in key:
        if item["plant"] == "contaminated":
            rule = rule_of(outcome, item["id"])
            if rule not in (None, "decontaminate") and not _is_duplicate(rule):
                row.unjudged += 1
                continue
            row.planted += 1
            row.hits += rule == "decontaminate"
            row.missed += [] if rule == "decontaminate" else [item["id"]]
    for name, drop in outcome.drops.items():
        if drop["rule"] == "decontaminate":
            row.removed += 1
            row.right += name in should
            row.wrong += [] if name in should else [name]
    stay = [name for name in should if name in outcome.kept]
    row.planted += len(stay)
    row.missed += [f"{name} shares {WINDOW} words and is kept" for name in stay]
    return row


def _language(outcome: Outcome, documents: list[Document]) -> Row:
    """Whether the language that was identified is that of the package; lists and tables have none.

    Removed are documents said to be in a language that is not wanted.
    """
    row = Row("language", 0, 0, 0, 0, (0.97, 0.97))
    for document in documents:
        text = outcome.before.get(document.key)
        if document.language is None or text is None or document.kind == "code":
            continue
        label = label_of(document, text)
        language = outcome.language[document.key]
        if label not in LANGUAGES or is_prose(text, label):
            row.planted += 1
            row.hits += language == label
            row.missed += [] if language == label else [f"{document.key}: {language}"]
        else:
            row.unjudged += 1
        reason = outcome.drops.get(document.key, {}).get("reason", "")
        is_judged = label not in LANGUAGES or is_prose(text, label)
        if is_judged and reason.startswith("its language is ") and "not recognised" not in reason:
            row.removed += 1
            row.right += label not in LANGUAGES
            row.wrong += [] if label not in LANGUAGES else [f"{document.key}: {reason}"]
    return row


def unsure(outcome: Outcome, documents: list[Document]) -> dict[str, Any]:
    """Count running text in the wanted languages that goes for a low confidence, or without a language."""
    counts = {"documents": 0, "low_confidence": 0, "not_recognised": 0}
    examples: list[str] = []
    for document in documents:
        text = outcome.before.get(document.key)
        if text is None or document.kind == "code" or document.language not in LANGUAGES:
            continue
        if not is_prose(text, document.language):
            continue
        counts["documents"] += 1
        reason = outcome.drops.get(document.key, {}).get("reason", "")
        name = "low_confidence" if reason.startswith("confidence in") else "not_recognised"
        if reason.startswith(("confidence in", "its language is not")):
            counts[name] += 1
            examples.append(f"{document.key}: {reason}")
    return {**counts, "examples": random.Random(1).sample(examples, min(10, len(examples)))}


def _is_binary(document: Document | None) -> bool:
    """Whether a real file has null bytes, or is not UTF-8."""
    if document is None or document.place is None:
        return False
    data = document.place.read_bytes()
    try:
        return "\0" in data.decode()
    except UnicodeDecodeError:
        return True


def _files(outcome: Outcome, key: Key, real: dict[str, Document]) -> list[Row]:
    rows = []
    for name, plants in (
        ("broken files and rows", ("broken",)),
        ("bombs", ("bomb",)),
        ("names", ("name", "unnamable")),
    ):
        row = Row(name, 0, 0, 0, 0, (1.0, 1.0))
        expected = {}
        for item in key:
            if item["plant"] in plants:
                row.planted += 1
                match = [item["id"]] if "ends" not in item else [n for n in outcome.drops if n.endswith(item["ends"])]
                rule = rule_of(outcome, match[0]) if match else "nothing"
                if item["rule"] is None:
                    is_found = rule is None and item["id"] in outcome.kept
                else:
                    is_found = rule is not None and rule.startswith(item["rule"])
                    expected[match[0] if match else item["id"]] = item
                row.hits += is_found
                row.missed += [] if is_found else [f"{item['id']}: {rule}"]
        prefixes = {"broken": ("extract/file", "extract/record", "extract/encoding"), "bomb": ("extract/too-large",),
                    "name": ("extract/name",)}[plants[0]]  # fmt: skip
        for dropped, drop in outcome.drops.items():
            if drop["rule"] in prefixes:
                row.removed += 1
                is_right = dropped in expected or (drop["rule"] == "extract/encoding" and _is_binary(real.get(dropped)))
                row.right += is_right
                row.wrong += [] if is_right else [f"{dropped}: {drop['reason']}"]
        rows.append(row)
    return rows


def others(outcome: Outcome) -> dict[str, list[str]]:
    """Return rule -> some of the documents that a rule of quality dropped, for reading."""
    examples: dict[str, list[str]] = {}
    for name, drop in outcome.drops.items():
        if "/" in drop["rule"] and not drop["rule"].startswith(("dedup/", "extract/", "repeats/")):
            text = " ".join(outcome.before.get(name, "").split())
            examples.setdefault(drop["rule"], []).append(f"{name} ({drop['score']}): {text[:150]}")
    return examples
