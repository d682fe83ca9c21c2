"""Checks the inputs of a run before it starts, from manifests and indexes only.

Sources and held-out sets must exist, be long enough, come from one tokenizer (that of the run, if it names one) and fit
the model's vocabulary. One process reads for all ranks (``read_inputs``). What a foreign format does not record is
reported as unchecked; a few rows of such sources are read before the ranks start.
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass

from smalti.base import store
from smalti.base.errors import DataError, UserError
from smalti.config.data import DataConfig
from smalti.config.run import RunConfig
from smalti.data.documents.heldout import TRAIN
from smalti.data.examples.folder import RECORD_NAME, ExamplesRecord, check_files
from smalti.data.fetch import Files, open_files
from smalti.data.pack import n_sequences
from smalti.data.sources.source import Source
from smalti.data.sources.vocabulary import check_samples
from smalti.data.stream.open import Opened, open_sources, prefix_errors, read_indexes, sequences_of
from smalti.data.tokenizer.digest import check_folder
from smalti.data.tokens import Manifest, TokenSource
from smalti.data.tokens.manifest import FILE_NAME, read_manifest

_UNRECORDED = {"tokenizer_digest": "its tokenizer", "vocab_size": "its vocabulary", "eod_id": "where documents end"}


@dataclass(frozen=True)
class Inputs:
    """The sources and held-out sets that a run reads, by name."""

    sources: Mapping[str, Source]
    """Opened from their indexes; no token is read yet."""
    heldout: Mapping[str, Manifest | ExamplesRecord]
    unknown: tuple[str, ...]
    """A line for each check that was not possible."""


def read_inputs(config: DataConfig) -> dict[str, bytes]:
    """Read the indexes of the sources (``read_indexes``) and the manifests of held-out sets, once for all ranks.

    Raises DataError for missing or damaged files, and for a local folder of token files that is incomplete.
    """
    indexes = read_indexes(config)
    for name, source in open_sources(config, indexes).sources.items():
        with closing(source):
            if isinstance(source, TokenSource) and not config.sources[name].mirrors:
                with prefix_errors(f"data.sources.{name} = {source.where}"):
                    source.check_files()
    for name, folder in config.heldout.items():
        prefix = f"data.heldout.{name} = {folder}"
        with prefix_errors(prefix), closing(open_files(folder, fetch=config.fetch)) as files:
            require_heldout(folder)
            indexes[heldout_key(name)] = index = read_heldout(folder, files)
            if isinstance(record := parse_heldout(index, folder), ExamplesRecord):
                check_files(folder, record)
            else:
                TokenSource(folder, index=index, files=files).check_files()
    return indexes


def read_heldout(folder: str, files: Files) -> bytes:
    """Read the manifest of token files, or the record of a folder of examples."""
    is_examples = store.is_local(folder) and os.path.isfile(os.path.join(folder, RECORD_NAME))
    return files.whole(RECORD_NAME) if is_examples else read_manifest(files)


def parse_heldout(index: bytes, folder: str) -> Manifest | ExamplesRecord:
    """Parse and check the result of ``read_heldout``."""
    if b'"kind": "examples"' in index:
        return ExamplesRecord.parse(index, store.join(folder, RECORD_NAME))
    return Manifest.parse(index, store.join(folder, FILE_NAME))


def check_inputs(config: RunConfig, indexes: Mapping[str, bytes] | None = None) -> Inputs:
    """Check that the inputs fit the run. Raises DataError or UserError. ``indexes``: the result of ``read_inputs``."""
    first_look = indexes is None
    indexes = read_inputs(config.data) if indexes is None else indexes
    opened = open_sources(config.data, indexes)
    for seq_len in sorted(set(config.data.seq_lens)):
        sequences_of(config.data, opened, indexes, seq_len)
    heldout = {name: _heldout(config.data, name, indexes[heldout_key(name)]) for name in config.data.heldout}
    _one_tokenizer(opened, heldout)
    vocab_sizes = {name: source.vocab_size or 0 for name, source in opened.sources.items()}
    for name, size in {**{name: manifest.vocab_size for name, manifest in heldout.items()}, **vocab_sizes}.items():
        if size > config.model.vocab_size:
            raise UserError(
                f"model.vocab_size={config.model.vocab_size} is smaller than the {size} of the "
                f"tokenizer that wrote '{name}'",
                allowed=f"at least {size}",
                hint=f"model.vocab_size={-(-size // 64) * 64}",
            )
    if config.data.tokenizer is not None and opened.tokenizer_digest is not None:
        check_folder(config.data.tokenizer, opened.tokenizer_digest)
    if first_look:
        check_samples(opened.sources, config.model.vocab_size)
    return Inputs(opened.sources, heldout, tuple(_unknown(opened.sources)))


def heldout_key(name: str) -> str:
    """Key of a held-out set's manifest in the result of ``read_inputs``."""
    return f"/heldout/{name}"


def require_heldout(folder: str) -> None:
    """Raise DataError if 'smalti data tokenize' wrote a training split and no held-out split, for lack of documents."""
    if store.is_local(folder) and not os.path.exists(folder):
        train = os.path.join(os.path.dirname(folder.rstrip("/")), TRAIN)
        if os.path.exists(os.path.join(train, FILE_NAME)):
            raise DataError(
                f"it does not exist, though {train} does: no document of this source was held out",
                hint="remove it from data.heldout, or hold documents out: 'smalti data curate' with a larger "
                "heldout_frac or a smaller max_document_bytes, then 'smalti data tokenize'",
            )


def _heldout(config: DataConfig, name: str, index: bytes) -> Manifest | ExamplesRecord:
    folder = config.heldout[name]
    manifest = parse_heldout(index, folder)
    if isinstance(manifest, ExamplesRecord):
        return manifest
    if n_sequences(manifest.n_tokens, config.seq_len) < 1:
        raise DataError(
            f"data.heldout.{name} = {folder} holds {manifest.n_tokens} tokens, less than one sequence",
            allowed=f"more than data.seq_len = {config.seq_len} tokens",
            hint="hold more documents out, or lower data.seq_len",
        )
    if not manifest.n_text_bytes:
        raise DataError(
            f"data.heldout.{name} = {folder} does not record how many bytes its documents had",
            allowed="held-out tokens with n_text_bytes in their manifest, for bits per byte",
            hint="write them again with 'smalti data tokenize'",
        )
    return manifest


def _one_tokenizer(opened: Opened, heldout: Mapping[str, Manifest | ExamplesRecord]) -> None:
    """Raise DataError unless all held-out sets have one tokenizer, that of the sources if these record it."""
    first = next(iter(heldout.values()), None)
    digest = opened.tokenizer_digest or (first.tokenizer_digest if first else None)
    eod_id = opened.eod_id if opened.eod_id is not None else (first.eod_id if first else None)
    for name, manifest in heldout.items():
        if (manifest.tokenizer_digest, manifest.eod_id) != (digest, eod_id):
            raise DataError(
                f"data.heldout.{name} was written by another tokenizer ({manifest.tokenizer_digest[:12]}, documents "
                f"end with {manifest.eod_id}) than the rest of the run reads ({str(digest)[:12]}, {eod_id})",
                allowed="one tokenizer for all token files of a run",
                hint="run 'smalti data tokenize' over all sources together",
            )


def _unknown(sources: Mapping[str, Source]) -> Iterator[str]:
    for name, source in sources.items():
        unknown = [words for field, words in _UNRECORDED.items() if getattr(source, field) is None]
        if unknown:
            yield f"source '{name}' ({source.where}) does not record {', '.join(unknown)}, which is not checked"
