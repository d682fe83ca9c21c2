"""Writes documents into token files.

Promises: each file appears whole or not at all, the manifest comes last, so a writer that was killed leaves a folder
that no reader takes for a data set. Memory stays near ``_FLUSH_TOKENS`` tokens. Does not promise to append to a
finished data set, nor to write to an object store (write locally, then copy the folder).
"""

import os
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Literal, Self

import numpy as np
import numpy.typing as npt

from smalti.base import store
from smalti.base.errors import DataError, UserError
from smalti.base.hashing import sha256_file, xxh3
from smalti.data.tokens import format as layout
from smalti.data.tokens import manifest as manifests
from smalti.data.tokens.manifest import Manifest, TokenFile

_FLUSH_TOKENS = 1 << 20
DEFAULT_FILE_TOKENS = 1 << 28


class TokenWriter:
    """Documents in, token files and a manifest out. Use as a context manager: an error then leaves no manifest."""

    def __init__(
        self,
        folder: str | Path,
        *,
        vocab_size: int,
        eod_id: int,
        tokenizer_digest: str,
        file_tokens: int = DEFAULT_FILE_TOKENS,
    ) -> None:
        """``tokenizer_digest``: hex SHA-256; ``file_tokens``: tokens in each file but the last."""
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
        if len(tokenizer_digest) != 64 or set(tokenizer_digest) - set("0123456789abcdef"):
            raise UserError(
                f"tokenizer_digest is '{tokenizer_digest}'", allowed="a SHA-256 in 64 lower-case hex digits"
            )
        if file_tokens < 1:
            raise UserError(f"file_tokens is {file_tokens}", allowed="1 or more")
        if store.exists(store.join(folder, manifests.FILE_NAME)):
            raise UserError(f"{folder} already holds token files", hint="name another folder, or remove this one first")
        self.folder = Path(store.make_folder(folder))
        self.vocab_size, self.eod_id, self.tokenizer_digest = vocab_size, eod_id, tokenizer_digest
        self.n_documents = 0
        self.n_text_bytes = 0
        self._file_tokens = file_tokens
        self._dtype = np.dtype("<u2" if layout.token_bytes_for(vocab_size) == 2 else "<u4")
        self._pending: list[npt.NDArray[Any]] = []
        self._pending_tokens = 0
        self._open: _OpenFile | None = None
        self._files: list[TokenFile] = []
        self._closed = False

    def add(self, ids: npt.ArrayLike, n_text_bytes: int = 0) -> None:
        """Append one document: its ids [n] WITHOUT the end-of-document id, which is written after them.

        ``n_text_bytes`` is the document's length in UTF-8, the denominator of bits per byte. Raises DataError for an
        id outside the vocabulary and for a document that contains the end-of-document id (it would be cut in two).
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
        self._pending += [array.astype(self._dtype), np.array([self.eod_id], self._dtype)]
        self._pending_tokens += array.size + 1
        self.n_documents += 1
        self.n_text_bytes += n_text_bytes
        if self._pending_tokens >= _FLUSH_TOKENS:
            self._flush()

    def close(self) -> Manifest:
        """Finish the last file and write the manifest. Raises DataError when no document was added."""
        assert not self._closed, "close() twice"
        if self.n_documents == 0:
            self.abort()
            raise DataError(
                f"no document was written to {self.folder}: the corpus is empty",
                hint="check the source's path and its quality rules",
            )
        self._flush()
        self._finish_file()
        self._closed = True
        manifest = Manifest(
            format=manifests.FORMAT,
            dtype=self._dtype_name(),
            n_tokens=sum(file.n_tokens for file in self._files),
            n_documents=self.n_documents,
            n_text_bytes=self.n_text_bytes,
            eod_id=self.eod_id,
            vocab_size=self.vocab_size,
            tokenizer_digest=self.tokenizer_digest,
            files=tuple(self._files),
        )
        manifest = Manifest(**{**vars(manifest), "digest": manifest.content_digest()})
        manifest.save(self.folder)
        return manifest

    def abort(self) -> None:
        """Drop the file that is being written; no manifest will come."""
        self._closed = True
        if self._open is not None:
            self._open.discard()
            self._open = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self.abort()
        elif not self._closed:
            self.close()

    def _dtype_name(self) -> Literal["u16", "u32"]:
        return "u16" if self._dtype.itemsize == 2 else "u32"

    def _flush(self) -> None:
        if not self._pending:
            return
        tokens = np.concatenate(self._pending)
        self._pending, self._pending_tokens = [], 0
        while tokens.size:
            if self._open is None:
                self._open = _OpenFile(self.folder / f"tokens-{len(self._files):05d}.tok")
            room = self._file_tokens - self._open.n_tokens
            self._open.write(tokens[:room])
            tokens = tokens[room:]
            if self._open.n_tokens == self._file_tokens:
                self._finish_file()

    def _finish_file(self) -> None:
        if self._open is not None:
            self._files.append(self._open.finish(self._dtype.itemsize, self.eod_id, self.tokenizer_digest))
            self._open = None


class _OpenFile:
    """One token file on its way, under a temporary name."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.n_tokens = 0
        self._temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        self._file: IO[bytes] = open(self._temporary, "w+b")  # noqa: SIM115 (closed by finish or discard)
        self._file.write(bytes(layout.HEADER_BYTES))
        self._partial = b""
        self._checksums: list[int] = []

    def write(self, tokens: npt.NDArray[Any]) -> None:
        data = tokens.tobytes()
        self._file.write(data)
        self.n_tokens += tokens.size
        data = self._partial + data
        whole = len(data) // layout.BLOCK_BYTES * layout.BLOCK_BYTES
        view = memoryview(data)
        for start in range(0, whole, layout.BLOCK_BYTES):
            self._checksums.append(xxh3(view[start : start + layout.BLOCK_BYTES]))
        self._partial = data[whole:]

    def finish(self, token_bytes: int, eod_id: int, tokenizer_digest: str) -> TokenFile:
        if self._partial:
            self._checksums.append(xxh3(self._partial))
        header = layout.Header(token_bytes, self.n_tokens, eod_id, tokenizer_digest)
        table = layout.pack_checksums(self._checksums)
        try:
            self._file.write(table)
            self._file.seek(0)
            self._file.write(layout.pack_header(header))
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            digest = sha256_file(self._temporary)
            os.replace(self._temporary, self.path)
        except BaseException:
            self.discard()
            raise
        own = f"{xxh3(table[: -layout.CHECKSUM_BYTES]):016x}"
        return TokenFile(self.path.name, self.n_tokens, header.file_bytes, digest, own)

    def discard(self) -> None:
        self._file.close()
        self._temporary.unlink(missing_ok=True)
