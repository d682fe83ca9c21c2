"""Examines one document: normalises it, assigns its split, applies the rules, hashes its text."""

import hashlib
from dataclasses import dataclass

import pyarrow as pa

from smalti.data.documents.heldout import split_of
from smalti.data.prepare.curate.normalize import normalize
from smalti.data.prepare.curate.rules.presets import presets_by_name
from smalti.data.prepare.curate.rules.rule import Preset, Verdict, judge

EXAMINED_SCHEMA = pa.schema(
    [
        ("id", pa.large_string()),
        ("group", pa.large_string()),
        ("split", pa.large_string()),
        ("text", pa.large_string()),
        ("n_raw_bytes", pa.int64()),
        ("rule", pa.large_string()),
        ("reason", pa.large_string()),
        ("score", pa.float64()),
        ("digest", pa.large_string()),
        ("numbers", pa.large_string()),
        ("part", pa.large_string()),
    ]
)
"""``rule`` is null for a kept document; the text of a dropped one is empty. ``digest``: BLAKE2b-128, hex."""

UNREADABLE_RULE = "read/unreadable"
EMPTY_RULE = "normalize/empty"
_DIGEST_BYTES = 16


@dataclass(frozen=True)
class Examination:
    """A function of record batches: a batch of ``readers.RAW_SCHEMA`` -> one of EXAMINED_SCHEMA, row for row."""

    rules: tuple[str, ...]
    normalize: bool
    seed: int
    heldout_frac: float

    def __call__(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        presets = presets_by_name(self.rules)
        columns: dict[str, list[object]] = {name: [] for name in EXAMINED_SCHEMA.names}
        for row in batch.to_pylist():
            raw = row["text"]
            verdict = self._verdict(raw, row["problem"], presets)
            text = verdict.text if verdict.rule is None else ""
            columns["id"].append(row["id"])
            columns["group"].append(row["group"])
            columns["split"].append(split_of(row["group"], seed=self.seed, heldout_frac=self.heldout_frac))
            columns["text"].append(text)
            columns["n_raw_bytes"].append(len(raw.encode()))
            columns["rule"].append(verdict.rule)
            columns["reason"].append(verdict.reason)
            columns["score"].append(verdict.score)
            columns["digest"].append(hashlib.blake2b(text.encode(), digest_size=_DIGEST_BYTES).hexdigest())
            columns["numbers"].append(row["numbers"])
            columns["part"].append(row["part"])
        arrays = [pa.array(columns[field.name], field.type) for field in EXAMINED_SCHEMA]
        return pa.RecordBatch.from_arrays(arrays, schema=EXAMINED_SCHEMA)

    def _verdict(self, raw: str, problem: str | None, presets: list[Preset]) -> Verdict:
        if problem is not None:
            return Verdict("", UNREADABLE_RULE, problem)
        text = normalize(raw) if self.normalize else raw
        if not text.strip():
            return Verdict("", EMPTY_RULE, "nothing is left of the text", 0.0)
        verdict = judge(text, presets)
        if verdict.rule is None and not verdict.text.strip():
            return Verdict("", EMPTY_RULE, "nothing is left of the text after edits", 0.0)
        return verdict
