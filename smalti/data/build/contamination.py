"""Decontamination: documents that share 13 consecutive words with an evaluation set.

The words and hashes are those of ``smalti eval contamination``: case, punctuation and layout do not matter.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from smalti.base.errors import DataError
from smalti.data.documents.files import find_files
from smalti.data.documents.rows import jsonl_rows, open_file, parquet_rows
from smalti.data.prepare.contamination.ngrams import LONG, U64, NgramSet, ngrams, normalised
from smalti.data.prepare.dedup.shingles import word_hashes

_TEXTS = 256


@dataclass(frozen=True)
class EvaluationNgrams:
    """The 13-grams of evaluation sets, and the set of each."""

    ngrams: NgramSet
    names: list[str]
    set_of: dict[int, int]
    """Hash -> number of the first set that has it."""

    @classmethod
    def load(cls, path: str) -> "EvaluationNgrams":
        """Read what ``write_ngrams`` wrote."""
        with np.load(path, allow_pickle=False) as stored:
            hashes, numbers, names = stored["hashes"], stored["numbers"], stored["names"].tolist()
        return cls(NgramSet(hashes), names, dict(zip(hashes.tolist(), numbers.tolist(), strict=True)))

    def found_in(self, texts: Sequence[str]) -> list[str | None]:
        """Return for each text an evaluation set that shares an n-gram with it, or None."""
        matches: list[str | None] = [None] * len(texts)
        for start in range(0, len(texts), _TEXTS):
            hashes, rows = self.ngrams.find(normalised(pa.array(texts[start : start + _TEXTS], pa.large_string())))
            for value, row in zip(hashes.tolist(), rows.tolist(), strict=True):
                if matches[start + row] is None:
                    matches[start + row] = self.names[self.set_of[value]]
        return matches


def write_ngrams(path: Path, sources: Sequence[str]) -> None:
    """Write the 13-grams of evaluation sets (files or folders). DataError if there is none in them."""
    hashes: list[U64] = []
    numbers: list[Any] = []
    for number, source in enumerate(sources):
        for texts in _batches(source):
            words, text_of_word = word_hashes(normalised(pa.array(texts, pa.large_string())))
            values, _ = ngrams(words, text_of_word)[1]
            hashes.append(values)
            numbers.append(np.full(len(values), number))
    if not sum(map(len, hashes)):
        raise DataError(
            f"decontaminate: {', '.join(sources)} has no text of {LONG} words or more",
            hint="name files whose text fields hold the questions and answers",
        )
    distinct, first = np.unique(np.concatenate(hashes), return_index=True)
    with open(path, "wb") as file:
        np.savez(file, hashes=distinct, numbers=np.concatenate(numbers)[first], names=np.array(list(sources)))


def _batches(source: str) -> Iterator[list[str]]:
    texts: list[str] = []
    for text in _texts(source):
        texts.append(text)
        if len(texts) == _TEXTS:
            yield texts
            texts = []
    if texts:
        yield texts


def _texts(source: str) -> Iterator[str]:
    for file in find_files(source).files:
        if file.kind == "text":
            with open_file(file) as stream:
                yield stream.read().decode("utf-8", "replace")
            continue
        for row in jsonl_rows(file) if file.kind == "jsonl" else parquet_rows(file):
            if row.problem is not None:
                raise DataError(
                    f"{row.where}: {row.problem}", hint="fix the evaluation set: it would not be searched for"
                )
            yield from _strings(row.value)


def _strings(value: Any) -> Iterator[str]:
    """Yield the texts anywhere in a record."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _strings(item)
    elif isinstance(value, list):
        for item in value:
            yield from _strings(item)
