"""Finds near-duplicate rows of tuning data, by the words, shingles and similarity of ``smalti data dedup``."""

import json
from collections.abc import Iterator
from itertools import islice

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from smalti.config.dedup import DedupConfig
from smalti.config.examples import ExamplesConfig
from smalti.data.documents.heldout import HELDOUT, split_of
from smalti.data.prepare.contamination.ngrams import normalised
from smalti.data.prepare.dedup.minhash import hashes_of_bands
from smalti.data.prepare.dedup.shingles import MAX_ROWS, mix, shared, shingle_sets, similarities
from smalti.tune.chats.files import read_chats
from smalti.tune.chats.formats import Chat

_BATCH_ROWS = 512
_SHINGLE_WORDS, _THRESHOLD, _BANDS, _ROWS = (
    DedupConfig.model_fields[name].default for name in ("shingle_words", "threshold", "bands", "rows")
)
U64 = npt.NDArray[np.uint64]


def near_duplicates(config: ExamplesConfig) -> set[int]:
    """Return the numbers, from 0, of the training rows that are near a row that is kept: held out, or earlier.

    Near rows have a Jaccard similarity of at least 0.65 of their runs of three words, and equal ``_values``.
    Memory: 8 bytes a word, 230 a row.
    """
    sets, bands, heldout = [], [], []
    rows = read_chats(config)
    while batch := list(islice(rows, _BATCH_ROWS)):
        chats = [row.chat for row in batch]
        texts = ["\n".join(_texts(chat)) if chat else "" for chat in chats]
        sets.append(shingle_sets(normalised(pa.array(texts, pa.large_string())), _SHINGLE_WORDS))
        values = np.array([hash(_values(chat)) if chat else 0 for chat in chats]).astype(np.uint64)
        bands.append(np.stack(hashes_of_bands(_signatures(sets[-1]), _BANDS, _ROWS)[1:]) ^ values)
        seed, frac = config.seed, config.heldout_frac
        heldout += [bool(chat and split_of(chat.group, seed=seed, heldout_frac=frac) == HELDOUT) for chat in chats]
    dropped: set[int] = set()
    if not sets:
        return dropped
    for before, behind in _near_pairs(pa.concat_arrays(sets), np.concatenate(bands, axis=1), np.array(heldout)):
        if before not in dropped and not heldout[behind]:
            dropped.add(behind)
    return dropped


def _texts(chat: Chat) -> list[str]:
    """Return the texts to compare: all but system messages, which many rows share."""
    messages = [message for of_chat in chat.conversations for message in of_chat]
    return [message["content"] or "" for message in messages if message["role"] not in ("system", "developer")]


def _values(chat: Chat) -> tuple[object, ...]:
    """Return what is equal in near rows: ``label`` or ``margin``, tool calls, and which answer of a pair is chosen."""
    calls = [
        [call["function"] for message in messages for call in message.get("tool_calls") or ()]
        for messages in chat.conversations
    ]
    answers = [[message["content"] or "" for message in messages[chat.first :]] for messages in chat.conversations]
    is_first = len(answers) == 2 and _is_first(*map("\n".join, answers))
    return (*sorted(chat.values.items()), json.dumps(calls, sort_keys=True), is_first)


def _is_first(text: str, other: str) -> bool:
    """Return the opposite for the texts in the other order, and mostly the same for near copies of both."""
    words, others = set(text.casefold().split()), set(other.casefold().split())
    differing = words ^ others
    return min(differing) in words if differing else text < other


def _signatures(sets: pa.LargeListArray) -> U64:
    """Return MinHash signatures [rows, values]; those of empty sets are arbitrary."""
    values = np.append(np.asarray(sets.values), 0).astype(np.uint64)
    with np.errstate(over="ignore"):
        hashes = (mix(values + mix(np.full(1, seed, np.uint64))) for seed in range(1, _BANDS * _ROWS + 1))
        return np.stack(
            [np.minimum.reduceat(each, np.asarray(sets.offsets)[:-1]) >> np.uint64(32) for each in hashes], 1
        )


def _near_pairs(sets: pa.LargeListArray, bands: U64, heldout: npt.NDArray[np.bool_]) -> Iterator[tuple[int, int]]:
    """Yield near rows (before, behind) in the order of ``behind``, held-out rows before those of training.

    Of the rows that share a band each is compared with the first and with the one before it.
    """
    order = np.argsort(~heldout, kind="stable")
    pairs = []
    for hashes in bands[:, order]:
        by_hash = np.argsort(hashes, kind="stable")
        is_first = np.diff(hashes[by_hash], prepend=~hashes[by_hash[:1]]) != 0
        first = by_hash[np.maximum.accumulate(np.where(is_first, np.arange(by_hash.size), 0))]
        pairs += [np.stack([before, by_hash])[:, ~is_first] for before in (first, np.roll(by_hash, 1))]
    candidates = np.unique(np.concatenate(pairs, axis=1)[::-1], axis=1)[::-1]
    for begin in range(0, candidates.shape[1], MAX_ROWS):
        before, behind = order[candidates[:, begin : begin + MAX_ROWS]]
        jaccard, _ = similarities(*shared(sets.take(pa.array(before)), sets.take(pa.array(behind))))
        near = jaccard >= _THRESHOLD
        yield from zip(before[near].tolist(), behind[near].tolist(), strict=True)
