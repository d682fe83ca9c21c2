"""Looks into what curation and tokenization wrote: counts, lengths of documents, some documents as a reader sees them.

Promises: reads only; samples are evenly spaced, so a folder always shows the same ones; what was not read is said.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from smalti.base.errors import DataError
from smalti.data.curate.heldout import SPLITS
from smalti.data.curate.publish import read_record
from smalti.data.curate.report import FORMAT_KIND as CURATE_KIND
from smalti.data.curate.report import RECORD_NAME as CURATE_RECORD
from smalti.data.curate.tables import read_documents
from smalti.data.tokenize import KIND as TOKENIZE_KIND
from smalti.data.tokenize import RECORD_NAME as TOKENIZE_RECORD
from smalti.data.tokenize import TOKENIZER_FOLDER
from smalti.data.tokenizer.encode import Tokenizer, load_tokenizer
from smalti.data.tokens import TokenSource

_SCAN_TOKENS = 1 << 22
_SAMPLE_TOKENS = 512


def inspect_folder(
    folder: str, *, tokenizer: str | None = None, n_samples: int = 3, limit_tokens: int = 100_000_000
) -> dict[str, Any]:
    """Plain values about a folder of token files, the output of a tokenization, or the output of a curation.

    ``parts`` lists one entry a source and split: ``name``, ``manifest`` or ``counts``, ``lengths`` (``unit`` tokens
    without the end-of-document token, or bytes) and ``samples``. At most ``limit_tokens`` of each folder are read.
    DataError when the folder is none of the three, or the tokenizer is not the one that made the tokens.
    """
    if os.path.isfile(Path(folder) / "manifest.json"):
        return {"kind": "tokens", "parts": [_tokens(folder, "", tokenizer, n_samples, limit_tokens)]}
    if os.path.isfile(Path(folder) / TOKENIZE_RECORD):
        record = read_record(folder, kind=TOKENIZE_KIND, record_name=TOKENIZE_RECORD, verb="smalti data tokenize")
        names = [f"{source}/{split}" for source, splits in record["sources"].items() for split in splits]
        own = tokenizer or str(Path(folder) / TOKENIZER_FOLDER)
        parts = [_tokens(str(Path(folder) / name), name, own, n_samples, limit_tokens) for name in names]
        return {"kind": "tokenized", "parts": parts}
    if os.path.isfile(Path(folder) / CURATE_RECORD):
        record = read_record(folder, kind=CURATE_KIND, record_name=CURATE_RECORD, verb="smalti data curate")
        return {"kind": "documents", "parts": _documents(folder, record, n_samples)}
    raise DataError(
        f"{folder} holds nothing to inspect",
        allowed="a folder of token files, or the output folder of 'smalti data curate' or 'smalti data tokenize'",
    )


def length_summary(lengths: npt.NDArray[np.int64], unit: str) -> dict[str, Any]:
    """Count, mean, median, 90th percentile, longest, and a histogram whose bins double: [0], [1], [2, 3], [4, 7] ..."""
    if not lengths.size:
        return {"unit": unit, "documents": 0, "histogram": []}
    # bit length of each value, exact for all that a document can be (below 2**53)
    bins = np.frexp(lengths.astype(np.float64))[1].astype(np.int64)
    bins[lengths == 0] = 0
    counts = np.bincount(bins)
    return {
        "unit": unit,
        "documents": int(lengths.size),
        "mean": round(float(lengths.mean()), 1),
        "median": int(np.median(lengths)),
        "p90": int(np.percentile(lengths, 90)),
        "longest": int(lengths.max()),
        "histogram": [
            {"from": 2 ** (number - 1) if number else 0, "to": 2**number - 1 if number else 0, "documents": int(count)}
            for number, count in enumerate(counts)
            if number >= int(bins.min())
        ],
    }


def _tokens(folder: str, name: str, tokenizer: str | None, n_samples: int, limit_tokens: int) -> dict[str, Any]:
    source = TokenSource(folder)
    manifest = source.manifest
    ends = _document_ends(source, limit_tokens)
    lengths = np.diff(ends, prepend=-1) - 1
    loaded = _matching_tokenizer(folder, tokenizer, manifest.tokenizer_digest)
    samples = []
    for index in _evenly(ends.size, n_samples):
        begin = int(ends[index] - lengths[index])
        ids = source.read(begin, min(int(lengths[index]), _SAMPLE_TOKENS)).tolist()
        samples.append({"document": index, "n_tokens": int(lengths[index]), **_shown(ids, loaded)})
    part = {
        "name": name or folder,
        "manifest": {
            **{key: getattr(manifest, key) for key in ("dtype", "n_tokens", "n_documents", "n_text_bytes")},
            **{key: getattr(manifest, key) for key in ("vocab_size", "eod_id", "tokenizer_digest", "digest")},
            "files": len(manifest.files),
        },
        "lengths": length_summary(lengths, "tokens"),
        "samples": samples,
    }
    if source.n_tokens > limit_tokens:
        part["note"] = f"lengths are of the first {limit_tokens:,} tokens"
    return part


def _document_ends(source: TokenSource, limit_tokens: int) -> npt.NDArray[np.int64]:
    """Positions of the end-of-document tokens, among the first ``limit_tokens``."""
    found = []
    stop = min(source.n_tokens, limit_tokens)
    for begin in range(0, stop, _SCAN_TOKENS):
        tokens = source.read(begin, min(_SCAN_TOKENS, stop - begin))
        found.append(np.flatnonzero(tokens == source.manifest.eod_id) + begin)
    return np.concatenate(found).astype(np.int64)


def _matching_tokenizer(folder: str, given: str | None, digest: str) -> Tokenizer | None:
    """The tokenizer that is named, or one that lies beside the tokens; None when there is none beside them."""
    if given is None:
        parents = Path(folder).resolve().parents
        beside = [parent / TOKENIZER_FOLDER for parent in parents[:2]]
        given = next((str(path) for path in beside if path.is_dir()), None)
    if given is None:
        return None
    tokenizer = load_tokenizer(given)
    if tokenizer.digest != digest:
        raise DataError(
            f"{given} is not the tokenizer that made the tokens of {folder}",
            allowed=f"the one with the digest {digest[:12]}..., not {tokenizer.digest[:12]}...",
            hint="name the right one: --tokenizer FOLDER",
        )
    return tokenizer


def _shown(ids: list[int], tokenizer: Tokenizer | None) -> dict[str, Any]:
    return {"ids": ids} if tokenizer is None else {"text": tokenizer.decode(ids, skip_special=False)}


def _documents(folder: str, record: dict[str, Any], n_samples: int) -> list[dict[str, Any]]:
    parts = []
    for source, splits in record["sources"].items():
        for split in SPLITS:
            path = Path(folder) / "documents" / source / f"{split}.parquet"
            n = splits[split]["documents"]["kept"]
            wanted = set(_evenly(n, n_samples))
            lengths, samples = np.zeros(n, dtype=np.int64), []
            for index, row in enumerate(read_documents(path)):
                lengths[index] = row["n_bytes"]
                if index in wanted:
                    samples.append(
                        {"document": index, "id": row["id"], "n_bytes": row["n_bytes"], "text": row["text"][:2000]}
                    )
            parts.append(
                {
                    "name": f"{source}/{split}",
                    "counts": splits[split],
                    "lengths": length_summary(lengths, "bytes"),
                    "samples": samples,
                }
            )
    return parts


def _evenly(n: int, k: int) -> Sequence[int]:
    """``k`` indices in the middle of ``k`` equal parts of ``n``."""
    k = min(n, k)
    return [(2 * i + 1) * n // (2 * k) for i in range(k)]
