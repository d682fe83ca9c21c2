"""Finds the files of a source; the suffix of a file decides its kind.

A kind that all commands read is in ``_SUFFIX_KIND``, ``KNOWN_KINDS`` and ``readers.READERS``; one of ``smalti data
build`` in ``_BUILD_SUFFIX_KIND``, ``BUILD_KINDS`` and ``build/extract/read.py``.
"""

import os
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Literal

from smalti.base import cloud, store
from smalti.base.errors import DataError, UserError

Kind = Literal["text", "jsonl", "parquet", "warc", "pdf", "epub", "docx", "notebook", "mail", "mbox", "man"]
Compression = Literal["none", "gz", "zst"]

_PROSE = "txt text md markdown rst tex adoc org"
_CODE = (
    "py pyi pyx ipy c h cc cpp cxx hpp hh hxx cu cuh m mm cs fs vb go rs java kt kts scala groovy clj js mjs cjs jsx "
    "ts tsx vue svelte rb php pl pm lua r jl sh bash zsh fish ps1 sql swift dart ex exs erl hrl hs ml mli lisp el scm "
    "rkt asm s f f90 f95 pas ada v sv vhd zig nim d tcl html htm xhtml css scss less xml yaml yml toml ini cfg cmake "
    "proto tf"
)
_CODE_SUFFIXES = frozenset(_CODE.split())
_SUFFIX_KIND: dict[str, Kind] = {
    **{f".{suffix}": "text" for suffix in f"{_PROSE} {_CODE}".split()},
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".parquet": "parquet",
}
_BUILD_SUFFIX_KIND: dict[str, Kind] = {
    ".warc": "warc", ".wet": "warc", ".pdf": "pdf", ".epub": "epub", ".docx": "docx", ".ipynb": "notebook",
    ".eml": "mail", ".mbox": "mbox",
}  # fmt: skip
"""Kinds that only ``smalti data build`` reads."""
_BARE_NAMES = frozenset({"Makefile", "Dockerfile", "README", "LICENSE", "COPYING", "CHANGELOG", "AUTHORS", "NEWS"})
_COMPRESSED: dict[str, Compression] = {".gz": "gz", ".zst": "zst"}
_MAN_NAME = re.compile(r"(?!\.|.*\.so\.).*[^\d.]\.[1-8][a-z]{0,4}")
"""Not libraries (libc.so.6) and versions (notes-1.2)."""
LINKED = "linked folders"
"""Linked folders are skipped: a link may be circular, or point to a folder that is already read."""
NO_FILE = "links to nothing, pipes and the like"
BUILD_KINDS = "WARC and WET, PDF, EPUB, DOCX, notebooks (.ipynb), mail (.eml, .mbox), man pages (.1 to .8)"
KNOWN_KINDS = "text, Markdown and source code; .jsonl (all of these also .gz, .zst); .parquet"


@dataclass(frozen=True)
class SourceFile:
    """A file of documents."""

    path: str
    name: str
    """Path inside the source; ids begin with it."""
    kind: Kind
    compression: Compression
    n_bytes: int
    data: bytes | None = field(default=None, repr=False)
    """Its content, if it is in memory; ``path`` is then for messages only."""
    version: str | None = None
    """Of a file in a store: changes with its content."""
    licence: str | None = None
    """That of its folder, where ``smalti data build`` asks for it."""


@dataclass(frozen=True)
class FoundFiles:
    """The files of a source, sorted by name."""

    files: tuple[SourceFile, ...]
    skipped: dict[str, int] = field(default_factory=dict)
    """Number of skipped files by unknown suffix, of LINKED and of NO_FILE."""
    unnamable: tuple[str, ...] = ()
    """Names that are not UTF-8, escaped: ids begin with the name; keys of stores that no URL names."""


def is_code(name: str) -> bool:
    """Whether a file with this name is read as text and is source code, by its suffix."""
    base, suffix = os.path.splitext(name.lower())
    return (os.path.splitext(base)[1] if suffix in _COMPRESSED else suffix).removeprefix(".") in _CODE_SUFFIXES


def find_files(path: str, include: Sequence[str] = (), *, for_build: bool = False) -> FoundFiles:
    """Find the files under ``path``, or the one file; hidden files and folders are ignored.

    ``for_build``: find the kinds of ``smalti data build`` too, and list names that are not UTF-8 instead of raising.

    Raises:
        DataError: ``path`` does not exist or has no documents, or a name is not UTF-8.
        UserError: a file that is named, or matches ``include``, is of no known kind.
    """
    if not store.is_local(path):
        if for_build and cloud.is_cloud(path):
            return _in_store(path, include)
        allowed = f"a local file or folder{', s3://, gs://, az:// or https://' if for_build else ''}"
        raise UserError(f"documents cannot be read from '{path}'", allowed=allowed, hint="copy them here first")
    if os.path.isfile(path):
        file = _source_file(path, os.path.basename(path), for_build=for_build)
        if file is None:
            raise _unknown_kind(path, for_build)
        return FoundFiles((file,))
    if not os.path.isdir(path):
        raise DataError(f"{path} does not exist", hint="check the path of the source")
    files, skipped, unnamable = _walk(path, include, for_build)
    if unnamable and not for_build:
        raise DataError(f"the name of {unnamable[0]} in {path} is not UTF-8", hint="rename it: ids begin with it")
    if not files and not unnamable:
        matching = f" that match {', '.join(include)}" if include else ""
        hint = "name the folder itself, not a link to it" if LINKED in skipped else "check the path of the source"
        raise DataError(f"{path} holds no documents{matching}", allowed=known_kinds(for_build), hint=hint)
    return FoundFiles(tuple(sorted(files, key=lambda file: file.name)), dict(sorted(skipped.items())), tuple(unnamable))


