"""Compares tokenizers on the same documents: tokens, cost, and whether the text comes back.

Guarantees: each tokenizer encodes the same documents as ``smalti data tokenize`` would; the result depends on the
documents and the tokenizers only. Memory: a batch of documents, and a few numbers of each document.
"""

import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from smalti.base.errors import DataError, UserError
from smalti.base.progress import Progress, no_progress
from smalti.data.prepare.tokenizers.groups import GroupOf, count_units, inputs_of, named, read_groups
from smalti.data.prepare.tokenizers.probes import is_exact, probe
from smalti.data.tokenizer.encode import TOKENIZER_FILE, Tokenizer, load_tokenizer

ALL = "all"
_MIN_DOCUMENTS = 10
"""Fewer have no interval."""
_CHARACTER_FRAC = 0.3
"""Of characters in scripts without blanks, from which a group is counted by character."""
_AROUND = 20


def compare_tokenizers(
    tokenizers: Sequence[str],
    on: Sequence[str],
    *,
    text_field: str = "text",
    limit_bytes: int = 8_000_000,
    group_of: GroupOf | None = None,
    progress: Progress = no_progress,
) -> dict[str, Any]:
    """Return ``tokenizers`` (name -> properties) and ``groups`` (name -> counts, and the scores of each tokenizer).

    Args:
        tokenizers: ``PATH`` or ``NAME=PATH`` of at least one; costs are relative to the first.
        on: ``PATH`` or ``NAME=PATH`` of documents, a group each.
        limit_bytes: Of a larger input a sample of about this size is read.
        group_of: File name and text of a document -> group; absent: the input.

    Raises:
        DataError: a file is missing or damaged, or there is no text.
        UserError: two tokenizers or groups have the same name.
    """
    loaded = _load(tokenizers)
    inputs = inputs_of(on)
    groups: dict[str, _Group] = {}
    for part in read_groups(
        inputs, text_field=text_field, limit_bytes=limit_bytes, group_of=group_of, progress=progress
    ):
        groups.setdefault(part.group, _Group(list(loaded))).add(part.texts, loaded)
    if not groups:
        raise DataError("the documents hold no text", hint="check --on")
    names = [each.name for each in inputs if each.name in groups] if group_of is None else sorted(groups)
    scores = {name: groups[name].as_json() for name in names}
    if len(names) > 1:
        scores[ALL] = _Group.joined(list(loaded), [groups[name] for name in names]).as_json()
    return {
        "tokenizers": {
            name: {"path": path, "vocab_size": each.vocab_size, "digest": each.digest} | probe(each)
            for name, (path, each) in loaded.items()
        },
        "groups": scores,
    }


def _load(given: Sequence[str]) -> dict[str, tuple[str, Tokenizer]]:
    pairs = [named(item) for item in given]
    paths = [path for _, path in pairs]
    unnamed = [path for name, path in pairs if name is None]
    label = dict(zip(unnamed, labels(unnamed), strict=True))
    names = [label[path] if name is None else name for name, path in pairs]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise UserError(f"two tokenizers are named '{twice}'", hint="name them: OLD=models/a NEW=models/b")
    return {name: (path, load_tokenizer(_inside(path))) for name, path in zip(names, paths, strict=True)}


def _inside(path: str) -> str:
    """Return the folder of the tokenizer of a run or of tokens, or the path itself."""
    inside = Path(path, "tokenizer")
    has_own = Path(path, TOKENIZER_FILE).is_file()
    return str(inside) if not has_own and (inside / TOKENIZER_FILE).is_file() else path


def labels(paths: Sequence[str]) -> list[str]:
    """Return short names: the last parts of each path, as many as make them different, generic ones left out."""
    generic = (TOKENIZER_FILE, "tokenizer", "/", "")
    parts = []
    for path in paths:
        names = list(Path(os.path.abspath(path)).parts)
        while len(names) > 1 and names[-1] in generic:
            names.pop()
        parts.append(names)
    for n in range(1, max(map(len, parts), default=0) + 1):
        short = ["/".join(names[-n:]) for names in parts]
        if len(set(short)) == len(set(paths)):
            return short
    return list(paths)


