"""The best-fit index on disk: the pieces of a source in each sequence. Written once, memory-mapped.

``packs/SEQ_LEN`` beside the token files has ``pack.json`` (see ``PackRecord``) and four columns (see
``best_fit.Rows``). A column is blocks of 4,096 bytes: values, and in the last 8 bytes their XXH3-64, seeded with
``PackRecord.seed``, the column and the block; each is checked before its first use. Local folders only. Truncating a
mapped file ends the process (SIGBUS).
"""

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import numpy.typing as npt

from smalti.base.errors import DataError, UserError
from smalti.base.hashing import digest_json, sha256_file, xxh3
from smalti.data.pack.best_fit import ALGORITHM
from smalti.data.sources.source import Int64s

if TYPE_CHECKING:
    from smalti.data.pack.best_fit import Rows
    from smalti.data.sources.source import Source

FORMAT = 1
RECORD_NAME = "pack.json"
KIND = "pack"

_BLOCK_BYTES = 4096
_CHECK_BYTES = 8
_WRITE_BLOCKS = 1 << 14
_COLUMNS = {"starts": "<u8", "begins": "<u8", "lengths": "<u4", "places": "<u4"}


@dataclass(frozen=True)
class PackRecord:
    """The content of ``pack.json``: counts of the index, and the digests of the source and of its files."""

    algorithm: str
    seq_len: int
    source_digest: str
    n_tokens: int
    n_documents: int
    n_cut_documents: int
    """Documents longer than a sequence."""
    n_rows: int
    n_pieces: int
    files: dict[str, str]
    """SHA-256 of each column's file."""
    digest: str = ""
    """Digest of all fields above."""

    @property
    def padding_frac(self) -> float:
        """Share of padding in all rows."""
        return 1 - self.n_tokens / (self.n_rows * self.seq_len)

    def content_digest(self) -> str:
        """Compute the digest of the other fields."""
        return digest_json({key: value for key, value in vars(self).items() if key != "digest"})

    def path(self, folder: str, column: str) -> Path:
        """Return the file of a column; its name has the seed, so that a new index never replaces a mapped file."""
        return Path(folder) / f"{column}.{self.seed:016x}.col"

    @property
    def seed(self) -> int:
        """Seed of the checksums of all blocks."""
        return int(digest_json([FORMAT, self.algorithm, self.seq_len, self.source_digest])[:16], 16)

    @classmethod
    def parse(cls, data: bytes, where: str, *, source_digest: str, source: str, seq_len: int) -> Self:
        """Parse and check ``pack.json``. Raises DataError if it is damaged, or of another source, length or version."""
        hint = pack_command(source, seq_len)
        try:
            raw = json.loads(data)
            assert isinstance(raw, dict)
            head = {key: raw.pop(key) for key in ("format", "kind", "complete", "entries")}
            record = cls(**raw)
        except (ValueError, KeyError, TypeError, AssertionError) as error:
            raise DataError(f"{where} is not the record of a pack index", hint=hint) from error
        if not head["complete"]:
            raise DataError(f"{where} is incomplete: the writing was interrupted", hint=hint)
        if record.algorithm != ALGORITHM or head["format"] != FORMAT:
            raise DataError(
                f"{where} was written by {record.algorithm}, format {head['format']}",
                allowed=f"{ALGORITHM}, format {FORMAT}",
                hint=hint,
            )
        if record.digest != record.content_digest():
            raise DataError(f"{where} was changed after it was written: its digest does not match", hint=hint)
        if record.seq_len != seq_len:
            raise DataError(f"{where} packs sequences of {record.seq_len} tokens, not {seq_len}", hint=hint)
        if record.source_digest != source_digest:
            raise DataError(
                f"{where} is the index of tokens with the digest {record.source_digest[:12]}; "
                f"{source} has {source_digest[:12]}",
                hint=hint,
            )
        return record


