"""Held-out bits per byte: the bits that the model needs for a byte of text that it was not trained on.

    bits per byte = nats of ALL tokens / ln 2 / UTF-8 bytes of the documents

*All* tokens: those of a document and the end-of-document token after it, so the number does not depend on the
tokenizer. The context starts with the begin token and has no other document. ``gzip -9`` and ``xz -9`` are for
comparison.
"""

import gzip
import lzma
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import nn

from smalti.base import store
from smalti.base.errors import DataError
from smalti.base.rng import derive_key
from smalti.config.eval import EvalConfig
from smalti.data.tokenizer.encode import Tokenizer, load_tokenizer
from smalti.data.tokens.reader import TokenSource
from smalti.evals.bf16 import copy_that_agrees
from smalti.evals.likelihood import Progress, Window, score
from smalti.evals.results import TaskResult
from smalti.evals.statistics.intervals import bootstrap_ratio
from smalti.evals.tasks.text_files import is_text_file, read_texts
from smalti.model.dtypes import DTYPES
from smalti.serve.engine.engine import Engine


@dataclass(frozen=True)
class Document:
    """A held-out document: its place in the token files, its text, its tokens without an end token."""

    index: int
    text: bytes
    ids: NDArray[np.int64]


def run(
    source: str,
    folder: str,
    engine: Engine,
    config: EvalConfig,
    seq_len: int,
    progress: Progress = lambda done, total: None,
    *,
    try_bf16: bool = False,
) -> TaskResult:
    """Measure the bits per byte of the token files in ``folder``, with a bootstrap over documents, and gzip's and xz's.

    ``try_bf16``: compute in bfloat16 if that gives the same result on a sample of the text.
    """
    documents = load_documents(source, folder, engine.tokenizer, seed=config.seed, max_bytes=config.max_bytes)
    overlap = min(math.ceil(seq_len * config.overlap_frac), seq_len - 1)
    windows: list[Window] = []
    owner: list[int] = []
    for row, document in enumerate(documents):
        ids = np.concatenate([[engine.begin_id], document.ids, [engine.end_id]]).astype(np.int64)
        document_windows = sliding_windows(ids, seq_len, overlap)
        windows += document_windows
        owner += [row] * len(document_windows)
    n_bytes = np.array([len(document.text) for document in documents], dtype=np.float64)
    model: nn.Module = engine.model
    if try_bf16:
        bytes_per_token = n_bytes.sum() / sum(len(document.ids) + 1 for document in documents)
        faster = copy_that_agrees(model, windows, bytes_per_token=bytes_per_token, batch_tokens=config.batch_tokens)
        model = faster or model
    by_window = score(model, windows, batch_tokens=config.batch_tokens, progress=progress)
    nats = np.bincount(owner, weights=by_window, minlength=len(documents)).astype(np.float64)
    result = _result(nats, n_bytes, documents, config, key=derive_key("bootstrap", config.seed, source))
    samples = [
        {
            "index": document.index,
            "beginning": document.text[:200].decode("utf-8", "ignore"),
            "n_bytes": len(document.text),
            "n_tokens": len(document.ids) + 1,
            "nats": float(value),
        }
        for document, value in zip(documents, nats, strict=True)
    ]
    dtype = next(model.parameters()).dtype
    name = next(name for name, known in DTYPES.items() if known == dtype)
    settings = {"seq_len": seq_len, "overlap_tokens": overlap, "compute_dtype": name}
    return TaskResult(f"heldout/{source}", {**result, **settings}, samples)


def sliding_windows(ids: NDArray[np.int64], seq_len: int, overlap: int) -> list[Window]:
    """Return windows of at most ``seq_len`` inputs over a document (begin token first) that score each target once.

    Each starts with the last ``overlap`` inputs (fewer than ``seq_len``) of the one before.
    """
    windows = [Window(ids[: seq_len + 1], 1)]
    scored_end, start = min(len(ids), seq_len + 1), 0
    while scored_end < len(ids):
        start += seq_len - overlap
        end = min(len(ids), start + seq_len + 1)
        windows.append(Window(ids[start:end], scored_end - start))
        scored_end = end
    return windows


def load_documents(
    source: str, folder: str, tokenizer: Tokenizer, *, seed: int, max_bytes: int | None
) -> list[Document]:
    """Return the documents of a folder of token files, or of a text file, tokenised by ``tokenizer``.

    Tokens of the same tokenizer are used as they are; those of another are decoded with theirs (in ``tokenizer/`` two
    folders up, where ``smalti data tokenize`` writes it) and encoded again, which changes no byte.
    """
    if is_text_file(folder):
        texts, rows = read_texts(folder), None
    else:
        texts, rows = _texts_of_tokens(folder, tokenizer)
    documents: list[Document] = []
    for index in choose_documents([len(text) for text in texts], source, seed=seed, max_bytes=max_bytes):
        row = np.array(tokenizer.encode(texts[index].decode()), dtype=np.int64) if rows is None else rows[index]
        documents.append(Document(index, texts[index], row))
    if not sum(len(document.text) for document in documents):
        raise DataError(f"the held-out source '{source}' ({folder}) contains no text")
    return documents


