"""The stored index: for each token file, the n-grams that were searched in it, and the documents that have them.

    <folder>/sets/<digest>.npy                  hashes of n-grams that were searched together
    <folder>/parts/<part>/<digest>.parquet      n, hash, source and document of each of them that is in the part

A part is a token file, named by the digest of its content (of other formats a whole source). Only what a part was not
searched for is searched; a changed token file is another part.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from smalti.base import store
from smalti.base.errors import DataError
from smalti.base.hashing import digest_json, sha256_bytes
from smalti.base.progress import Progress, no_progress
from smalti.data.documents.publish import only_writer
from smalti.data.prepare.contamination.ngrams import LONG, SHORT, U64, VERSION, NgramSet, is_long
from smalti.data.prepare.contamination.scan import (
    KEPT_DOCUMENTS,
    OVERLAP_TOKENS,
    PENDING_HITS,
    Hits,
    Scanner,
    Span,
    scan,
)
from smalti.data.sources.source import Source
from smalti.data.tokenizer.encode import Tokenizer
from smalti.data.tokens import TokenSource

_SCHEMA = pa.schema(
    [
        ("n", pa.int8()),
        ("hash", pa.uint64()),
        ("source", pa.dictionary(pa.int32(), pa.string())),
        ("document", pa.int64()),
    ]
)


class Part(NamedTuple):
    """Tokens [begin, end) of a source, and the digest of all that decides what is found in them."""

    source: str
    begin: int
    end: int
    digest: str


@dataclass(frozen=True)
class Search:
    """What was found of a set of n-grams, and how much of it the index knew."""

    hits: Mapping[str, Hits]
    """By source."""
    scanned_tokens: int
    total_tokens: int


def find_ngrams(
    wanted: U64,
    sources: Mapping[str, Source],
    tokenizer: Tokenizer,
    folder: str | Path,
    progress: Progress = no_progress,
) -> Search:
    """Find the documents of ``sources`` that have n-grams with the hashes ``wanted``.

    ``folder`` holds the index, which is extended by what it lacks; an interrupted scan resumes at the next token file.
    Of an n-gram in a token file the first KEPT_DOCUMENTS documents are found. ``progress`` counts tokens.
    Raises UserError for a source without document ends, or if another process writes the index.
    """
    place = Path(store.make_folder(folder))
    wanted_set = NgramSet(wanted)
    parts = [part for name, source in sources.items() for part in parts_of(name, source, tokenizer)]
    with only_writer(place):
        index = _Index(place)
        todo: dict[str, tuple[NgramSet, list[Part]]] = {}
        for part in parts:
            missing = index.missing(part, wanted_set)
            if len(missing):
                todo.setdefault(missing.digest, (missing, []))[1].append(part)
        total = sum(part.end - part.begin for _, missing_parts in todo.values() for part in missing_parts)
        done = 0
        for missing, missing_parts in todo.values():
            scanner = Scanner(sources, tokenizer, missing)
            done = _scan(index, scanner, missing_parts, done, total, progress)
        hits = {
            name: Hits.joined([index.hits(part, wanted_set) for part in parts if part.source == name])
            for name in sources
        }
    return Search(hits, total, sum(part.end - part.begin for part in parts))


def parts_of(name: str, source: Source, tokenizer: Tokenizer) -> list[Part]:
    """Return the parts of a source: its token files, or the whole source in another format."""
    base = [VERSION, SHORT, LONG, KEPT_DOCUMENTS, tokenizer.digest]
    if not isinstance(source, TokenSource):
        return [Part(name, 0, source.n_tokens, digest_json([*base, source.digest]))]
    parts = []
    for number, digest in enumerate(source.manifest.file_digests()):
        begin = number * source.manifest.file_tokens
        end = begin + source.manifest.tokens_of_file(number)
        after = source.read(end, min(OVERLAP_TOKENS, source.n_tokens - end))
        parts.append(Part(name, begin, end, digest_json([*base, digest, sha256_bytes(after.tobytes())])))
    return parts


def _scan(index: "_Index", scanner: Scanner, parts: list[Part], done: int, total: int, progress: Progress) -> int:
    """Scan parts and write each to the index as soon as it is complete; returns the tokens done."""
    index.add_set(scanner.wanted)
    spans = [span for i, part in enumerate(parts) for span in Span(i, part.source, part.begin, part.end).split()]
    left = [part.end - part.begin for part in parts]
    pending: list[list[Hits]] = [[] for _ in parts]
    for number, n_tokens, hits in scan(scanner, spans, index.folder / ".failures"):
        pending[number].append(hits)
        if sum(len(part.hashes) for part in pending[number][1:]) > PENDING_HITS:
            pending[number] = [Hits.joined(pending[number])]
        left[number] -= n_tokens
        done += n_tokens
        progress("searching the training tokens", done, total)
        if not left[number]:
            index.add(parts[number], scanner.wanted, Hits.joined(pending[number]))
            pending[number] = []
    return done


@dataclass(frozen=True)
class _Index:
    folder: Path

    def missing(self, part: Part, wanted: NgramSet) -> NgramSet:
        """Return what ``part`` was not searched for."""
        hashes = wanted.hashes
        for path in self._files(part):
            searched = self._set(path.stem)
            hashes = np.setdiff1d(hashes, searched, assume_unique=True)
        return wanted if len(hashes) == len(wanted) else NgramSet(hashes)

    def hits(self, part: Part, wanted: NgramSet) -> Hits:
        rows = []
        for path in self._files(part):
            try:
                table = pq.read_table(path, columns=["hash", "document"], page_checksum_verification=True)
            except (pa.ArrowException, OSError) as error:
                raise DataError(
                    f"{path} cannot be read: {error}", hint="delete it: it will be computed again"
                ) from error
            hashes, documents = (table.column(name).to_numpy() for name in ("hash", "document"))
            places = wanted.places(hashes)
            rows.append(Hits(hashes[places], documents[places]))
        return Hits.joined(rows)

    def add_set(self, ngrams: NgramSet) -> None:
        path = self._set_path(ngrams.digest)
        if not path.exists():
            store.make_folder(path.parent)
            temporary = path.with_suffix(".tmp.npy")
            np.save(temporary, ngrams.hashes)
            os.replace(temporary, path)

    def add(self, part: Part, ngrams: NgramSet, hits: Hits) -> None:
        n = np.where(is_long(hits.hashes), LONG, SHORT).astype(np.int8)
        names = pa.DictionaryArray.from_arrays(np.zeros(len(n), np.int32), pa.array([part.source]))
        table = pa.Table.from_arrays(
            [pa.array(n), pa.array(hits.hashes), names, pa.array(hits.documents)], schema=_SCHEMA
        )
        path = Path(store.make_folder(self._part_folder(part))) / f"{ngrams.digest}.parquet"
        temporary = path.with_suffix(".tmp")
        pq.write_table(table, temporary, compression="zstd", write_page_checksum=True)
        os.replace(temporary, path)

    def _files(self, part: Part) -> list[Path]:
        """Return the files of a part whose set of n-grams is known."""
        return [
            path for path in sorted(self._part_folder(part).glob("*.parquet")) if self._set_path(path.stem).exists()
        ]

    def _set(self, digest: str) -> U64:
        hashes: U64 = np.load(self._set_path(digest))
        if sha256_bytes(hashes.tobytes()) != digest:
            raise DataError(f"{self._set_path(digest)} is damaged", hint="delete it: the tokens will be searched again")
        return hashes

    def _set_path(self, digest: str) -> Path:
        return self.folder / "sets" / f"{digest}.npy"

    def _part_folder(self, part: Part) -> Path:
        return self.folder / "parts" / part.digest