class PackIndex:
    """The index of one source at one sequence length. Maps its files on first use. Thread-safe."""

    def __init__(self, record: PackRecord, folder: str) -> None:
        self.record = record
        self.folder = folder
        self.n_rows = record.n_rows
        self.seq_len = record.seq_len
        self._columns: dict[str, _Column] = {}

    def pieces(self, rows: Int64s) -> tuple[Int64s, Int64s, Int64s]:
        """Return for each piece of rows [n]: the index of its row in ``rows`` [m], first token [m], length [m]."""
        first, last = self._column("starts").take(np.stack([rows, rows + 1]))
        counts = last - first
        if (counts < 1).any():
            raise DataError(f"{self.folder} holds a sequence without pieces", hint="run 'smalti data pack' again")
        owner = np.repeat(np.arange(rows.size), counts)
        at = np.arange(owner.size) - np.repeat(np.cumsum(counts) - counts, counts) + np.repeat(first, counts)
        return owner, self._column("begins").take(at), self._column("lengths").take(at)

    def rows_of(self, begin: int, end: int) -> Int64s:
        """Return the rows whose targets include any of the tokens [begin, end), in ascending order."""
        places = self._column("places")
        # The pieces cover the corpus without gaps, so the first is the last one that begins at or before ``begin``.
        first = self._count(lambda k: self._begin(places, k) <= begin, self.record.n_pieces) - 1
        last = self._count(lambda k: self._begin(places, k) < end, self.record.n_pieces)
        at = places.take(np.arange(max(first, 0), last))
        return np.unique(np.array([self._row(place) for place in at.tolist()], dtype=np.int64))

    def verify(self) -> None:
        """Read all files and compare their SHA-256 with the record. Raises DataError."""
        for name, digest in self.record.files.items():
            path = self.record.path(self.folder, name)
            if sha256_file(path) != digest:
                raise DataError(f"{path} is corrupt: its SHA-256 does not match {RECORD_NAME}", hint=self._hint())

    def close(self) -> None:
        """Release the files, which are mapped again on the next use."""
        self._columns.clear()

    def _row(self, place: int) -> int:
        starts = self._column("starts")
        return self._count(lambda row: int(starts.take(np.array([row]))[0]) <= place, self.n_rows) - 1

    def _begin(self, places: "_Column", piece: int) -> int:
        return int(self._column("begins").take(places.take(np.array([piece])))[0])

    @staticmethod
    def _count(holds: Callable[[int], bool], n: int) -> int:
        """Return how many of 0 .. n-1 satisfy ``holds``, which is true for the first ones only (binary search)."""
        low = 0
        high = n
        while low < high:
            middle = (low + high) // 2
            if holds(middle):
                low = middle + 1
            else:
                high = middle
        return low

    def _column(self, name: str) -> "_Column":
        column = self._columns.get(name)
        if column is None:
            n = self.record.n_rows + 1 if name == "starts" else self.record.n_pieces
            path = self.record.path(self.folder, name)
            column = self._columns[name] = _Column(path, name, n, self.record.seed, self._hint())
        return column

    def _hint(self) -> str:
        return f"write the index again: smalti data pack FOLDER --seq-len {self.seq_len}"


