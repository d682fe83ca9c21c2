"""Reads tokens by range, from a local folder or an object store, and checks what it reads.

Promises: every block that is touched is verified on every read, so a token that is handed out is a token that was
written; a wrong file is named with its block. Local files are read with pread, not mapped: a file cut short or a bad
disk is an error with a name, not a SIGBUS that kills the rank. Threads may share a source. Does not cache.
"""

import os
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from smalti.base import store
from smalti.base.errors import DataError
from smalti.base.hashing import sha256_file
from smalti.data.tokens import format as layout
from smalti.data.tokens.manifest import Manifest, TokenFile


class TokenSource:
    """The tokens of one folder as one long array, read by range.

    Raises DataError at once when a local file is missing, has the wrong size or a damaged header; files in an object
    store are looked at when they are first read.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = str(folder)
        self.manifest = Manifest.load(folder)
        self._starts = np.cumsum([0, *(file.n_tokens for file in self.manifest.files)], dtype=np.int64)
        local = store.is_local(folder)
        self._files = [_File(store.join(folder, file.name), file, self.manifest, local) for file in self.manifest.files]
        if local:
            for file in self._files:
                file.open()

    @property
    def n_tokens(self) -> int:
        """Tokens in all files, end-of-document tokens included."""
        return self.manifest.n_tokens

    def read(self, begin_token: int, n: int) -> npt.NDArray[np.int64]:
        """Tokens [begin_token, begin_token + n) as int64 [n]. Raises DataError outside the data or on a bad block."""
        out = np.empty(n, dtype=np.int64)
        self.read_into(begin_token, out)
        return out

    def read_into(self, begin_token: int, out: npt.NDArray[np.int64]) -> None:
        """Fill ``out`` [n] with the tokens from ``begin_token`` on; a sequence costs one read of whole blocks."""
        end = begin_token + out.size
        if not 0 <= begin_token <= end <= self.n_tokens:
            raise DataError(
                f"tokens {begin_token:,} to {end:,} of {self.folder} were asked for",
                allowed=f"0 to {self.n_tokens:,}",
            )
        done = 0
        index = int(np.searchsorted(self._starts, begin_token, side="right")) - 1
        while done < out.size:
            inside = begin_token + done - int(self._starts[index])
            n = min(out.size - done, self.manifest.files[index].n_tokens - inside)
            self._files[index].read_into(inside, out[done : done + n])
            done += n
            index += 1

    def verify(self) -> None:
        """Read every byte of every local file and compare its SHA-256 with the manifest. Raises DataError."""
        for file in self._files:
            file.verify()

    def close(self) -> None:
        """Close the files; they open again when read."""
        for file in self._files:
            file.close()


class _File:
    """One token file; opens on first use, keeps a descriptor and the checksums of its blocks."""

    def __init__(self, path: str, entry: TokenFile, manifest: Manifest, local: bool) -> None:
        self.path, self.entry, self.manifest, self.local = path, entry, manifest, local
        self._descriptor = -1
        self._checksums: list[int] | None = None
        self._dtype = np.dtype("<u2" if manifest.dtype == "u16" else "<u4")
        self._data_bytes = entry.n_tokens * self._dtype.itemsize

    def open(self) -> None:
        """Check size, header and table of checksums against the manifest."""
        if self.local:
            if not os.path.isfile(self.path):
                raise DataError(f"{self.path} does not exist, but the manifest lists it", hint="copy the folder again")
            self._descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            found = os.fstat(self._descriptor).st_size if self.local else store.size_bytes(self.path)
            if found != self.entry.n_bytes:
                raise layout.short_file(self.path, found, self.entry.n_bytes)
            header = layout.unpack_header(bytes(self._bytes(0, layout.HEADER_BYTES)), self.path)
            self._agree(header)
            table_start = layout.HEADER_BYTES + header.data_bytes
            table = bytes(self._bytes(table_start, self.entry.n_bytes - table_start))
            checksums = layout.unpack_checksums(table, header, int(self.entry.checksums, 16), self.path)
        except BaseException:
            self.close()
            raise
        self._checksums = checksums.tolist()

    def read_into(self, begin: int, out: npt.NDArray[np.int64]) -> None:
        """Fill ``out`` with the tokens of this file from ``begin`` on."""
        if self._checksums is None:
            self.open()
        width = self._dtype.itemsize
        first = begin * width // layout.BLOCK_BYTES
        start = first * layout.BLOCK_BYTES
        last = -(-(begin + out.size) * width // layout.BLOCK_BYTES)
        stop = min(last * layout.BLOCK_BYTES, self._data_bytes)
        data = self._verified(first, start, stop)
        out[:] = np.frombuffer(data, self._dtype, count=out.size, offset=begin * width - start)

    def _verified(self, first_block: int, start: int, stop: int) -> memoryview:
        data = self._bytes(layout.HEADER_BYTES + start, stop - start)
        try:
            self._check(data, first_block)
        except DataError:
            if self.local:
                raise
            # a transfer can damage what lies intact in the store: one more try before the file is blamed
            data = self._bytes(layout.HEADER_BYTES + start, stop - start)
            self._check(data, first_block)
        return data

    def _check(self, data: memoryview, first_block: int) -> None:
        assert self._checksums is not None
        for number, start in enumerate(range(0, len(data), layout.BLOCK_BYTES), start=first_block):
            layout.check_block(data[start : start + layout.BLOCK_BYTES], self._checksums[number], self.path, number)

    def _bytes(self, start: int, length: int) -> memoryview:
        if not self.local:
            data = memoryview(store.read_range(self.path, start, length))
            if len(data) != length:
                raise layout.short_file(self.path, start + len(data), self.entry.n_bytes)
            return data
        buffer: npt.NDArray[Any] = np.empty(length, dtype=np.uint8)
        view = buffer.data
        done = 0
        while done < length:
            n = os.preadv(self._descriptor, [view[done:]], start + done)
            if n == 0:
                raise layout.short_file(self.path, start + done, self.entry.n_bytes)
            done += n
        return view

    def _agree(self, header: layout.Header) -> None:
        manifest = self.manifest
        pairs = (
            ("tokens", header.n_tokens, self.entry.n_tokens),
            ("bytes per token", header.token_bytes, self._dtype.itemsize),
            ("end-of-document id", header.eod_id, manifest.eod_id),
            ("tokenizer", header.tokenizer_digest, manifest.tokenizer_digest),
        )
        for what, found, expected in pairs:
            if found != expected:
                raise DataError(f"{self.path} does not fit its manifest: {what} {found}, not {expected}")

    def verify(self) -> None:
        if not self.local:
            raise DataError(f"{self.path} is not local, so it is not read whole", hint="copy the folder here first")
        found = sha256_file(self.path)
        if found != self.entry.digest:
            raise DataError(f"{self.path} has the SHA-256 {found}, the manifest says {self.entry.digest}")

    def close(self) -> None:
        descriptor, self._descriptor = self._descriptor, -1
        self._checksums = None
        if descriptor >= 0:
            os.close(descriptor)

    def __del__(self) -> None:
        self.close()
