"""Adds entries to a byte-level BPE, trained on new text: a vocabulary for a language or domain.

Guarantees: every old entry keeps its id, and the new merges come after all old ones; so a text is first encoded as
before, and where no new entry occurs its ids are the old ones. Equal texts in equal order give an equal tokenizer.
"""

import heapq
import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import Any

from smalti.base.errors import DataError, UserError
from smalti.data.tokenizer.tiktoken_encoding import is_byte_level, structure_of

Pair = tuple[int, int]
Entry = tuple[str, str]
_LEAST_COUNT = 2
"""Occurrences of a pair in the text that make it an entry."""


def extend_bpe(inner: Any, texts: Iterable[str], n_new: int) -> Any:
    """Return a ``tokenizers.Tokenizer`` with up to ``n_new`` more entries, whose ids follow the highest one.

    The text, split into words and encoded as before, is trained on as BPE is: the most frequent pair of neighbours
    becomes an entry, pairs of equal frequency by their ids. A pair whose text is an entry already is left out.

    Raises:
        UserError: the tokenizer is not a byte-level BPE.
        DataError: there is no text.
    """
    parts = structure_of(inner)
    if not is_byte_level(parts):
        raise UserError(
            "entries can be added to a byte-level BPE only, and this tokenizer is of another kind",
            allowed="tokenizers such as those of GPT-2, Llama 3, Qwen and 'smalti data tokenize'",
        )
    words = _words(inner, texts)
    if not words:
        raise DataError("there is no text to train new entries on", hint="check the documents folder")
    model = parts["model"]
    # A special token that is not in the model's vocabulary would get an id after the new entries.
    model["vocab"] |= {token["content"]: token["id"] for token in parts["added_tokens"]}
    counts: Counter[tuple[int, ...]] = Counter()
    for word, count in words.items():
        counts[tuple(token.id for token in inner.model.tokenize(word))] += count
    for token_id, token, pair in learn(counts, model["vocab"], n_new):
        model["vocab"][token] = token_id
        model["merges"].append(list(pair))
    return type(inner).from_str(json.dumps(parts))


def learn(rows: Mapping[tuple[int, ...], int], ids: Mapping[str, int], n_new: int) -> list[tuple[int, str, Entry]]:
    """Return (id, text, the two parts) of each new entry, in order. ``rows``: ids of a word -> its count."""
    text_of = {token_id: token for token, token_id in ids.items()}
    known = set(ids)
    words, weights = [list(row) for row in rows], list(rows.values())
    counts: Counter[Pair] = Counter()
    places: defaultdict[Pair, set[int]] = defaultdict(set)
    for number, word in enumerate(words):
        for pair in pairwise(word):
            counts[pair] += weights[number]
            places[pair].add(number)
    heap = [(-count, pair) for pair, count in counts.items()]
    heapq.heapify(heap)
    entries: list[tuple[int, str, Entry]] = []
    while heap and len(entries) < n_new:
        negative, pair = heapq.heappop(heap)
        if counts[pair] != -negative:  # it has changed since; the entry of its new count is in the heap too
            continue
        if -negative < _LEAST_COUNT:
            break
        parts = (text_of[pair[0]], text_of[pair[1]])
        token = "".join(parts)
        if token in known:
            continue
        new_id = max(text_of) + 1 if not entries else entries[-1][0] + 1
        entries.append((new_id, token, parts))
        text_of[new_id] = token
        known.add(token)
        changed: set[Pair] = set()
        for number in places.pop(pair):
            old, word = words[number], _merged(words[number], pair, new_id)
            for before in pairwise(old):
                counts[before] -= weights[number]
            for after in pairwise(word):
                counts[after] += weights[number]
                places[after].add(number)
            changed |= {*pairwise(old), *pairwise(word)}
            words[number] = word
        for each in changed - {pair}:
            heapq.heappush(heap, (-counts[each], each))
    return entries


def _merged(word: list[int], pair: Pair, new_id: int) -> list[int]:
    merged: list[int] = []
    for token_id in word:
        if merged and (merged[-1], token_id) == pair:
            merged[-1] = new_id
        else:
            merged.append(token_id)
    return merged


def _words(inner: Any, texts: Iterable[str]) -> Counter[str]:
    """Count the words that the tokenizer splits texts into, in its own symbols of bytes."""
    words: Counter[str] = Counter()
    for text in texts:
        normal = text if inner.normalizer is None else inner.normalizer.normalize_str(text)
        words.update(word for word, _ in inner.pre_tokenizer.pre_tokenize_str(normal))
    return words


def pieces_of(parts: dict[str, Any], n_old: int) -> dict[int, list[int]]:
    """Return the ids below ``n_old`` that each later entry of a vocabulary is merged from, of a ``tokenizer.json``."""
    vocab = parts["model"]["vocab"]
    pieces: dict[int, list[int]] = {}
    for merge in parts["model"].get("merges") or []:
        left, right = merge.split(" ", 1) if isinstance(merge, str) else merge
        new_id = vocab[left + right]
        if new_id >= n_old:
            pieces[new_id] = [piece for part in (vocab[left], vocab[right]) for piece in pieces.get(part, [part])]
    return pieces
