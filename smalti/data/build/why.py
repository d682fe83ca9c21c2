"""``smalti data why``: what a build did to one document, from its output and, where they are still there, its shards.

The output says what became of the document and why. The shards of its steps add the scores of all rules and the text
before each edit; they are used only if they are those of this build.
"""

import json
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset

from smalti.base.errors import DataError
from smalti.data.build.policy import LANGUAGE_RULE, QUALITY_RULE, RULES
from smalti.data.build.report import read_build, step_of
from smalti.data.build.semantic.drop import RULE
from smalti.data.build.shards import shards_digest
from smalti.data.prepare.dedup.decide import NEAR, NEAR_HELDOUT

_EDITS = 20
_CHARACTERS = 120
_PARTNERS = 10
_NAMES = 5
_LARGEST_DIFF = 4000


def why(folder: str, document: str, work: str | None = None) -> list[dict[str, Any]]:
    """Return what happened to each document that is named ``document`` (an id, or ``source/id``).

    Args:
        folder: The output of a build.
        work: The folder of the build's steps, if the recipe named one.

    Raises:
        DataError: ``folder`` is no output of a build, or has no such document.
    """
    record = read_build(folder)
    if "build" not in record:
        raise DataError(f"{folder} was not written by 'smalti data build'", hint="only builds record what they did")
    name = record["name"]
    steps = Path(work, name) if work else Path(folder).absolute().parent / f".{name}.steps"
    rows = list(_rows_of(folder, document))
    if not rows:
        raise DataError(f"{folder} has no document '{document}'", hint=_similar(folder, document))
    return [_fate(folder, row, record, _shard_rows(steps, record, row)) for row in rows]


def _fate(folder: str, row: dict[str, Any], record: dict[str, Any], shards: dict[str, Any] | None) -> dict[str, Any]:
    text = row.pop("text", None)
    fate: dict[str, Any] = dict(row)
    if not row["kept"]:
        fate |= {"step": step_of(row["rule"]), "limit": _limit(row["rule"], record)}
        fate["partners"] = _partners(folder, row["partner"])
    else:
        fate["kept_instead_of"] = _losers(folder, f"{row['source']}/{row['id']}")
    fate["measured"] = None
    if shards is not None and shards["annotated"]["problem"] is None:
        annotated, extracted = shards["annotated"], shards["extracted"]
        fate["measured"] = {
            **{name: annotated[name] for name in ("kind", "encoding", "part", "n_raw_bytes", "language")},
            **{name: annotated[name] for name in ("language_score", "evaluation", "quality")},
            "pii": dict(Counter(span[2] for span in json.loads(annotated["pii"] or "[]"))),
            "rules": [
                {**score, **_limit(score["rule"], record), "passes": RULES[score["rule"]].passes(score["score"])}
                for score in annotated["scores"]
            ],
        }
        if extracted is not None:
            fate["edits"] = _edits(extracted["text"], annotated["text"] if text is None else text)
    return fate


def _limit(rule: str, record: dict[str, Any]) -> dict[str, float | None]:
    """Return the scores between which a rule keeps a document; None: no limit."""
    low, high, config = -math.inf, math.inf, record["config"]
    if rule in RULES:
        low, high = RULES[rule].low, RULES[rule].high
    elif rule in (LANGUAGE_RULE, QUALITY_RULE):
        low = float(config["min_language_score" if rule == LANGUAGE_RULE else "min_quality"])
    elif rule in (NEAR, NEAR_HELDOUT):
        high = float(config["near_threshold"])
    elif rule == RULE:
        high = float(record["semantic"]["threshold"])
    return {"low": None if math.isinf(low) else low, "high": None if math.isinf(high) else high}


def _rows_of(folder: str, document: str) -> Iterator[dict[str, Any]]:
    """Yield the rows of documents and drops with this name, ``kept`` and ``split`` added."""
    source, _, rest = document.partition("/")
    named = (pc.field("id") == document) | ((pc.field("source") == source) & (pc.field("id") == rest))
    for path in sorted(Path(folder, "documents").glob("*/*.parquet")):
        for row in _filtered([path], named):
            yield {**row, "kept": True, "split": path.stem}
    for path in sorted(Path(folder, "drops").glob("*.parquet")):
        for row in _filtered([path], named):
            yield {**row, "kept": False}