def _texts_of_tokens(folder: str, tokenizer: Tokenizer) -> tuple[list[bytes], list[NDArray[np.int64]] | None]:
    """Return the texts of token files, and their tokens where they are of ``tokenizer``, without end tokens."""
    tokens = TokenSource(folder)
    manifest = tokens.manifest
    is_same = tokenizer.digest == manifest.tokenizer_digest
    decoder = tokenizer if is_same else load_tokenizer(_tokenizer_folder(folder))
    if not is_same and decoder.digest != manifest.tokenizer_digest:
        raise DataError(
            f"{_tokenizer_folder(folder)} is not the tokenizer of the token files in {folder}",
            allowed=f"the tokenizer with digest {manifest.tokenizer_digest[:12]}",
            hint="tokenize the held-out documents again: smalti data tokenize",
        )
    ids = tokens.read(0, manifest.n_tokens)
    ends = np.flatnonzero(ids == manifest.eod_id)
    rows = [document[:-1] for document in np.split(ids, ends + 1)[: len(ends)]]
    texts = [decoder.decode(row.tolist()).encode("utf-8", "surrogatepass") for row in rows]
    n_bytes = sum(map(len, texts))
    if manifest.n_text_bytes not in (0, n_bytes):
        raise DataError(
            f"the tokens in {folder} decode to {n_bytes:,} bytes, but their manifest has {manifest.n_text_bytes:,}",
            hint="bits per byte needs a lossless (byte-level) tokenizer; tokenize again: smalti data tokenize",
        )
    return texts, rows if is_same else None


def choose_documents(sizes_bytes: list[int], source: str, *, seed: int, max_bytes: int | None) -> list[int]:
    """Return the numbers of the documents to score, in ascending order.

    If there is more text than ``max_bytes``, whole documents are chosen in the order of key(seed, source, index) until
    the next one does not fit; the first is always chosen.
    """
    if max_bytes is None or sum(sizes_bytes) <= max_bytes:
        return list(range(len(sizes_bytes)))
    order = sorted(range(len(sizes_bytes)), key=lambda index: derive_key("heldout", seed, source, index))
    chosen: list[int] = []
    total = 0
    for index in order:
        if chosen and total + sizes_bytes[index] > max_bytes:
            break
        chosen.append(index)
        total += sizes_bytes[index]
    return sorted(chosen)


def compressed_bits_per_byte(texts: list[bytes]) -> dict[str, float]:
    """Return the bits per byte of ``gzip -9`` and ``xz -9`` over the joined texts, containers included.

    These are Python's zlib level 9 and LZMA2 preset 9. Their context is all texts, a model's only the document.
    """
    joined = b"".join(texts)
    return {
        "gzip_bits_per_byte": 8 * len(gzip.compress(joined, compresslevel=9, mtime=0)) / len(joined),
        "xz_bits_per_byte": 8 * len(lzma.compress(joined, format=lzma.FORMAT_XZ, preset=9)) / len(joined),
    }


def _tokenizer_folder(folder: str) -> str:
    parent = folder.rstrip("/").rsplit("/", 2)[0] if folder.rstrip("/").count("/") >= 2 else "."
    return store.join(parent, "tokenizer")


def _result(
    nats: NDArray[np.float64], n_bytes: NDArray[np.float64], documents: list[Document], config: EvalConfig, *, key: int
) -> dict[str, Any]:
    bits = nats / math.log(2)
    spread = bootstrap_ratio(bits, n_bytes, seed=key, resamples=config.resamples)
    n_tokens = sum(len(document.ids) + 1 for document in documents)
    return {
        "metric": "bits_per_byte",
        "value": float(bits.sum() / n_bytes.sum()),
        "stderr": spread[0] if spread else None,
        "interval": list(spread[1]) if spread else None,
        "interval_method": "student's t 95 %, bootstrap over documents",
        "n": len(documents),
        "n_documents": len(documents),
        "n_bytes": int(n_bytes.sum()),
        "n_tokens": n_tokens,
        "nats": float(nats.sum()),
        "nats_per_token": float(nats.sum() / n_tokens),
        **compressed_bits_per_byte([document.text for document in documents]),
    }
