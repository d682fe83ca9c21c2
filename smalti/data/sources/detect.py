"""Detects the format of a source for ``format: auto``, by the files in its folder.

In a local folder it is an error if two formats match. A store is never listed: only the index files of
``config/token_formats.py`` are tried there, in its order; other formats must be named.
"""

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

from smalti.base import cloud, store
from smalti.base.errors import DataError
from smalti.config.token_formats import FORMATS, FormatName
from smalti.data.fetch import Files
from smalti.data.fetch.files import Check, Damaged
from smalti.data.sources.readers.index import parsed_json
from smalti.data.tokens.manifest import FILE_NAME as MANIFEST
from smalti.data.tokens.manifest import Manifest

if TYPE_CHECKING:
    from smalti.config.data import SourceConfig

_NAMES = ", ".join(FORMATS)
_SHARED_SUFFIXES = (".bin", ".idx")
"""A ``.bin`` file is Megatron's if there is an ``.idx`` file of the same name, else raw."""


def detect_format(config: "SourceConfig", files: Files, file: str) -> tuple[FormatName, bytes | None]:
    """Return the format of a source, and the content of its index file if that was read.

    ``file``: the file that ``path`` names; empty if it names a folder. Raises DataError if no format, or more than
    one, matches.
    """
    if not store.is_local(config.path) and not file:
        return _format_in_store(files)
    if not os.path.exists(config.path) and not file:
        raise DataError(
            f"{config.path} holds no token files: it does not exist",
            hint="check the path; token files are written by 'smalti data tokenize'",
        )
    if file:
        return _format_of_file(files, file), None
    matches = dict(_matching_formats(config, files))
    if len(matches) == 1:
        return next(iter(matches)), None
    if matches:
        shown = ", ".join(f"{name} ({file})" for name, file in matches.items())
        raise DataError(
            f"{config.path} holds more than one format of tokens: {shown}",
            allowed=_NAMES,
            hint=f"choose one: format={next(iter(matches))}",
        )
    raise DataError(
        f"{config.path} holds no token files, and no other format of tokens or documents",
        allowed="manifest.json (ours), index.json (MDS, litData), .idx (Megatron), .npy, .bin, .jsonl, .parquet",
        hint=_hint_of_subfolders(config.path),
    )


def other_format(config: "SourceConfig", files: Files) -> str | None:
    """Return a hint if the local folder has another format than the config names, else None."""
    if config.format == "auto" or not store.is_local(config.path) or not os.path.isdir(config.path):
        return None
    try:
        matches = dict(_matching_formats(config, files))
    except DataError:
        return None
    if not matches or config.format in matches:
        return None
    name = next(iter(matches))
    return f"the folder has {matches[name]}: format={name}, or omit format"


def index_check(files: Files, index_file: str) -> Check:
    """Return the function that checks the content of an index file."""
    path = f"{files.where}/{index_file}"
    if index_file == MANIFEST:
        return lambda data: Manifest.parse(data, path)
    return lambda data: parsed_json(data, path)


def _index_files(*, local: bool) -> list[str]:
    """Return the index files of all formats; examples are memory-mapped, so they are in local folders only."""
    formats = [traits for name, traits in FORMATS.items() if local or name != "examples"]
    return list(dict.fromkeys(traits.index_file for traits in formats if traits.index_file))


def _matching_formats(config: "SourceConfig", files: Files) -> Iterator[tuple[FormatName, str]]:
    """Yield the formats that match a local folder, each with a file that is evidence of it."""
    names = sorted(os.listdir(config.path))
    index_files = [name for name in _index_files(local=True) if name in names]
    for index_file in index_files:
        yield _format_of_index(files, index_file), index_file
    if index_files:  # the other files belong to it: litData's chunks end in .bin
        return
    prefixes = {name.removesuffix(".idx") for name in names if name.endswith(".idx")}
    rest = [name for name in names if name.removesuffix(".bin") not in prefixes]
    for name, traits in FORMATS.items():
        example = next((file for file in rest if file.endswith(traits.suffixes)), None)
        if example is None and name == "raw" and not prefixes and config.files and config.dtype:
            example = config.files[0]
        if example is not None:
            yield name, example


def _format_of_index(files: Files, index_file: str, data: bytes | None = None) -> FormatName:
    """Return the format that has this index file. ``data``: its content; None: it is read if needed."""
    candidates = {name: traits for name, traits in FORMATS.items() if traits.index_file == index_file}
    if len(candidates) == 1:
        return next(iter(candidates))
    value = parsed_json(files.whole(index_file) if data is None else data, f"{files.where}/{index_file}")
    for name, traits in candidates.items():
        if isinstance(value, dict) and traits.index_key in value:
            return name
    keys = " nor ".join(f"of {name} ({traits.index_key})" for name, traits in candidates.items())
    raise DataError(f"{files.where}/{index_file} is neither {keys}", hint="set format=")


def _format_in_store(files: Files) -> tuple[FormatName, bytes]:
    refused: DataError | None = None
    for index_file in _index_files(local=False):
        try:
            data = files.whole(index_file, index_check(files, index_file))
        except Damaged:
            raise
        except DataError as error:
            refused = refused or (
                error if cloud.trouble(error.__cause__ or error) in ("forbidden", "keyless") else None
            )
            continue
        return _format_of_index(files, index_file, data), data
    if refused is not None:
        raise refused
    raise DataError(
        f"{files.where} has neither {' nor '.join(_index_files(local=False))}; a store is not listed, so "
        "other formats are not detected",
        allowed=_NAMES,
        hint="check the path, or set format= and files=",
    )


def _format_of_file(files: Files, file: str) -> FormatName:
    for name, traits in FORMATS.items():
        if file.endswith(tuple(suffix for suffix in traits.suffixes if suffix not in _SHARED_SUFFIXES)):
            return name
    stem = file.removesuffix(".bin").removesuffix(".idx")
    try:
        files.size(f"{stem}.idx")
    except DataError:
        if file.endswith(".idx"):
            raise
        if file.endswith(".bin"):
            return "raw"
        raise DataError(
            f"the format of {files.where}/{file} cannot be detected from its name",
            allowed=_NAMES,
            hint="numbers without a header: format=raw dtype=uint16",
        ) from None
    return "megatron"


def _hint_of_subfolders(path: str) -> str:
    for name in sorted(set(os.listdir(path)) - {"heldout"}):
        if any(os.path.isfile(os.path.join(path, name, index_file)) for index_file in _index_files(local=True)):
            return f"did you mean {path.rstrip('/')}/{name}?"
    return "check the path; if the writing of this folder was interrupted, run 'smalti data tokenize' again"
