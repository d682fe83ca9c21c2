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

if TYPE_CHECKING:  # the start of a rank is measured: pydantic is not needed to open a source
    from smalti.config.data import FetchConfig, SourceConfig


class Reader(Protocol):
    """The functions of a module ``readers/NAME.py``, which reads the format NAME of ``config/token_formats.py``."""

    def read_index(self, folder: SourceFolder) -> Index:
        """Read all that is needed to open the source. Raises DataError."""

    def open_source(self, folder: SourceFolder, index: Index) -> Source:
        """Open the source from what ``read_index`` returned on any rank; nothing is read before the first row."""


def read_index(config: "SourceConfig", fetch: "FetchConfig", *, tokenizer: str | None = None) -> bytes:
    """Read all of a source that comes before its tokens; for ``open_source`` on every rank.

    ``tokenizer``: ``data.tokenizer``, for text. Raises DataError where no format, or more than one, fits the folder.
    """
    path, file = _split_path(config)
    files = open_files(path, mirrors=_mirrors(config, file), fetch=fetch)
    try:
        if config.format == "auto":
            name, index_file = detect_format(config, files, file)
        else:
            name, index_file = config.format, None
        try:
            config.check_format(name)
        except ValueError as error:
            raise UserError(f"the source {config.path}: {error}") from error
        expected = FORMATS[name].index_file
        try:
            if expected and index_file is None:
                index_file = files.whole(expected, index_check(files, expected))
            return _reader(name).read_index(SourceFolder(config, files, file, index_file or b"", tokenizer)).pack()
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
    """Open a source from what ``read_index`` returned; nothing more is read before the first row, except of text.

    ``counts``: to which the cost of reading is added.
    """
    unpacked = Index.unpack(index)
    path, file = _split_path(config)
    # digests of other formats are of names and sizes: a cache would keep what is stale or damaged for ever
    digest = unpacked.facts.get("digest") if unpacked.form == "smalti" else None
    files = open_files(path, mirrors=_mirrors(config, file), fetch=fetch, share=share, digest=digest, counts=counts)
    return _reader(unpacked.form).open_source(SourceFolder(config, files, file, tokenizer=tokenizer), unpacked)


def _reader(name: str) -> Reader:
    # imported when needed: most readers need packages that the start of a rank does not
    return cast(Reader, import_module(f"smalti.data.sources.readers.{name}"))


def _split_path(config: "SourceConfig") -> tuple[str, str]:
    """Folder, and the one file in it that ``path`` names (empty: the path is the folder)."""
    path = config.path.rstrip("/")
    folder, _, name = path.rpartition("/")
    if config.files and store.is_local(path) and os.path.isfile(path):
        raise UserError(
            f"path={path} is a file, and files= names files below a folder",
            hint=f"leave files out, or path={folder or '.'}",
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
    """Mirrors as folders: of one file they are copies of that file."""
    return tuple(url.rstrip("/").rpartition("/")[0] for url in config.mirrors) if file else config.mirrors