def _in_store(url: str, include: Sequence[str]) -> FoundFiles:
    """Find the files below a URL, or the one file."""
    base = os.path.basename(cloud.split(url)[1])
    file = _source_file(url, base, for_build=True, n_bytes=0)
    if file is not None and (details := cloud.details(url)) is not None:
        return FoundFiles((replace(file, n_bytes=details[0], version=details[1]),))
    if url.startswith(("http", "hf")):
        if file is None:
            raise _unknown_kind(url, True)
        raise DataError(f"{url} does not exist", hint="name a file: there is no list of those of a folder")
    files: list[SourceFile] = []
    skipped: Counter[str] = Counter()
    unnamable: list[str] = []
    for name, n_bytes, version in cloud.walk(url):
        base = os.path.basename(name)
        if any(part.startswith(".") for part in name.split("/")) or not _is_included(name, include):
            continue
        if "?" in name or "//" in name or name.startswith("/"):  # no URL of ours names it
            unnamable.append(name)
            continue
        file = _source_file(store.join(url, name), name, for_build=True, n_bytes=n_bytes)
        if file is not None:
            files.append(replace(file, version=version))
        elif include:
            raise _unknown_kind(store.join(url, name), True)
        else:
            skipped[Path(base).suffix or base] += 1
    if not files and not unnamable:
        matching = f" that match {', '.join(include)}" if include else ""
        raise DataError(f"{url} holds no documents{matching}", allowed=known_kinds(True), hint="check the URL")
    by_name = tuple(sorted(files, key=lambda file: file.name))
    return FoundFiles(by_name, dict(sorted(skipped.items())), tuple(sorted(unnamable)))


def _is_included(name: str, include: Sequence[str]) -> bool:
    base = os.path.basename(name)
    return not include or any(fnmatch(name, pattern) or fnmatch(base, pattern) for pattern in include)


def known_kinds(for_build: bool) -> str:
    """Return the kinds of files that are read, in words."""
    return f"{KNOWN_KINDS}; {BUILD_KINDS}" if for_build else KNOWN_KINDS


def held_file(path: str, data: bytes) -> SourceFile:
    """Return a file whose content is in memory. UserError if its kind is unknown."""
    file = _source_file(path, os.path.basename(path), data)
    if file is None:
        raise _unknown_kind(path)
    return file


def _walk(root: str, include: Sequence[str], for_build: bool) -> tuple[list[SourceFile], Counter[str], list[str]]:
    files: list[SourceFile] = []
    skipped: Counter[str] = Counter()
    unnamable: list[str] = []
    for folder, folders, names in os.walk(root, onerror=_unreadable_folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        skipped.update(LINKED for name in folders if os.path.islink(os.path.join(folder, name)))
        for base in sorted(names):
            path = os.path.join(folder, base)
            name = Path(path).relative_to(root).as_posix()
            if base.startswith("."):
                continue
            if not _is_included(name, include):
                continue
            if name != name.encode("utf-8", "replace").decode():
                unnamable.append(os.fsencode(name).decode("utf-8", "backslashreplace"))
                continue
            if not os.path.isfile(path):
                skipped[NO_FILE] += 1
                continue
            file = _source_file(path, name, for_build=for_build)
            if file is not None:
                files.append(file)
            elif include:
                raise _unknown_kind(path, for_build)
            else:
                skipped[Path(base).suffix or base] += 1
    return files, skipped, unnamable


def _unreadable_folder(error: OSError) -> None:
    raise DataError(
        f"{error.filename} cannot be read: {error.strerror}", hint="its documents would be missing"
    ) from error


def _source_file(
    path: str, name: str, data: bytes | None = None, *, for_build: bool = False, n_bytes: int | None = None
) -> SourceFile | None:
    base, suffix = os.path.splitext(os.path.basename(name))
    compression = _COMPRESSED.get(suffix.lower(), "none")
    inner = base if compression != "none" else base + suffix
    kind = _kind(inner, for_build)
    if kind is None and inner in _BARE_NAMES:
        kind = "text"
    if kind is None or (kind == "parquet" and compression != "none"):
        return None
    if n_bytes is None:
        n_bytes = os.path.getsize(path) if data is None else len(data)
    return SourceFile(path, name, kind, compression, n_bytes, data)


def _kind(name: str, for_build: bool) -> Kind | None:
    suffix = os.path.splitext(name)[1].lower()
    kind = _SUFFIX_KIND.get(suffix)
    if kind is None and for_build:
        kind = "man" if _MAN_NAME.fullmatch(os.path.basename(name)) else _BUILD_SUFFIX_KIND.get(suffix)
    return kind


def _unknown_kind(path: str, for_build: bool = False) -> UserError:
    only_build = not for_build and _kind(path.removesuffix(".gz").removesuffix(".zst"), True) is not None
    hint = "'smalti data build' reads it: tokenize its output" if only_build else "rename or convert it"
    return UserError(f"{path} is of no known kind", allowed=known_kinds(for_build), hint=hint)
