"""Writes documents into token files.

Each file appears when it is complete and the manifest is written last, so an interrupted writer leaves a folder that no
reader accepts as a data set. A second writer in the same folder is an error. Memory: about ``_FLUSH_TOKENS`` tokens.
Cannot append to a finished data set or write to an object store (write locally, then copy the folder).
"""

import fcntl
import os
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

import numpy as np
import numpy.typing as npt

from smalti.base import store
from smalti.base.errors import DataError, UserError
from smalti.data.tokens import format as layout
from smalti.data.tokens import manifest as manifests
from smalti.data.tokens.atomic_file import AtomicFile
from smalti.data.tokens.document_ids import IDS_NAME, IdWriter
from smalti.data.tokens.manifest import Manifest

_FLUSH_TOKENS = 1 << 20
DEFAULT_FILE_TOKENS = 1 << 28
_LEFT_OVER = ("tokens-*.tok", ".tokens-*.tok.*.tmp", f".{IDS_NAME}.*.tmp", IDS_NAME)
"""Files that a killed writer may leave, which the next writer removes."""


class TokenWriter:
    """Writes documents to token files and a manifest.

    Use it as a context manager, so that no manifest is written after an error.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        vocab_size: int,
        eod_id: int,
        tokenizer_digest: str,
        salt: str | None = None,
        file_tokens: int = DEFAULT_FILE_TOKENS,
    ) -> None:
        """``tokenizer_digest``: hex SHA-256; ``file_tokens``: tokens in each file but the last.

        ``salt``: 16 hex digits that identify the content, so that a block of another data set fails its check; equal
        documents with equal salt give equal bytes. None: a random salt.
        """
        if not store.is_local(folder):
            raise UserError(
                f"token files cannot be written to '{folder}'",
                allowed="a local folder",
                hint="write locally, then copy",
            )
        if not 1 <= vocab_size <= 1 << 32:
            raise UserError(f"vocab_size is {vocab_size}", allowed="1 to 4294967296")
        if not 0 <= eod_id < vocab_size:
            raise UserError(f"eod_id is {eod_id}", allowed=f"an id of the vocabulary, 0 to {vocab_size - 1}")
        if salt is None:
            salt = os.urandom(8).hex()
        for name, value, digits in (("tokenizer_digest", tokenizer_digest, 64), ("salt", salt, 16)):
            if len(value) != digits or set(value) - set("0123456789abcdef"):
                raise UserError(f"{name} is '{value}'", allowed=f"{digits} lower-case hex digits")
        if file_tokens < 1:
            raise UserError(f"file_tokens is {file_tokens}", allowed="1 or more")
        self.folder = Path(store.make_folder(folder))
        self.vocab_size = vocab_size
        self.eod_id = eod_id
        self.tokenizer_digest = tokenizer_digest
        self.salt = salt
        self.n_documents = 0
        self.n_text_bytes = 0
        self._file_tokens = file_tokens
        self._dtype = np.dtype("<u2" if layout.token_bytes_for(vocab_size) == 2 else "<u4")
        self._pending: list[npt.NDArray[Any]] = []
        self._pending_tokens = 0
        self._open: _OpenFile | None = None
        self._ids: IdWriter | None = None
        self._digests: list[str] = []
        self._n_tokens = 0
        self._n_ended = 0
        self._closed = False
        self._lock = _lock(self.folder)
        if (self.folder / manifests.FILE_NAME).exists():
            self.abort()
            raise UserError(f"{folder} already holds token files", hint="name another folder, or remove this one first")
        for pattern in _LEFT_OVER:
            for path in self.folder.glob(pattern):
                path.unlink()

    def add(self, ids: npt.ArrayLike, n_text_bytes: int = 0, document_id: str | None = None) -> None:
        """Append one document: its ids [n] WITHOUT the end-of-document id, which is written after them.

        ``n_text_bytes`` is the document's length in UTF-8, the denominator of bits per byte; ``document_id`` (of all
        documents or of none) goes to ``ids.parquet``. Raises DataError for an id outside the vocabulary and for a
        document that contains the end-of-document id (it would be cut in two).
        """
        assert not self._closed, "add() after close()"
        array = np.asarray(ids)
        if array.size and (array.ndim != 1 or array.dtype.kind not in "iu"):
            raise DataError(f"document {self.n_documents} is {array.dtype} {array.shape}", allowed="integers [n]")
        lowest, highest = (int(array.min()), int(array.max())) if array.size else (0, 0)
        if lowest < 0 or highest >= self.vocab_size:
            raise DataError(
                f"document {self.n_documents} has the id {lowest if lowest < 0 else highest}",
                allowed=f"0 to {self.vocab_size - 1}",
                hint="give the vocab_size of the tokenizer that made the ids",
            )
        if bool((array == self.eod_id).any()):
            raise DataError(
                f"document {self.n_documents} contains the end-of-document id {self.eod_id}",
                hint="encode documents with special tokens switched off",
            )
        self._add_id(document_id)
        self._pending += [array.astype(self._dtype), np.array([self.eod_id], self._dtype)]
        self._pending_tokens += array.size + 1
        self.n_documents += 1
        self.n_text_bytes += n_text_bytes
        if self._pending_tokens >= _FLUSH_TOKENS:
            self._flush()

    def close(self) -> Manifest:
        """Finish the last file and write the manifest. Raises DataError if no document was added."""
        assert not self._closed, "close() twice"
        if self.n_documents == 0:
            self.abort()
            raise DataError(
                f"no document was written to {self.folder}: the corpus is empty",
                hint="check the source's path and its quality rules",
            )
        try:
            self._flush()
            self._finish_file()
            manifest = Manifest(
                format=manifests.FORMAT,
                dtype="u16" if self._dtype.itemsize == 2 else "u32",
                n_tokens=self._n_tokens,
                n_documents=self.n_documents,
                n_text_bytes=self.n_text_bytes,
                eod_id=self.eod_id,
                vocab_size=self.vocab_size,
                tokenizer_digest=self.tokenizer_digest,
                salt=self.salt,
                file_tokens=self._file_tokens,
                sha256=manifests.join_digests(self._digests),
                ids_sha256=self._ids.finish() if self._ids is not None else "",
            ).with_digest()
            manifest.save(self.folder)
            self._ids = None
        finally:
            self.abort()
        return manifest

    def abort(self) -> None:
        """Discard the file that is being written; no manifest is written. Does nothing after ``close``."""
        self._closed = True
        for unfinished in (self._open, self._ids):
            if unfinished is not None:
                unfinished.discard()
        self._open = self._ids = None
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self.abort()
        elif not self._closed:
            self.close()

    def _add_id(self, document_id: str | None) -> None:
        if document_id is not None and self.n_documents == 0:
            self._ids = IdWriter(self.folder)
        if (self._ids is None) != (document_id is None):
            raise DataError(
                f"document {self.n_documents} has {'no' if document_id is None else 'an'} id, unlike earlier documents",
                allowed="ids for all documents of a data set, or for none",
            )
        if self._ids is not None and document_id is not None:
            self._ids.add(document_id)

    def _flush(self) -> None:
        if not self._pending:
            return
        tokens = np.concatenate(self._pending)
        self._pending = []
        self._pending_tokens = 0
        while tokens.size:
            if self._open is None:
                self._open = _OpenFile(self.folder, self._header(), self._first_block(), self._n_ended)
            room = self._file_tokens - self._open.n_tokens
            self._open.write(tokens[:room])
            tokens = tokens[room:]
            if self._open.n_tokens == self._file_tokens:
                self._finish_file()

    def _finish_file(self) -> None:
        if self._open is not None:
            self._digests.append(self._open.finish())
            self._n_tokens += self._open.n_tokens
            self._n_ended = self._open.n_ended
            self._open = None

    def _header(self) -> layout.Header:
        width = self._dtype.itemsize
        salt = int(self.salt, 16)
        return layout.Header(width, self._file_tokens, self.eod_id, self.tokenizer_digest, salt, len(self._digests))

    def _first_block(self) -> int:
        return len(self._digests) * layout.n_blocks(self._file_tokens, self._dtype.itemsize)


class _OpenFile:
    """A token file that is being written, under a temporary name."""

    def __init__(self, folder: Path, header: layout.Header, first_block: int, n_ended: int) -> None:
        """``header`` of a full file; ``first_block`` and ``n_ended`` (documents) count through all files."""
        self.n_tokens = 0
        self.n_ended = n_ended
        self._header = header
        self._next_block = first_block
        self._block_tokens = layout.PAYLOAD_BYTES // header.token_bytes
        self._output = AtomicFile(folder / manifests.file_name(header.file))
        self._file: IO[bytes] = open(self._output.temporary, "w+b")  # noqa: SIM115 (closed by finish or discard)
        self._file.write(bytes(layout.HEADER_BYTES))
        self._rest: npt.NDArray[Any] = np.zeros(0, f"<u{header.token_bytes}")

    def write(self, tokens: npt.NDArray[Any]) -> None:
        self.n_tokens += tokens.size
        tokens = np.concatenate([self._rest, tokens]) if self._rest.size else tokens
        whole = tokens.size // self._block_tokens * self._block_tokens
        self._write_blocks(tokens[:whole])
        self._rest = tokens[whole:]

    def finish(self) -> str:
        """Write the header and rename the file to its final name; returns its SHA-256."""
        try:
            self._write_blocks(self._rest)
            self._file.seek(0)
            self._file.write(layout.pack_header(replace(self._header, n_tokens=self.n_tokens)))
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            return self._output.finish()
        except BaseException:
            self.discard()
            raise

    def discard(self) -> None:
        self._output.discard(self._file)

    def _write_blocks(self, tokens: npt.NDArray[Any]) -> None:
        if not tokens.size:
            return
        header = self._header
        blocks = layout.pack_blocks(
            tokens, eod_id=header.eod_id, before=self.n_ended, salt=header.salt, first_block=self._next_block
        )
        self._file.write(blocks.data.cast("B"))
        self._next_block += len(blocks)
        self.n_ended += int((tokens == header.eod_id).sum())


def _lock(folder: Path) -> int:
    """Lock the folder; returns the descriptor that holds the lock until it is closed or the process ends."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        raise UserError(f"another process is writing to {folder}", hint="wait until it has ended") from error
    return descriptor
