"""``smalti data inspect``: counts, document lengths and sample documents of a curation, a tokenization, or tokens.

Reads only. Samples are evenly spaced, so a folder always shows the same ones; a note says what was not read.
"""

import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from smalti.base import store
from smalti.base.errors import DataError, nearest
from smalti.config.data import FetchConfig, SourceConfig
from smalti.config.load import from_dict
from smalti.data.documents.heldout import SPLITS
from smalti.data.documents.parquet import DROP_SCHEMA, read_documents
from smalti.data.documents.publish import read_record
from smalti.data.prepare.curate.report import RECORD_NAME as CURATE_RECORD
from smalti.data.prepare.curate.report import read_report
from smalti.data.prepare.tokenize import KIND as TOKENIZE_KIND
from smalti.data.prepare.tokenize import RECORD_NAME as TOKENIZE_RECORD
from smalti.data.prepare.tokenize import TOKENIZER_FOLDER
from smalti.data.sources.document_lengths import context_summary, find_documents, length_curve, length_summary
from smalti.data.sources.open import open_source, read_index
from smalti.data.sources.source import Source
from smalti.data.tokenizer.encode import TOKENIZER_FILE, Tokenizer, load_tokenizer
from smalti.data.tokens import TokenSource

_SAMPLE_TOKENS = 512


def inspect_folder(
    folder: str,
    *,
    options: Sequence[str] = (),
    tokenizer: str | None = None,
    n_samples: int = 3,
    limit_tokens: int = 100_000_000,
) -> dict[str, Any]:
    """Describe a folder of tokens in any format that a run can read, or the output of a tokenization or a curation.

    Args:
        options: Fields of a source, such as ``format=mds``.
        limit_tokens: Of a larger folder about this many tokens are read, at evenly spaced places.

    Returns:
        Plain values. ``parts`` has an entry for each source and split: ``name``, ``manifest`` or ``counts``,
        ``lengths`` (``unit`` tokens without the end-of-document token, or bytes) and ``samples``; for tokens also
        ``contexts`` and ``curve`` (see ``document_lengths``). For a curation ``drops`` has an entry for each source,
        split and rule: the number of ``documents``, and ``samples`` with their ``id``, ``reason`` and ``score``.

    Raises:
        DataError: the folder is none of these, or the tokenizer is not the one that wrote the tokens.
    """
    if store.is_local(folder) and not options:
        if os.path.isfile(Path(folder) / TOKENIZE_RECORD):
            record = read_record(folder, kind=TOKENIZE_KIND, record_name=TOKENIZE_RECORD, verb="smalti data tokenize")
            names = [f"{source}/{split}" for source, splits in record["sources"].items() for split in splits]
            tokenizer = tokenizer or str(Path(folder) / TOKENIZER_FOLDER)
            parts = [_tokens(str(Path(folder) / name), name, (), tokenizer, n_samples, limit_tokens) for name in names]
            return {"kind": "tokenized", "parts": parts}
        if os.path.isfile(Path(folder) / CURATE_RECORD):
            record = read_report(folder)
            drops = [drop for source in record["sources"] for drop in _drops(folder, source, n_samples)]
            return {"kind": "documents", "parts": _documents(folder, record, n_samples), "drops": drops}
    return {"kind": "tokens", "parts": [_tokens(folder, folder, options, tokenizer, n_samples, limit_tokens)]}


def _tokens(
    folder: str, name: str, options: Sequence[str], tokenizer: str | None, n_samples: int, limit_tokens: int
) -> dict[str, Any]:
    config = from_dict(SourceConfig, {"path": folder}, "the source", options).config
    if tokenizer is None:
        tokenizer = _tokenizer_beside(folder)
    try:
        index = read_index(config, FetchConfig(), tokenizer=tokenizer)
    except DataError as error:
        if store.is_local(folder) and not os.path.exists(folder):
            path = Path(folder)
            close = nearest(path.name, os.listdir(path.parent)) if path.parent.is_dir() else None
            raise DataError(
                f"there is no folder '{folder}'",
                hint=f"did you mean '{path.with_name(close)}'?" if close else "check the path",
            ) from error
        if not store.is_local(folder) or options:
            raise
        raise DataError(
            f"{folder} holds nothing to inspect: {error.message}",
            allowed="tokens in any format that a run can read, or an output of 'smalti data curate' or 'tokenize'",
            hint=error.hint,
        ) from error
    source = open_source(config, index, FetchConfig(), tokenizer=tokenizer)
    matching = _matching_tokenizer(folder, tokenizer, source.tokenizer_digest)
    keys = ("n_tokens", "n_documents", "vocab_size", "eod_id", "tokenizer_digest", "digest", "checked")
    facts = {"dtype": f"u{8 * source.dtype.itemsize}", **{key: getattr(source, key) for key in keys}}
    if isinstance(source, TokenSource):
        facts |= {"n_text_bytes": source.manifest.n_text_bytes, "files": source.manifest.n_files}
    return {"name": name, "manifest": facts, **_look(source, matching, n_samples, limit_tokens)}