def _partners(folder: str, partner: str | None) -> list[dict[str, Any]]:
    """Return the document that is kept instead; if a later step dropped it, its partner, and so on."""
    chain: list[dict[str, Any]] = []
    while partner is not None and len(chain) < _PARTNERS:
        row = next(_rows_of(folder, partner), None)
        if row is None:
            break
        chain.append({name: row.get(name) for name in ("source", "id", "split", "kept", "rule", "reason", "score")})
        partner = row.get("partner")
    return chain


def _losers(folder: str, name: str) -> dict[str, Any]:
    """Return the number of documents that were dropped as duplicates of this one, and the first of them."""
    rows = _filtered(
        sorted(Path(folder, "drops").glob("*.parquet")), pc.field("partner") == name, ["id", "source", "rule"]
    )
    return {"documents": len(rows), "examples": rows[:_NAMES]}


def _shard_rows(steps: Path, record: dict[str, Any], row: dict[str, Any]) -> dict[str, Any] | None:
    """Return the rows of this document in the shards of the build, or None: they are gone or of another build."""
    annotated = sorted((steps / "annotated").glob("*.parquet"))
    if shards_digest(annotated) != record.get("shards_digest"):
        return None
    named = (pc.field("id") == row["id"]) & (pc.field("source") == row["source"])
    rows = _filtered(annotated, named)
    if len(rows) != 1:  # an id that is not unique, or a name that is not UTF-8
        return None
    extracted = _filtered(sorted((steps / "extracted").glob("*.parquet")), named, ["id", "text"])
    return {"annotated": rows[0], "extracted": extracted[0] if len(extracted) == 1 else None}


def _filtered(paths: Sequence[Path], rows: pc.Expression, columns: list[str] | None = None) -> list[dict[str, Any]]:
    if not paths:
        return []
    try:
        files = pa.dataset.dataset([str(path) for path in paths], format="parquet")
        matches: list[dict[str, Any]] = files.to_table(columns=columns, filter=rows).to_pylist()
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{paths[0].parent} cannot be read: {error}", hint="run 'smalti data build' again") from error
    return matches


def _similar(folder: str, document: str) -> str:
    paths = [*Path(folder, "documents").glob("*/*.parquet"), *Path(folder, "drops").glob("*.parquet")]
    inside = pc.match_substring(pc.field("id"), document)
    names = [f"{row['source']}/{row['id']}" for path in sorted(paths) for row in _filtered([path], inside)[:_NAMES]]
    if names:
        return f"ids that contain it: {', '.join(names[:_NAMES])}"
    return "an id is in the column id of documents/ and drops/; SOURCE/ID names it too"


def _edits(before: str, after: str) -> dict[str, Any]:
    """Return the lines that differ, without what both sides have at their ends, and how many differ."""
    first, second = before.split("\n"), after.split("\n")
    if max(len(first), len(second)) > _LARGEST_DIFF:  # the time of a comparison grows with the square
        same = next((i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), 0)
        first, second = first[same : same + _LARGEST_DIFF], second[same : same + _LARGEST_DIFF]
    changed = [
        _trimmed("\n".join(first[a:b]), "\n".join(second[c:d]))
        for tag, a, b, c, d in SequenceMatcher(None, first, second, autojunk=False).get_opcodes()
        if tag != "equal"
    ]
    sizes = {"bytes_before": len(before.encode()), "bytes_after": len(after.encode())}
    return {**sizes, "changes": len(changed), "examples": changed[:_EDITS]}


def _trimmed(before: str, after: str) -> dict[str, str]:
    start = 0
    while start < min(len(before), len(after)) and before[start] == after[start]:
        start += 1
    end = 0
    while end < min(len(before), len(after)) - start and before[-1 - end] == after[-1 - end]:
        end += 1
    before, after = before[start : len(before) - end], after[start : len(after) - end]
    return {"before": before[:_CHARACTERS], "after": after[:_CHARACTERS]}
