"""Opens a source in any format: one rank reads its index, all open it from those bytes."""

import os
from importlib import import_module
from typing import TYPE_CHECKING, Protocol, cast

from smalti.base import store
from smalti.base.errors import DataError, UserError
from smalti.config.token_formats import FORMATS
from smalti.data.fetch import Share, open_files
from smalti.data.fetch.counts import Counts
from smalti.data.sources.detect import detect_format, index_check, other_format
from smalti.data.sources.readers.index import Index, SourceFolder
from smalti.data.sources.source import Source

if TYPE_CHECKING:  # importing pydantic would slow the start of a rank
    from smalti.config.data import FetchConfig, SourceConfig


class Reader(Protocol):
    """The functions of a module ``readers/NAME.py``, which reads the format NAME of ``config/token_formats.py``."""

    def read_index(self, folder: SourceFolder) -> Index:
        """Read everything that is needed to open the source. Raises DataError."""

    def open_source(self, folder: SourceFolder, index: Index) -> Source:
        """Open the source from the result of ``read_index`` on any rank; nothing is read before the first row."""


def read_index(config: "SourceConfig", fetch: "FetchConfig", *, tokenizer: str | None = None) -> bytes:
    """Read the index of a source, from which ``open_source`` opens it on every rank.

    ``tokenizer``: ``data.tokenizer``, for text. Raises DataError if no format, or more than one, matches the folder.
    """
    path, file = _split_path(config)
    files = open_files(path, mirrors=_mirrors(config, file), fetch=fetch)
    try:
        if config.format == "auto":
            name, index_file = detect_format(config, files, file)
        else:
            name = config.format
            index_file = None
        try:
            config.check_format(name)
        except ValueError as error:
            raise UserError(f"the source {config.path}: {error}") from error
        expected = FORMATS[name].index_file
        try:
            if expected and index_file is None:
                index_file = files.whole(expected, index_check(files, expected))
            return _reader(name).read_index(SourceFolder(config, files, file, index_file or b"", tokenizer)).to_bytes()
        except DataError as error:
            hint = other_format(config, files)
            if hint is None:
                raise
            raise DataError(error.message, allowed=error.allowed, hint=hint) from error
    finally:
        files.close()


def open_source(
    config: "SourceConfig",
    index: bytes,
    fetch: "FetchConfig",
    share: Share = Share(),  # noqa: B008 - a tuple
    *,
    tokenizer: str | None = None,
    counts: Counts | None = None,
) -> Source:
    """Open a source from the result of ``read_index``; except for text, nothing else is read before the first row.

    ``counts``: the counters to which the cost of reading is added.
    """
    parsed = Index.from_bytes(index)
    path, file = _split_path(config)
    # The digests of other formats cover names and sizes only: a cache would never notice stale or damaged blocks.
    digest = parsed.facts.get("digest") if parsed.format == "smalti" else None
    files = open_files(path, mirrors=_mirrors(config, file), fetch=fetch, share=share, digest=digest, counts=counts)
    return _reader(parsed.format).open_source(SourceFolder(config, files, file, tokenizer=tokenizer), parsed)


def _reader(name: str) -> Reader:
    # imported on demand: most readers need packages that a rank otherwise does not import
    return cast(Reader, import_module(f"smalti.data.sources.readers.{name}"))


def _split_path(config: "SourceConfig") -> tuple[str, str]:
    """Split ``path`` into its folder and the file that it names (empty if it names the folder)."""
    path = config.path.rstrip("/")
    folder, _, name = path.rpartition("/")
    if config.files and store.is_local(path) and os.path.isfile(path):
        raise UserError(
            f"path={path} is a file, and files= names files below a folder",
            hint=f"omit files, or set path={folder or '.'}",
        )
    may_be_file = config.format == "auto" or "files" in FORMATS[config.format].options
    if not may_be_file or config.files or not name:
        return config.path, ""
    if store.is_local(path):
        is_file = os.path.isfile(path) or (not os.path.isdir(path) and os.path.isfile(f"{path}.idx"))
    else:
        suffixes = tuple(suffix for traits in FORMATS.values() for suffix in traits.suffixes)
        is_file = name.endswith(suffixes) or config.format == "megatron"
    return (folder or ("." if not path.startswith("/") else "/"), name) if is_file else (config.path, "")


def _mirrors(config: "SourceConfig", file: str) -> tuple[str, ...]:
    """Return the folders of the mirrors; the mirrors of a single file name a file each."""
    return tuple(url.rstrip("/").rpartition("/")[0] for url in config.mirrors) if file else config.mirrors
