"""A folder of token files as a ``Source``: one long array of tokens, read by range, from a local folder or a store.

Every block is verified on every read; the error names a damaged one. Document boundaries are computed from the blocks;
no other file is read. Nothing is opened before the first read. Thread-safe. Does not cache.
"""

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from smalti.base import store
from smalti.base.errors import DataError, UserError
from smalti.base.hashing import sha256_file
from smalti.data.fetch import Files, open_files
from smalti.data.tokens import format as layout
from smalti.data.tokens.blocks import GROUP_BLOCKS, BlockReader, Int64s, Runs
from smalti.data.tokens.document_ids import IDS_NAME
from smalti.data.tokens.manifest import FILE_NAME, Manifest, read_manifest

_PROBES = 15
"""Blocks that a search for a document reads at once, so that a remote store needs few round trips."""


class TokenSource:
    """A ``Source`` (``data/sources/source.py``) of the token files in one folder."""

    checked = "every block (XXH3-64)"

    def __init__(self, folder: str | Path, *, index: bytes | None = None, files: Files | None = None) -> None:
        """``index``: the content of ``manifest.json``, if it was already read; ``files``: the opened folder, if it has
        mirrors or a cache. Raises DataError for a manifest that is missing or damaged."""
        self.where = str(folder)
        files = files or open_files(self.where)
        self.manifest = manifest = Manifest.parse(
            read_manifest(files) if index is None else index, store.join(folder, FILE_NAME)
        )
        self.n_tokens = manifest.n_tokens
        self.dtype: np.dtype[Any] = np.dtype("<u2" if manifest.dtype == "u16" else "<u4")
        self.digest = manifest.digest
        self.tokenizer_digest: str | None = manifest.tokenizer_digest
        self.vocab_size: int | None = manifest.vocab_size
        self.eod_id: int | None = manifest.eod_id
        self.n_documents: int | None = manifest.n_documents
        self._blocks = BlockReader(self.where, manifest, files)
        self._block_tokens = layout.PAYLOAD_BYTES // manifest.token_bytes
        self._record = layout.block_dtype(manifest.token_bytes)

    def read_rows(self, begins: Int64s, out: npt.NDArray[Any]) -> None:
        """Fill ``out`` [n, length] of ``dtype``, contiguous: row i with tokens [begins[i], begins[i] + length)."""
        assert out.dtype == self.dtype, (out.dtype, self.dtype)
        assert out.flags.c_contiguous
        length = out.shape[1]
        if not out.size:
            return
        begins = np.asarray(begins, dtype=np.int64)
        self._require(int(begins.min()), int(begins.max()) + length)
        runs, begin, end, to = self._cut(begins, length)
        width = self.dtype.itemsize
        flat = out.data.cast("B")
        starts = (begin * width).tolist()
        stops = (end * width).tolist()
        targets = (to * width).tolist()
        ends = ((to + end - begin) * width).tolist()
        for _, blocks, data in self._blocks.read(runs):
            at = 0
            for start, stop, target, last in zip(
                starts[blocks], stops[blocks], targets[blocks], ends[blocks], strict=True
            ):
                flat[target:last] = data[at + start : at + stop]
                at += layout.BLOCK_BYTES

    def read(self, begin_token: int, n: int) -> npt.NDArray[np.int64]:
        """Return tokens [begin_token, begin_token + n) as int64 [n]."""
        self._require(begin_token, begin_token + n)
        out = np.empty((1, n), dtype=self.dtype)
        self.read_rows(np.array([begin_token]), out)
        tokens: npt.NDArray[np.int64] = out[0].astype(np.int64)
        return tokens

    def documents_at(self, tokens: Int64s) -> Int64s:
        """Return the number of the document of each token [n]; an end-of-document token belongs to the document."""
        tokens = np.asarray(tokens, dtype=np.int64)
        if not tokens.size:
            return tokens
        self._require(int(tokens.min()), int(tokens.max()) + 1)
        file, inside = np.divmod(tokens, self.manifest.file_tokens)
        block, inside = np.divmod(inside, self._block_tokens)
        documents = np.empty(tokens.size, np.int64)
        for which, _, data in self._blocks.read(Runs(file, block, np.ones_like(block))):
            records = np.frombuffer(data, self._record)
            before = np.arange(self._block_tokens) < inside[which, None]
            documents[which] = records["before"] + ((records["tokens"] == self.eod_id) & before).sum(axis=1)
        return documents

    def document_span(self, document: int) -> tuple[int, int]:
        """Return the tokens [begin, end) of a document, including its end-of-document token."""
        if not 0 <= document < self.manifest.n_documents:
            raise UserError(
                f"{self.where} has no document {document:,}", allowed=f"0 to {self.manifest.n_documents - 1:,}"
            )
        return (self._end_of(document - 1) if document else 0), self._end_of(document)

    @property
    def n_reread(self) -> int:
        """Number of blocks that failed their check and passed it when read again."""
        return self._blocks.n_reread

    def check_files(self) -> None:
        """Check that every file of a local folder exists and has the right size. Raises DataError."""
        self._blocks.check_files()

    def verify(self) -> None:
        """Read every byte of every local file, and compare its SHA-256 with the manifest. Raises DataError."""
        if not store.is_local(self.where):
            raise DataError(
                f"{self.where} is not local; only local folders are read whole", hint="copy it to a local folder first"
            )
        self.check_files()
        expected_of = {self._blocks.path(file): digest for file, digest in enumerate(self.manifest.file_digests())}
        if self.manifest.ids_sha256:
            expected_of[store.join(self.where, IDS_NAME)] = self.manifest.ids_sha256
        for path, expected in expected_of.items():
            if not Path(path).is_file():
                raise DataError(f"{path} does not exist, but the manifest lists it", hint="copy the folder again")
            digest = sha256_file(path)
            if digest != expected:
                raise DataError(f"{path} has the SHA-256 {digest}, the manifest says {expected}")

    def close(self) -> None:
        """Close files and connections, which are opened again by the next read."""
        self._blocks.close()

    def _require(self, begin: int, end: int) -> None:
        if not 0 <= begin <= end <= self.n_tokens:
            raise DataError(f"tokens {begin:,} to {end:,} are outside {self.where}", allowed=f"0 to {self.n_tokens:,}")

    def _cut(self, begins: Int64s, length: int) -> tuple[Runs, Int64s, Int64s, Int64s]:
        """Split rows into runs of blocks.

        Returns the runs, and for each block its tokens [begin, end) that are needed and their offset in the
        concatenated rows. A row that crosses the end of a file has more than one run.
        """
        size = self._block_tokens
        most = (GROUP_BLOCKS - 1) * size
        to = np.arange(len(begins)) * length
        left = np.full(len(begins), length)
        cut = []
        while begins.size:
            file = begins // self.manifest.file_tokens
            inside = begins - file * self.manifest.file_tokens
            n = np.minimum(np.minimum(left, most), self.manifest.file_tokens - inside)
            cut.append((file, inside, n, to))
            more = left > n
            begins = (begins + n)[more]
            to = (to + n)[more]
            left = (left - n)[more]
        file, inside, n, to = cut[0] if len(cut) == 1 else (np.concatenate(parts) for parts in zip(*cut, strict=True))
        first = inside // size
        skip = inside - first * size
        count = (skip + n - 1) // size + 1
        nth = np.arange(int(count.sum())) - np.repeat(np.cumsum(count) - count, count)
        skip, n, to = (np.repeat(part, count) for part in (skip, n, to))
        begin = np.where(nth == 0, skip, 0)
        return Runs(file, first, count), begin, np.minimum(skip + n - nth * size, size), to + nth * size - skip + begin

    def _end_of(self, document: int) -> int:
        """Return the index after the last token of a document, by a search over the counts in the blocks."""
        low = 0
        high = self.manifest.n_blocks
        while high - low > 1:  # the document ends in a block of [low, high)
            probes = np.unique(np.linspace(low, high, _PROBES + 2).astype(np.int64)[1:-1])
            probes = probes[probes > low]
            before = self._read_records(probes)["before"].astype(np.int64)
            passed = int(np.searchsorted(before, document, side="right"))
            if passed:
                low = int(probes[passed - 1])
            if passed < len(probes):
                high = int(probes[passed])
        record = self._read_records(np.array([low]))[0]
        ends = np.flatnonzero(record["tokens"] == self.eod_id)
        file, block = divmod(low, self.manifest.blocks_per_file)
        at = int(ends[document - int(record["before"])])
        return file * self.manifest.file_tokens + block * self._block_tokens + at + 1

    def _read_records(self, numbers: Int64s) -> npt.NDArray[np.void]:
        file, block = np.divmod(numbers, self.manifest.blocks_per_file)
        runs = Runs(file, block, np.ones_like(block))
        return np.concatenate([np.frombuffer(data, self._record).copy() for _, _, data in self._blocks.read(runs)])
