"""Finds the spans of words that came earlier in a set, block by block, with bounded memory.

A span is cut if an equal one begins and ends before it. The first of equal spans stays, so no text is lost.

Each block writes the sorted distinct hashes of its spans; ranges of hashes are compared across blocks; each block
finds its spans again and cuts those that an earlier one has. Memory: a block in each process, 300 MiB for a range.
Disk: 8 bytes for each distinct span of a block.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow.parquet as pq

from smalti.config.build import Repeats
from smalti.data.build.repeats.spans import Spans, covered, find_spans, repeated
from smalti.data.prepare.dedup.shingles import U64

CODE = "code"
_RANGE_BYTES = 64 << 20
_BATCH_CHARACTERS = 1 << 20


@dataclass(frozen=True)
class Block:
    """A row group of a documents file. Plain data."""

    path: str
    group: int
    n_bytes: int
    n_rows: int


def blocks_of(path: Path) -> list[Block]:
    """Return the row groups of a documents file."""
    with pq.ParquetFile(path) as file:
        groups = [file.metadata.row_group(number) for number in range(file.num_row_groups)]
    return [Block(str(path), number, group.total_byte_size, group.num_rows) for number, group in enumerate(groups)]


def write_hashes(path: Path, block: Block, unit: Repeats, min_words: int) -> None:
    """Write the sorted distinct hashes of the spans of a block."""
    hashes = [np.empty(0, np.uint64), *(spans.hashes for _, spans in _spans(block, unit, min_words))]
    _save(path, np.unique(np.concatenate(hashes)))


def write_earlier(folder: Path, blocks: Sequence[Path], range_bytes: int = _RANGE_BYTES) -> list[Path]:
    """Write for each range of hashes which of each block's are in an earlier one; returns the files.

    ``blocks`` are the files of ``write_hashes``, in order.
    """
    folder.mkdir()
    n_ranges = max(1, -(-sum(path.stat().st_size for path in blocks) // range_bytes))
    edges = [(number << 64) // n_ranges for number in range(n_ranges + 1)]
    paths = []
    for number in range(n_ranges):
        parts = [_part(path, edges[number], edges[number + 1]) for path in blocks]
        hashes = np.concatenate([np.empty(0, np.uint64), *parts])
        block_of = np.repeat(np.arange(len(parts), dtype=np.uint32), [len(part) for part in parts])
        del parts
        order = np.argsort(hashes, kind="stable")  # the blocks of equal hashes stay in order
        again = order[1:][hashes[order][1:] == hashes[order][:-1]]
        again.sort()  # by block, and by hash in it
        ends = np.searchsorted(block_of[again], np.arange(len(blocks)), "right")
        path = folder / f"{number:06d}.npy"
        _save(path, hashes[again])
        _save(_edges_of(path), np.concatenate([[0], ends]))
        paths.append(path)
    return paths


def write_cuts(path: Path, block: Block, number: int, earlier: Sequence[Path], unit: Repeats, min_words: int) -> None:
    """Write the runs of characters to cut out of block ``number``: rows of (row, first, end, number of words)."""
    batches = list(_spans(block, unit, min_words))
    if not batches:
        _save(path, np.empty((0, 4), np.int64))
        return
    word_offsets = np.cumsum([0, *(len(spans.starts) for _, spans in batches)])
    firsts, lasts = (
        np.concatenate([getattr(spans, name) + at for (_, spans), at in zip(batches, word_offsets, strict=False)])
        for name in ("firsts", "lasts")
    )
    hashes = np.concatenate([spans.hashes for _, spans in batches])
    which = repeated(hashes, firsts, lasts, np.concatenate([_earlier_of(file, number) for file in earlier]))
    cuts = []
    at = 0
    for rows, spans in batches:
        n = len(spans.hashes)
        runs = covered(spans, which[at : at + n])
        cuts += [(rows[text], first, end, n_words) for text, first, end, n_words in runs]
        at += n
    _save(path, np.array(cuts, np.int64).reshape(-1, 4))


def _spans(block: Block, unit: Repeats, min_words: int) -> Iterator[tuple[list[int], Spans]]:
    """Yield the spans of some texts at a time, with the rows of the texts. Source code is left out."""
    with pq.ParquetFile(block.path, page_checksum_verification=True) as file:
        table = file.read_row_group(block.group, columns=["text", "language"])
    rows: list[int] = []
    texts: list[str] = []
    n_characters = 0
    for row, (text, language) in enumerate(zip(*(column.to_pylist() for column in table.columns), strict=True)):
        if language == CODE:
            continue
        rows.append(row)
        texts.append(text)
        n_characters += len(text)
        if n_characters >= _BATCH_CHARACTERS:
            yield rows, find_spans(texts, unit, min_words)
            rows, texts, n_characters = [], [], 0
    if texts:
        yield rows, find_spans(texts, unit, min_words)


def _part(path: Path, first: int, end: int) -> U64:
    """Return the hashes of a block from ``first`` on, below ``end``."""
    hashes = np.load(path, mmap_mode="r")
    start = np.searchsorted(hashes, np.uint64(first))
    stop = np.searchsorted(hashes, np.uint64(end - 1), "right")  # the last end is 2^64, which no integer of 64 bits is
    return np.array(hashes[start:stop])


def _earlier_of(path: Path, number: int) -> U64:
    edges = np.load(_edges_of(path))
    return np.array(np.load(path, mmap_mode="r")[edges[number] : edges[number + 1]])


def _edges_of(path: Path) -> Path:
    return path.with_suffix(".edges")


def _save(path: Path, values: npt.NDArray[Any]) -> None:
    with open(path, "wb") as file:  # np.save would add a suffix to another name
        np.save(file, values)
