"""``smalti data tokenize``: trains or loads a tokenizer and writes the documents of a curation as token files.

Guarantees: the tokenizer is trained on the training split only; equal documents and config give equal files; each
document becomes its ids and one end-of-document id, in the order of the documents file; the fast encoder is used only
if it equals the exact one on a sample of every source. Memory is bounded by a batch.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain, islice
from pathlib import Path
from typing import Any

from smalti.base.errors import DataError
from smalti.base.hashing import digest_json
from smalti.base.progress import Progress, no_progress
from smalti.base.units import format_bytes
from smalti.config.curate import TokenizeConfig
from smalti.data.documents.heldout import HELDOUT, SPLITS, TRAIN
from smalti.data.documents.parquet import read_documents
from smalti.data.documents.parts import parts_of_text
from smalti.data.documents.publish import publication
from smalti.data.prepare.curate.report import RECORD_NAME as CURATE_RECORD
from smalti.data.prepare.curate.report import read_report
from smalti.data.tokenizer.encode import Tokenizer, load_tokenizer
from smalti.data.tokenizer.patterns import EOD
from smalti.data.tokenizer.train import train_bpe
from smalti.data.tokens import Manifest, TokenWriter

KIND = "tokenize"
RECORD_NAME = "tokens.json"
TOKENIZER_FOLDER = "tokenizer"
COLUMNS = ("source", "split", "documents", "text", "tokens", "bytes per token")

_BATCH_BYTES = 1 << 20
_BATCH_DOCUMENTS = 512
_TRAIN_PART_BYTES = 1_000_000
_SAMPLE_DOCUMENTS = 64
_SAMPLE_BYTES = 1 << 17


@dataclass
class TokenizeReport:
    """The tokenizer and the token files that were written."""

    tokenizer_digest: str
    vocab_size: int
    eod_id: int
    trained_on_bytes: int
    """Bytes of text that the tokenizer was trained on; 0 if it was loaded."""
    manifests: dict[str, dict[str, Manifest]] = field(default_factory=dict)
    """Source -> split -> manifest; splits without documents are absent."""
    notes: list[str] = field(default_factory=list)

    def rows(self) -> list[list[str]]:
        """Return table rows, one for each source and split."""
        return [
            [
                source,
                split,
                f"{manifest.n_documents:,}",
                format_bytes(manifest.n_text_bytes),
                f"{manifest.n_tokens:,}",
                f"{manifest.n_text_bytes / manifest.n_tokens:.2f}",
            ]
            for source, splits in self.manifests.items()
            for split, manifest in splits.items()
        ]

    def as_json(self) -> dict[str, Any]:
        """Convert to plain values in a fixed order."""
        return {
            "tokenizer": {
                "digest": self.tokenizer_digest,
                "vocab_size": self.vocab_size,
                "eod_id": self.eod_id,
                "trained_on_bytes": self.trained_on_bytes,
            },
            "sources": {
                source: {
                    split: {
                        "documents": manifest.n_documents,
                        "text_bytes": manifest.n_text_bytes,
                        "tokens": manifest.n_tokens,
                        "digest": manifest.digest,
                    }
                    for split, manifest in splits.items()
                }
                for source, splits in self.manifests.items()
            },
            "notes": self.notes,
        }


@dataclass(frozen=True)
class _Corpus:
    """The output of a curation: its documents files and their sizes."""

    folder: str
    digest: str
    sizes_bytes: dict[tuple[str, str], int]
    """(source, split) -> bytes of text."""
    documents_in: dict[tuple[str, str], int]
    """(source, split) -> documents before any was dropped."""

    def documents(self, source: str, split: str) -> Iterator[dict[str, Any]]:
        return read_documents(Path(self.folder) / "documents" / source / f"{split}.parquet")

    @property
    def sources(self) -> list[str]:
        return list(dict.fromkeys(source for source, _ in self.sizes_bytes))

    def empty_notes(self) -> list[str]:
        """Return a note for each source that gets no training or no held-out folder, for lack of text."""
        notes = []
        for source in self.sources:
            if not self.sizes_bytes[source, TRAIN]:
                none = f"so there is no {source}/{TRAIN}"
                if not any(self.documents_in[source, split] for split in SPLITS):
                    notes.append(f"{source}: it holds no documents, {none}")
                elif self.sizes_bytes[source, HELDOUT] and not self.documents_in[source, TRAIN]:
                    notes.append(f"{source}: all its documents are held out, {none}")
                else:
                    where = f"{self.folder}/report.md says which rule dropped them"
                    notes.append(f"{source}: no training document is left of it, {none}; {where}")
            elif not self.sizes_bytes[source, HELDOUT]:
                notes.append(
                    f"{source}: no document of it is held out, so there is no {source}/{HELDOUT} and a recipe cannot "
                    "name it under data.heldout; the notes of 'smalti data curate' say how to hold some out"
                )
        return notes


def tokenize(config: TokenizeConfig, progress: Progress = no_progress) -> TokenizeReport:
    """Train or load the tokenizer and write ``config.output``; ``progress`` counts bytes of documents.

    Raises:
        DataError: ``config.documents`` is not the output of a curation, has no training documents, or is damaged; also
            the errors of ``load_tokenizer``.
    """
    corpus = _corpus(config.documents)
    with publication(config.output, kind=KIND, record_name=RECORD_NAME) as result:
        tokenizer, trained_on_bytes = _tokenizer(config, corpus, progress)
        tokenizer.save(result.work / TOKENIZER_FOLDER)
        report = TokenizeReport(tokenizer.digest, tokenizer.vocab_size, tokenizer.eod_id, trained_on_bytes)
        if config.tokenizer == "train" and tokenizer.vocab_size < config.vocab_size:
            report.notes.append(
                f"the vocabulary has {tokenizer.vocab_size} entries, not {config.vocab_size}: "
                "the training text has no more pairs to merge"
            )
        report.notes += [*_gain_notes(config, corpus, tokenizer), *corpus.empty_notes()]
        encoder = _Encoder(tokenizer, report.notes)
        writer = _Writer(encoder, progress, sum(corpus.sizes_bytes.values()))
        for source in corpus.sources:
            encoder.compare(source, corpus.documents(source, TRAIN))
            report.manifests[source] = {
                split: writer.write(
                    corpus.documents(source, split),
                    result.work / source / split,
                    salt=digest_json([corpus.digest, source, split, tokenizer.digest])[:16],
                )
                for split in SPLITS
                if corpus.sizes_bytes[source, split]
            }
        result.record = report.as_json() | {
            "config": config.model_dump(mode="json", exclude={"output"}),
            "documents_digest": corpus.digest,
        }
    return report


def _corpus(folder: str) -> _Corpus:
    record = read_report(folder)
    try:
        sizes = {
            (source, split): int(record["sources"][source][split]["bytes"]["kept"])
            for source in record["sources"]
            for split in SPLITS
        }
        documents_in = {
            (source, split): int(record["sources"][source][split]["documents"]["in"]) for source, split in sizes
        }
        digest = str(record["digest"])
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(
            f"{folder}/{CURATE_RECORD} is not whole: {error!r}", hint="run 'smalti data curate' again"
        ) from error
    if not any(size for (_, split), size in sizes.items() if split == TRAIN):
        raise DataError(
            f"{folder} holds no training documents", hint="see report.md in it for the rules that dropped them"
        )
    return _Corpus(folder, digest, sizes, documents_in)


def _tokenizer(config: TokenizeConfig, corpus: _Corpus, progress: Progress) -> tuple[Tokenizer, int]:
    """Return the tokenizer, and the number of bytes that it was trained on."""
    loaded: Tokenizer | None = None
    if config.tokenizer != "train":
        loaded = load_tokenizer(config.tokenizer, eod_token=config.eod_token, pattern=config.pattern)
        if config.extend is None:
            return loaded, 0
    taken = [0]
    texts = _training_texts(corpus, config.train_bytes, taken, progress)
    first = next(texts, None)
    if first is None:
        raise DataError(
            f"no document fits into train_bytes={config.train_bytes}", hint="raise it: the default is 50000000"
        )
    if loaded is not None and config.extend is not None:
        return loaded.extended(chain([first], texts), config.extend), taken[0]
    inner = train_bpe(chain([first], texts), config.vocab_size, pattern=config.pattern or "cl100k")
    return Tokenizer(inner, EOD), taken[0]


def _gain_notes(config: TokenizeConfig, corpus: _Corpus, tokenizer: Tokenizer) -> list[str]:
    """Return for each source the bytes of a token before and after an extension, on the first held-out documents."""
    if config.extend is None:
        return []
    old = load_tokenizer(config.tokenizer, eod_token=config.eod_token, pattern=config.pattern)
    notes = [f"{tokenizer.vocab_size - old.vocab_size} entries were added; model.vocab_size is at least "
             f"{tokenizer.vocab_size}"]  # fmt: skip
    for source in corpus.sources:
        split = HELDOUT if corpus.sizes_bytes[source, HELDOUT] else TRAIN
        texts = [document["text"] for document in islice(corpus.documents(source, split), _SAMPLE_DOCUMENTS)]
        n_bytes = sum(len(text.encode()) for text in texts)
        before, after = (n_bytes / max(1, sum(map(len, map(each.encode, texts)))) for each in (old, tokenizer))
        notes.append(f"{source}: {before:.2f} -> {after:.2f} bytes a token ({len(texts)} documents of {split})")
    return notes


def _training_texts(corpus: _Corpus, limit_bytes: int, taken: list[int], progress: Progress) -> Iterator[str]:
    """Yield training documents (long ones in parts), evenly spaced in every source, at most ``limit_bytes`` in total.

    ``taken`` is the running sum of their bytes.
    """
    total = sum(size for (_, split), size in corpus.sizes_bytes.items() if split == TRAIN)
    share = min(1.0, limit_bytes / total)
    for source in corpus.sources:
        seen = chosen = 0
        for document in corpus.documents(source, TRAIN):
            for text in parts_of_text(document["text"], max(1000, min(_TRAIN_PART_BYTES, limit_bytes // 4))):
                n_bytes = len(text.encode())
                seen += n_bytes
                if chosen + n_bytes <= seen * share:
                    chosen += n_bytes
                    taken[0] += n_bytes
                    progress("training the tokenizer", taken[0], int(total * share))
                    yield text


class _Encoder:
    """Encodes batches of texts; uses the slow engine, with a note, once a sample shows that the fast one differs."""

    def __init__(self, tokenizer: Tokenizer, notes: list[str]) -> None:
        self.tokenizer = tokenizer
        self.notes = notes
        self.bulk = not tokenizer.slow_because
        self.threads = min(8, os.cpu_count() or 1)
        if not self.bulk:
            notes.append(f"encoded without tiktoken, which is slower: {tokenizer.slow_because}")

    def compare(self, source: str, documents: Iterator[dict[str, Any]]) -> None:
        """Compare both engines on the first documents of a source."""
        texts = [document["text"][:_SAMPLE_BYTES] for document in islice(documents, _SAMPLE_DOCUMENTS)]
        while sum(map(len, texts)) > _SAMPLE_BYTES and len(texts) > 1:
            texts.pop()
        if self.bulk and self.tokenizer.encode_batch(texts) != [self.tokenizer.encode(text) for text in texts]:
            self.bulk = False
            self.notes.append(f"encoded without tiktoken from source '{source}' on: it gave other ids on a sample")

    def encode(self, texts: list[str]) -> list[list[int]]:
        """Return the ids of each text."""
        if self.bulk:
            return self.tokenizer.encode_batch(texts, threads=self.threads)
        return [self.tokenizer.encode(text) for text in texts]


class _Writer:
    """Writes the token folders one after another and reports the progress over all of them."""

    def __init__(self, encoder: _Encoder, progress: Progress, total_bytes: int) -> None:
        self.encoder = encoder
        self.progress = progress
        self.total_bytes = total_bytes
        self.done_bytes = 0

    def write(self, documents: Iterator[dict[str, Any]], folder: Path, *, salt: str) -> Manifest:
        """Write one split of one source; ``salt`` identifies its documents and the tokenizer."""
        tokenizer = self.encoder.tokenizer
        writer = TokenWriter(
            folder,
            vocab_size=tokenizer.vocab_size,
            eod_id=tokenizer.eod_id,
            tokenizer_digest=tokenizer.digest,
            salt=salt,
        )
        try:
            for batch in _batches(documents):
                for document, ids in zip(batch, self.encoder.encode([row["text"] for row in batch]), strict=True):
                    writer.add(ids, document["n_bytes"], document["id"])
                    self.done_bytes += document["n_bytes"]
                self.progress("tokenizing", self.done_bytes, self.total_bytes)
            return writer.close()
        except BaseException:
            writer.abort()
            raise


def _batches(documents: Iterator[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    batch: list[dict[str, Any]] = []
    size = 0
    for document in documents:
        batch.append(document)
        size += document["n_bytes"]
        if size >= _BATCH_BYTES or len(batch) >= _BATCH_DOCUMENTS:
            yield batch
            batch = []
            size = 0
    if batch:
        yield batch
