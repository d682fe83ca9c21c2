"""Documents as text (JSONL, Parquet), tokenised when they are opened and held in memory: for small sets.

The same files and tokenizer give the same tokens on every rank; each rank checks the SHA-256 of the files. A set above
``LIMIT_BYTES`` is an error before it is read.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from smalti.base.errors import DataError, UserError
from smalti.base.hashing import digest_json, sha256_bytes
from smalti.base.units import format_bytes
from smalti.config.data import SourceConfig
from smalti.config.token_formats import FORMATS
from smalti.data.fetch import Files
from smalti.data.sources.readers.documents import Documents
from smalti.data.sources.readers.file_names import expand_names, map_files
from smalti.data.sources.readers.index import Index, SourceFolder
from smalti.data.sources.source import Int64s
from smalti.data.tokenizer.encode import Tokenizer, load_tokenizer

LIMIT_BYTES = 256 << 20
_SAMPLE = 16
_HINT = "run 'smalti data curate' and 'smalti data tokenize' once, and name the token files they write"


def read_index(folder: SourceFolder) -> Index:
    """Read the files; the index has their digests and that of the tokenizer."""
    files = folder.files
    suffixes = FORMATS["text"].suffixes
    names = [folder.file] if folder.file else expand_names(files, folder.config.files, suffixes)
    for name in names:
        if not name.endswith(suffixes):
            raise UserError(f"{files.where}/{name} is not a file of text", allowed=f"names in {', '.join(suffixes)}")
    sizes = dict(zip(names, map_files(files, files.size, names), strict=True))
    _refuse_large(files.where, sum(sizes.values()))
    entries = [[name, sizes[name], sha256_bytes(files.whole(name))] for name in names]
    return Index("text", {"files": entries, "tokenizer": _tokenizer(folder.tokenizer).digest})


def open_source(folder: SourceFolder, index: Index) -> "TextSource":
    """Read and tokenise all documents."""
    loaded = _tokenizer(folder.tokenizer)
    if loaded.digest != index.facts["tokenizer"]:
        raise DataError(
            f"the tokenizer {folder.tokenizer} differs from the one on the rank that read the index",
            hint="give all ranks the same folder",
        )
    return TextSource(folder.files.where, index, loaded, _texts(folder.config, index, folder.files))


class TextSource:
    """A ``Source`` (``data/sources/source.py``) of tokenised text in memory."""

    checked = "whole files at opening (SHA-256); then tokens stay in memory"

    def __init__(self, where: str, index: Index, tokenizer: Tokenizer, texts: Iterator[list[str]]) -> None:
        self.where = where
        self.eod_id: int | None = tokenizer.eod_id
        self.vocab_size: int | None = tokenizer.vocab_size
        self.tokenizer_digest: str | None = tokenizer.digest
        self.digest = digest_json({"form": "text", **index.facts})
        self.dtype: np.dtype[Any] = np.dtype("<u2" if tokenizer.vocab_size <= 1 << 16 else "<u4")
        parts = [np.empty(0, self.dtype)]
        lengths = []
        for batch in texts:
            for ids in _encoded(tokenizer, batch):
                parts.append(np.array([*ids, tokenizer.eod_id], self.dtype))
                lengths.append(len(ids) + 1)
        self._tokens = np.concatenate(parts)
        ends = np.cumsum(lengths, dtype=np.int64)
        self.n_tokens = int(self._tokens.size)
        self.n_documents: int | None = len(lengths)
        if not lengths:
            raise DataError(f"{where} holds no documents")
        counts = np.array([len(lengths)], dtype=np.int64)
        tokens = np.array([self.n_tokens], dtype=np.int64)
        self._documents = Documents(counts, tokens, lambda shard: ends)

    def read_rows(self, begins: Int64s, out: npt.NDArray[Any]) -> None:
        """Fill ``out`` [n, length] of ``dtype``: row i with tokens [begins[i], begins[i] + length)."""
        assert out.dtype == self.dtype, (out.dtype, self.dtype)
        length = out.shape[1]
        if out.size:
            self._require(int(begins.min()), int(begins.max()) + length)
        for row, begin in zip(out, begins.tolist(), strict=True):
            row[:] = self._tokens[begin : begin + length]

    def read(self, begin_token: int, n: int) -> npt.NDArray[np.int64]:
        """Return tokens [begin_token, begin_token + n) as int64 [n]."""
        self._require(begin_token, begin_token + n)
        return self._tokens[begin_token : begin_token + n].astype(np.int64)

    def documents_at(self, tokens: Int64s) -> Int64s:
        """Return the number of the document of each token [n]."""
        if tokens.size:
            self._require(int(tokens.min()), int(tokens.max()) + 1)
        return self._documents.at(tokens)

    def document_span(self, document: int) -> tuple[int, int]:
        """Return the tokens [begin, end) of a document, including its closing token."""
        return self._documents.span(document)

    def verify(self) -> None:
        """Do nothing: the files were verified when they were opened."""

    def close(self) -> None:
        """Do nothing: no file is open; the tokens stay in memory."""

    def _require(self, begin: int, end: int) -> None:
        if begin < 0 or end > self.n_tokens:
            raise DataError(f"tokens {begin:,} to {end:,} are outside {self.where}", allowed=f"0 to {self.n_tokens:,}")


def _tokenizer(path: str | None) -> Tokenizer:
    if path is None:
        raise UserError(
            "a source of text is tokenised when it is opened, and no tokenizer is given",
            hint="data.tokenizer=FOLDER (as 'smalti data tokenize' writes it, or a tokenizer.json)",
        )
    return load_tokenizer(path)


def _texts(config: SourceConfig, index: Index, files: Files) -> Iterator[list[str]]:
    """Yield batches of texts in the order of files and rows; each file is read whole and checked by its digest."""
    import pyarrow.compute as pc

    from smalti.data.documents.files import held_file
    from smalti.data.documents.readers import ReadOptions, ReadTask

    size = 0
    for name, _, digest in index.facts["files"]:
        data = files.whole(name, partial(_require_digest, digest, f"{files.where}/{name}"))
        task = ReadTask(
            (held_file(f"{files.where}/{name}", data),),
            ReadOptions(text_field=config.column or "text", limit_bytes=LIMIT_BYTES),
        )
        batches = task.batches()
        while (batch := _next(batches)) is not None:
            texts = batch.column("text")
            size += pc.sum(pc.binary_length(texts)).as_py() or 0
            _refuse_large(files.where, size)
            yield texts.to_pylist()


def _require_digest(digest: str, path: str, data: bytes) -> None:
    if sha256_bytes(data) != digest:
        raise DataError(f"{path} was changed after it was opened", hint="start again")


def _next(batches: Iterator[Any]) -> Any:
    """Return the next batch, or None at the end; replaces the hint of errors, which is for a curation."""
    try:
        return next(batches, None)
    except DataError as error:
        raise DataError(
            error.message,
            allowed=error.allowed,
            hint="name the field of the text (column=) or fix the file; 'smalti data curate' can drop such records",
        ) from error


def _encoded(tokenizer: Tokenizer, texts: list[str]) -> list[list[int]]:
    """Return the ids of each text; the fast engine is compared with the exact one on the first texts of each batch."""
    bulk = not tokenizer.slow_because
    if bulk:
        sample = [text[:1000] for text in texts[:_SAMPLE]]
        bulk = tokenizer.encode_batch(sample) == [tokenizer.encode(text) for text in sample]
    encoded = tokenizer.encode_batch(texts, threads=2) if bulk else [tokenizer.encode(text) for text in texts]
    for text, ids in zip(texts, encoded, strict=True):
        if tokenizer.eod_id in ids:
            raise DataError(f"a document contains the end-of-document token: {text[:80]!r}", hint=_HINT)
    return encoded


def _refuse_large(where: str, n_bytes: int) -> None:
    if n_bytes > LIMIT_BYTES:
        raise UserError(
            f"{where} holds {format_bytes(n_bytes)} or more: every rank would read and tokenise it at every start",
            allowed=f"{format_bytes(LIMIT_BYTES)} for text that is tokenised on the fly",
            hint=_HINT,
        )