class _Group:
    """Counts of each document, by tokenizer."""

    def __init__(self, tokenizers: Sequence[str]) -> None:
        self._n_bytes: list[int] = []
        self._units = np.zeros(4, np.int64)
        self._tokens: dict[str, list[int]] = {name: [] for name in tokenizers}
        self._inexact: dict[str, int] = dict.fromkeys(tokenizers, 0)
        self._differences: dict[str, dict[str, str]] = {}

    def add(self, texts: Sequence[str], tokenizers: dict[str, tuple[str, Tokenizer]]) -> None:
        self._n_bytes += [len(text.encode()) for text in texts]
        for text in texts:
            self._units += (*count_units(text), len(text))
        threads = len(os.sched_getaffinity(0))
        for name, (_, tokenizer) in tokenizers.items():
            encoded = tokenizer.encode_batch(texts, threads=threads)
            self._tokens[name] += map(len, encoded)
            for text, ids in zip(texts, encoded, strict=True):
                if not is_exact(tokenizer, text, ids):
                    self._inexact[name] += 1
                    self._differences.setdefault(name, _difference(text, tokenizer.decode(ids, skip_special=False)))

    @classmethod
    def joined(cls, tokenizers: Sequence[str], groups: Sequence["_Group"]) -> "_Group":
        total = cls(tokenizers)
        for group in groups:
            total._n_bytes += group._n_bytes
            total._units += group._units
            for name in tokenizers:
                total._tokens[name] += group._tokens[name]
                total._inexact[name] += group._inexact[name]
        return total

    def as_json(self) -> dict[str, Any]:
        words, printed, without_blanks, characters = (int(value) for value in self._units)
        by_character = without_blanks > _CHARACTER_FRAC * printed
        n_units = printed if by_character else words
        n_bytes = np.array(self._n_bytes, np.float64)
        first = np.array(next(iter(self._tokens.values())), np.float64)
        scores = {}
        for name, counts in self._tokens.items():
            tokens = np.array(counts, np.float64)
            per_token, interval = ratio(n_bytes, tokens)
            cost, cost_interval = ratio(tokens, first)
            scores[name] = {
                "tokens": int(tokens.sum()),
                "bytes_per_token": per_token,
                "bytes_per_token_interval": interval,
                "tokens_per_unit": float(tokens.sum() / max(n_units, 1)),
                "relative_cost": cost,
                "relative_cost_interval": cost_interval,
                "inexact_documents": self._inexact[name],
                "first_difference": self._differences.get(name),
            }
        return {
            "documents": len(self._n_bytes),
            "bytes": int(n_bytes.sum()),
            "characters": characters,
            "words": words,
            "unit": "character" if by_character else "word",
            "scores": scores,
        }


def ratio(above: npt.NDArray[np.float64], below: npt.NDArray[np.float64]) -> tuple[float, tuple[float, float] | None]:
    """Return the ratio of the sums, and its 95 % interval over documents; None with fewer than ten."""
    n, total = len(above), float(below.sum())
    value = float(above.sum()) / max(total, 1.0)
    if n < _MIN_DOCUMENTS:
        return value, None
    # the variance of a ratio of sums, by its linear approximation
    half = 1.96 * math.sqrt(n / (n - 1) * float(((above - value * below) ** 2).sum())) / max(total, 1.0)
    return value, (value - half, value + half)


def _difference(text: str, decoded: str) -> dict[str, str]:
    """Return what is around the first character that differs."""
    pairs = enumerate(zip(text, decoded, strict=False))
    at = next((i for i, (a, b) in pairs if a != b), min(len(text), len(decoded)))
    begin = max(0, at - _AROUND)
    return {"text": text[begin : at + _AROUND], "decoded": decoded[begin : at + _AROUND]}
