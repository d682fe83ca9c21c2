"""Opens the inputs of a stream: sources, best-fit indexes and takedowns, from bytes that one rank reads for all.

``read_indexes`` reads the index of each source, ``pack.json`` of the best-fit indexes, and the takedowns. Its result is
sent to the other ranks, which open everything from it without reading a file or sending a request.
"""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from smalti.base.errors import DataError, UserError
from smalti.base.hashing import sha256_bytes
from smalti.data.examples.source import ExampleSource
from smalti.data.fetch import Share
from smalti.data.fetch.counts import Counts
from smalti.data.pack.best_fit import ALGORITHM
from smalti.data.pack.concat import Chopped
from smalti.data.pack.examples import ExampleRows
from smalti.data.pack.index import RECORD_NAME, PackIndex, PackRecord, pack_folder, read_record
from smalti.data.pack.packed import Packed
from smalti.data.pack.rows import Sequences
from smalti.data.sources.open import open_source, read_index
from smalti.data.sources.readers.index import Index
from smalti.data.sources.source import Source
from smalti.data.stream.takedowns import Takedowns

if TYPE_CHECKING:
    from smalti.config.data import DataConfig

_TAKEDOWNS = "/takedowns"
"""Key of the takedowns in the result of ``read_indexes``; names of sources have no slash."""


@dataclass(frozen=True)
class Opened:
    """The sources of a run, and the metadata they share; None if no source has it."""

    sources: Mapping[str, Source]
    eod_id: int | None
    vocab_size: int | None
    tokenizer_digest: str | None

    @property
    def pad_id(self) -> int:
        """Token id of padding; never a target."""
        return 0 if self.eod_id is None else self.eod_id


def read_indexes(config: "DataConfig") -> dict[str, bytes]:
    """Read all metadata that a stream needs before it reads tokens; rank 0 calls this for all ranks.

    Raises DataError for missing or damaged files, and for a takedown of an unknown document.
    """
    indexes = {}
    for name, source in config.sources.items():
        with prefix_errors(f"data.sources.{name} = {source.path}"):
            indexes[name] = read_index(source, config.fetch, tokenizer=config.tokenizer)
    if config.packing == "best-fit":
        for name, seq_len in sorted(_lengths(config)):
            if Index.from_bytes(indexes[name]).format != "examples":  # packed when they are opened
                indexes[_pack_key(name, seq_len)] = read_record(config.sources[name].path, seq_len)
    if config.takedowns is not None:
        with ExitStack() as stack:
            opened = open_sources(config, indexes)
            for opened_source in opened.sources.values():
                stack.callback(opened_source.close)
            indexes[_TAKEDOWNS] = Takedowns.read(config.takedowns, opened.sources).to_bytes()
    return indexes


@contextmanager
def prefix_errors(field: str) -> Iterator[None]:
    """Context manager: prefix DataErrors with the config field at fault."""
    try:
        yield
    except DataError as error:
        raise DataError(f"{field}: {error.message}", allowed=error.allowed, hint=error.hint) from error


def open_sources(
    config: "DataConfig",
    indexes: Mapping[str, bytes],
    rank: int = 0,
    world_size: int = 1,
    counts: Counts | None = None,
) -> Opened:
    """Open all sources from their indexes. Raises DataError if their tokenizers or vocabularies differ.

    ``counts``: counters to which the cost of reading is added.
    """
    share = Share(rank, world_size)
    sources = {
        name: open_source(
            config.sources[name], indexes[name], config.fetch, share, tokenizer=config.tokenizer, counts=counts
        )
        for name in sorted(config.sources)
    }
    return Opened(
        sources,
        tokenizer_digest=_in_common("tokenizer_digest", sources),
        vocab_size=_in_common("vocab_size", sources),
        eod_id=_in_common("eod_id", sources),
    )


def sequences_of(
    config: "DataConfig", opened: Opened, indexes: Mapping[str, bytes], seq_len: int
) -> dict[str, Sequences]:
    """Return the sequences of each source that some stage reads with ``seq_len``.

    Raises DataError for a source shorter than one sequence.
    """
    cut: dict[str, Sequences] = {}
    used = _lengths(config)
    for name, source in opened.sources.items():
        if (name, seq_len) not in used:
            continue
        if isinstance(source, ExampleSource):
            if not config.mask_documents:
                raise UserError(
                    f"data.mask_documents=false with the examples of source '{name}', which would see each other",
                    allowed="true: every example is a document of its own",
                    hint="leave data.mask_documents out",
                )
            cut[name] = ExampleRows(source, seq_len, opened.pad_id)
        elif config.packing == "concat":
            cut[name] = Chopped(source, seq_len)
        else:
            path = config.sources[name].path
            folder = pack_folder(path, seq_len)
            record = PackRecord.parse(
                indexes[_pack_key(name, seq_len)],
                f"{folder}/{RECORD_NAME}",
                source_digest=source.digest,
                source=path,
                seq_len=seq_len,
            )
            cut[name] = Packed(source, PackIndex(record, folder), opened.pad_id)
        if not cut[name].size:
            raise DataError(
                f"source '{name}' ({source.where}) has {source.n_tokens:,} tokens, less than one sequence",
                allowed=f"at least seq_len + 1 = {seq_len + 1:,} tokens",
                hint="give the source more documents, or make data.seq_len smaller",
            )
    return cut


def takedowns_of(indexes: Mapping[str, bytes]) -> Takedowns | None:
    """Return the documents that are blanked; None if the config names no list."""
    return Takedowns.from_bytes(indexes[_TAKEDOWNS]) if _TAKEDOWNS in indexes else None


def pack_digests(config: "DataConfig", indexes: Mapping[str, bytes]) -> dict[str, dict[int, str]]:
    """Return name -> seq_len -> digest of the best-fit index, of examples that of the algorithm; else empty."""
    digests: dict[str, dict[int, str]] = {}
    for name, seq_len in sorted(_lengths(config)):
        if Index.from_bytes(indexes[name]).format == "examples":
            digests.setdefault(name, {})[seq_len] = sha256_bytes(ALGORITHM.encode())
        elif config.packing == "best-fit":
            digests.setdefault(name, {})[seq_len] = sha256_bytes(indexes[_pack_key(name, seq_len)])
    return digests


def _lengths(config: "DataConfig") -> set[tuple[str, int]]:
    """Return the (source, seq_len) pairs of all stages, including those before forks."""
    mine = {(name, stage.seq_len or config.seq_len) for stage in config.stages for name in stage.names}
    return mine | (_lengths(config.before_fork()[0]) if config.history else set())


def _pack_key(name: str, seq_len: int) -> str:
    return f"{name}/packs/{seq_len}"


def _in_common(field: str, sources: Mapping[str, Source]) -> Any:
    """Return the value of a field that all sources that record it share. Raises DataError if they differ."""
    values = {name: getattr(source, field) for name, source in sources.items()}
    values = {name: value for name, value in values.items() if value is not None}
    for name, value in values.items():
        first = next(iter(values))
        if value != values[first]:
            raise DataError(
                f"source '{name}' ({sources[name].where}) has {field}={value}, "
                f"source '{first}' ({sources[first].where}) has {values[first]}",
                allowed="sources made by one tokenizer",
                hint="run 'smalti data tokenize' for all sources with the same tokenizer",
            )
    return next(iter(values.values()), None)
