"""Opens what a run reads: sources, best-fit indexes, takedowns; each from bytes that one rank reads for all.

``read_indexes`` does all the reading: an index of each source, ``pack.json`` of the best-fit indexes, and the
takedowns. Its result is passed to the other ranks, which open everything from it without a file or a request.
"""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from smalti.base.errors import DataError
from smalti.base.hashing import sha256_bytes
from smalti.data.fetch import Share
from smalti.data.fetch.counts import Counts
from smalti.data.pack.concat import Chopped
from smalti.data.pack.index import RECORD_NAME, PackIndex, PackRecord, pack_folder, read_record
from smalti.data.pack.packed import Packed
from smalti.data.pack.rows import Sequences
from smalti.data.sources.open import open_source, read_index
from smalti.data.sources.source import Source
from smalti.data.stream.takedowns import Takedowns

if TYPE_CHECKING:
    from smalti.config.data import DataConfig

_TAKEDOWNS = "/takedowns"
"""Keys beside the names of sources, which have no slash."""


@dataclass(frozen=True)
class Opened:
    """The sources of a run, and the metadata they share; None if no source has it."""

    sources: Mapping[str, Source]
    eod_id: int | None
    vocab_size: int | None
    tokenizer_digest: str | None

    @property
    def fill_id(self) -> int:
        """Token id of padding; never a target."""
        return 0 if self.eod_id is None else self.eod_id


def read_indexes(config: "DataConfig") -> dict[str, bytes]:
    """All that a stream needs to know of files before it reads tokens; for rank 0, which passes it on.

    Raises DataError for what is missing or damaged, and for a takedown that names no document.
    """
    indexes = {}
    for name, source in config.sources.items():
        with named(f"data.sources.{name} = {source.path}"):
            indexes[name] = read_index(source, config.fetch, tokenizer=config.tokenizer)
    if config.packing == "best-fit":
        for name, seq_len in sorted(_lengths(config)):
            indexes[_pack_key(name, seq_len)] = read_record(config.sources[name].path, seq_len)
    if config.takedowns is not None:
        with ExitStack() as stack:
            opened = open_sources(config, indexes)
            for one in opened.sources.values():
                stack.callback(one.close)
            indexes[_TAKEDOWNS] = Takedowns.read(config.takedowns, opened.sources).to_bytes()
    return indexes


@contextmanager
def named(field: str) -> Iterator[None]:
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
    """Open all sources from their indexes. Raises DataError where they do not fit together.

    ``counts``: to which the cost of reading is added.
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
    """How each source is cut that a stage reads in sequences of ``seq_len``. Raises DataError for one that has not a
    single one."""
    cut: dict[str, Sequences] = {}
    used = _lengths(config)
    for name, source in opened.sources.items():
        if (name, seq_len) not in used:
            continue
        if config.packing == "concat":
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
            cut[name] = Packed(source, PackIndex(record, folder), opened.fill_id)
        if not cut[name].size:
            raise DataError(
                f"source '{name}' ({source.where}) has {source.n_tokens:,} tokens, less than one sequence",
                allowed=f"at least seq_len + 1 = {seq_len + 1:,} tokens",
                hint="give the source more documents, or make data.seq_len smaller",
            )
    return cut


def takedowns_of(indexes: Mapping[str, bytes]) -> Takedowns | None:
    """The documents that are blanked; None: the config names no list."""
    return Takedowns.from_bytes(indexes[_TAKEDOWNS]) if _TAKEDOWNS in indexes else None


def pack_digests(config: "DataConfig", indexes: Mapping[str, bytes]) -> dict[str, dict[int, str]]:
    """Name -> seq_len -> digest of a best-fit index; empty where sequences are chopped."""
    if config.packing == "concat":
        return {}
    digests: dict[str, dict[int, str]] = {}
    for name, seq_len in sorted(_lengths(config)):
        digests.setdefault(name, {})[seq_len] = sha256_bytes(indexes[_pack_key(name, seq_len)])
    return digests


def _lengths(config: "DataConfig") -> set[tuple[str, int]]:
    """(source, seq_len) for all that the run reads, has read and will read."""
    mine = {(name, stage.seq_len or config.seq_len) for stage in config.stages for name in stage.names}
    return mine | (_lengths(config.before_fork()[0]) if config.history else set())


def _pack_key(name: str, seq_len: int) -> str:
    return f"{name}/packs/{seq_len}"


def _in_common(field: str, sources: Mapping[str, Source]) -> Any:
    """What all sources that say it agree on."""
    said = {name: getattr(source, field) for name, source in sources.items()}
    said = {name: value for name, value in said.items() if value is not None}
    for name, value in said.items():
        first = next(iter(said))
        if value != said[first]:
            raise DataError(
                f"source '{name}' ({sources[name].where}) has {field}={value}, "
                f"source '{first}' ({sources[first].where}) has {said[first]}",
                allowed="sources made by one tokenizer",
                hint="run 'smalti data tokenize' for all sources with the same tokenizer",
            )
    return next(iter(said.values()), None)