class _Column:
    """A memory-mapped column of integers in blocks with checksums."""

    def __init__(self, path: Path, name: str, n: int, seed: int, hint: str) -> None:
        self._path = path
        self._n = n
        self._hint = hint
        self._dtype = np.dtype(_COLUMNS[name])
        self._seed = _block_seed(seed, name)
        self._per_block = (_BLOCK_BYTES - _CHECK_BYTES) // self._dtype.itemsize
        n_blocks = -(-n // self._per_block)
        n_bytes = os.path.getsize(path) if path.is_file() else -1
        if n_bytes != n_blocks * _BLOCK_BYTES:
            what = "is missing" if n_bytes < 0 else f"has {n_bytes:,} bytes, not {n_blocks * _BLOCK_BYTES:,}"
            raise DataError(f"{path} {what}", hint=hint)
        mapped = np.memmap(path, dtype=np.uint8, mode="r", shape=(n_blocks, _BLOCK_BYTES))
        self._blocks = mapped.view(np.ndarray)
        self._values = self._blocks.view(self._dtype)
        self._is_checked = np.zeros(n_blocks, dtype=bool)

    def take(self, at: Int64s) -> Int64s:
        """Return the values at these indexes, which may have any shape."""
        block, inside = np.divmod(at, self._per_block)
        if at.size and not (at.min() >= 0 and at.max() < self._n):
            raise DataError(
                f"{self._path} has {self._n:,} values, but the index refers to {at.max():,}", hint=self._hint
            )
        for number in np.unique(block[~self._is_checked[block]]).tolist():
            self._check(number)
        return self._values[block, inside].astype(np.int64)

    def _check(self, number: int) -> None:
        data = self._blocks[number]
        if _check_of(data[:-_CHECK_BYTES].data, self._seed, number) != int(data[-_CHECK_BYTES:].view("<u8")[0]):
            raise DataError(f"{self._path} is corrupt: block {number} does not match its checksum", hint=self._hint)
        self._is_checked[number] = True


def pack_folder(source: str, seq_len: int) -> str:
    """Return the folder of the index of a folder of tokens."""
    return f"{source.rstrip('/')}/packs/{seq_len}"


def pack_command(source: str, seq_len: int) -> str:
    """Return the command that writes the index."""
    return f"smalti data pack {source} --seq-len {seq_len}"


def read_record(source: str, seq_len: int) -> bytes:
    """Read ``pack.json`` of a folder of tokens. Raises DataError if there is none."""
    if "://" in source:
        raise UserError(
            f"data.packing=best-fit needs a local folder, and {source} is not",
            allowed="local folders, whose index is memory-mapped",
            hint="copy the tokens and their packs/ to a local disk, or data.packing=concat",
        )
    path = Path(pack_folder(source, seq_len)) / RECORD_NAME
    if not path.is_file():
        raise DataError(
            f"{source} has no best-fit index for sequences of {seq_len} tokens", hint=pack_command(source, seq_len)
        )
    return path.read_bytes()


def write_index(
    source: "Source", rows: "Rows", *, seq_len: int, n_documents: int, n_cut_documents: int, folder: str
) -> PackRecord:
    """Write rows as the index of ``source`` into ``folder``; replaces an older index when it is complete."""
    from smalti.data.documents.publish import publication

    record = PackRecord(
        ALGORITHM, seq_len, source.digest, source.n_tokens, n_documents, n_cut_documents,
        rows.starts.size - 1, rows.begins.size, {},
    )  # fmt: skip
    with publication(folder, kind=KIND, record_name=RECORD_NAME) as result:
        for name, dtype in _COLUMNS.items():
            path = record.path(str(result.work), name)
            _write_column(path, getattr(rows, name), np.dtype(dtype), _block_seed(record.seed, name))
            record.files[name] = sha256_file(path)
        record = PackRecord(**{**vars(record), "digest": record.content_digest()})
        result.record.update(vars(record))
    return record


def _write_column(path: Path, values: npt.NDArray[Any], dtype: "np.dtype[Any]", seed: int) -> None:
    per_block = (_BLOCK_BYTES - _CHECK_BYTES) // dtype.itemsize
    with open(path, "wb") as file:
        for first in range(0, values.size, per_block * _WRITE_BLOCKS):
            part = values[first : first + per_block * _WRITE_BLOCKS]
            blocks = np.zeros((-(-part.size // per_block), _BLOCK_BYTES), dtype=np.uint8)
            cells = np.zeros(blocks.shape[0] * per_block, dtype=dtype)
            cells[: part.size] = part
            blocks[:, :-_CHECK_BYTES] = cells.view(np.uint8).reshape(blocks.shape[0], -1)
            number = first // per_block
            checks = [_check_of(block[:-_CHECK_BYTES].data, seed, number + i) for i, block in enumerate(blocks)]
            blocks[:, -_CHECK_BYTES:] = np.array(checks, dtype="<u8")[:, None].view(np.uint8)
            file.write(blocks.data)
        file.flush()
        os.fsync(file.fileno())


def _block_seed(seed: int, column: str) -> int:
    return (seed ^ (list(_COLUMNS).index(column) << 60)) & (1 << 64) - 1


def _check_of(data: memoryview, seed: int, number: int) -> int:
    return xxh3(data, (seed + number) & (1 << 64) - 1)