def _look(source: Source, tokenizer: Tokenizer | None, n_samples: int, limit_tokens: int) -> dict[str, Any]:
    """Return document lengths, statistics for each context length, and sample documents."""
    documents = find_documents(source, limit_tokens)
    if documents is None:
        return {
            "lengths": length_summary(np.empty(0, dtype=np.int64), "tokens"),
            "contexts": [],
            "samples": [_sample(source, 0, source.n_tokens, tokenizer)][:n_samples],
            "note": "document ends are not known; name the token that closes documents: eod_id=0",
        }
    chosen = _evenly_spaced(documents.lengths.size, n_samples)
    begins = documents.begins[list(chosen)]
    numbers = source.documents_at(begins).tolist() if source.n_documents is not None else [None] * len(chosen)
    samples = [
        {"document": number} | _sample(source, int(documents.begins[i]), int(documents.lengths[i]), tokenizer)
        for number, i in zip(numbers, chosen, strict=True)
    ]
    part = {
        "lengths": length_summary(documents.lengths, "tokens"),
        "contexts": context_summary(documents.lengths),
        "curve": length_curve(documents.lengths),
        "samples": samples,
    }
    return part | ({"note": documents.note} if documents.note else {})


def _sample(source: Source, begin: int, n: int, tokenizer: Tokenizer | None) -> dict[str, Any]:
    row = np.empty((1, min(n, _SAMPLE_TOKENS)), dtype=source.dtype)
    source.read_rows(np.array([begin], dtype=np.int64), row)
    return {"first_token": begin, "n_tokens": n, **_shown(row[0].tolist(), tokenizer)}


def _tokenizer_beside(folder: str) -> str | None:
    """Return the path of the tokenizer that 'smalti data tokenize' wrote beside the tokens; None if there is none."""
    if not store.is_local(folder):
        return None
    folders = [parent / TOKENIZER_FOLDER for parent in Path(folder).resolve().parents[:2]]
    return next((str(path) for path in folders if (path / TOKENIZER_FILE).is_file()), None)


def _matching_tokenizer(folder: str, path: str | None, digest: str | None) -> Tokenizer | None:
    """Load the tokenizer, unless ``path`` is None. DataError if its digest is not that of the tokens."""
    if path is None:
        return None
    tokenizer = load_tokenizer(path)
    if digest is not None and tokenizer.digest != digest:
        raise DataError(
            f"{path} is not the tokenizer that wrote the tokens of {folder}",
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
            wanted = set(_evenly_spaced(n, n_samples))
            lengths = np.zeros(n, dtype=np.int64)
            samples = []
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


def _drops(folder: str, source: str, n_samples: int) -> list[dict[str, Any]]:
    """Return counts and samples of dropped documents; empty if the drops file was removed, which nothing else reads."""
    path = Path(folder) / "drops" / f"{source}.parquet"
    if not path.exists():
        return []
    try:
        with pq.ParquetFile(path) as file:
            columns = [name for name in DROP_SCHEMA.names if name != "source"]
            counts: Counter[tuple[str, str]] = Counter()
            for batch in file.iter_batches(columns=["split", "rule"]):
                counts.update(zip(*(column.to_pylist() for column in batch.columns), strict=True))
            wanted = {key: set(_evenly_spaced(n, n_samples)) for key, n in counts.items()}
            seen = Counter[tuple[str, str]]()
            samples = {key: list[dict[str, Any]]() for key in counts}
            for row in (row for batch in file.iter_batches(columns=columns) for row in batch.to_pylist()):
                key = row["split"], row["rule"]
                if seen[key] in wanted[key]:
                    samples[key].append({name: row[name] for name in ("id", "reason", "score")})
                seen[key] += 1
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{path} cannot be read: {error}", hint="run the command that wrote it again") from error
    return [
        {"source": source, "split": split, "rule": rule, "documents": n, "samples": samples[split, rule]}
        for (split, rule), n in sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    ]


def _evenly_spaced(n: int, k: int) -> Sequence[int]:
    """Return the middles of ``k`` equal parts of ``range(n)``."""
    k = min(n, k)
    return [(2 * i + 1) * n // (2 * k) for i in range(k)]
