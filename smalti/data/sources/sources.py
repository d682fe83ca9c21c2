"""Opens a source, whoever wrote it: one rank reads its index, all open it from those bytes.

``format: auto`` is decided by what lies there. In a local folder two forms that both fit are an error; a store is never
listed, so only ``manifest.json`` and ``index.json`` are looked for, in this order, and other forms must be named.
"""

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

from smalti.base import cloud, store
from smalti.base.errors import DataError, UserError
from smalti.data.fetch import Files, Share, open_files
from smalti.data.fetch.files import Check, Damaged
from smalti.data.sources.readers.index import Index, parsed_json
from smalti.data.sources.source import Source
from smalti.data.tokens.manifest import FILE_NAME as MANIFEST
from smalti.data.tokens.manifest import Manifest
from smalti.data.tokens.reader import TokenSource

if TYPE_CHECKING:  # the start of a rank is measured: pydantic is not needed to open a source
    from smalti.config.data import FetchConfig, SourceConfig

INDEX = "index.json"
FORMS = ("smalti", "mds", "litdata", "megatron", "raw", "text")
_RAW = (".npy", ".bin", ".ds")
_TEXT = (".jsonl", ".jsonl.gz", ".jsonl.zst", ".ndjson", ".parquet")
_OF_FILES = ("megatron", "raw", "text")


def read_index(config: "SourceConfig", fetch: "FetchConfig", *, tokenizer: str | None = None) -> bytes:
    """All that is read of a source before its tokens; for ``open_source`` on every rank.

    ``tokenizer``: ``data.tokenizer``, for text. Raises DataError where nothing, or more than one form, lies there.
    """
    folder, name = _place(config)
    files = open_files(folder, mirrors=_mirrors(config, name), fetch=fetch)
    try:
        if config.format != "auto":
            form, known = str(config.format), None
        else:
            form, known = _form(config, files, name)
        try:
            config.check_format(form)
        except ValueError as error:
            raise UserError(f"the source {config.path}: {error}") from error
        try:
            return _read(form, known, config, files, [name] if name else [], tokenizer).pack()
        except DataError as error:
            other = _other_form(config, files)
            if other is None:
                raise
            raise DataError(error.message, allowed=error.allowed, hint=other) from error
    finally:
        files.close()


def open_source(
    config: "SourceConfig",
    index: bytes,
    fetch: "FetchConfig",
    share: Share = Share(),  # noqa: B008 - a tuple
    *,
    tokenizer: str | None = None,
) -> Source:
    """The source, from what ``read_index`` returned; nothing more is read before the first row, but for text."""
    read = Index.unpack(index)
    folder, name = _place(config)
    # other forms' digests are of names and sizes: a cache would keep what is stale or damaged for ever
    digest = read.facts.get("digest") if read.form == "smalti" else None
    files = open_files(folder, mirrors=_mirrors(config, name), fetch=fetch, share=share, digest=digest)
    if read.form == "smalti":
        return TokenSource(folder, index=read.parts[MANIFEST], files=files)
    if read.form == "mds":
        from smalti.data.sources.readers.mds import open_mds

        return open_mds(config, read, files)
    if read.form == "litdata":
        from smalti.data.sources.readers.litdata import open_litdata

        return open_litdata(config, read, files)
    if read.form == "megatron":
        from smalti.data.sources.readers.megatron import open_megatron

        return open_megatron(config, read, files)
    if read.form == "raw":
        from smalti.data.sources.readers.raw import open_raw

        return open_raw(config, read, files)
    from smalti.data.sources.readers.text import open_text

    return open_text(config, read, files, tokenizer)


def _read(
    form: str, known: bytes | None, config: "SourceConfig", files: Files, names: list[str], tokenizer: str | None
) -> Index:
    """``known``: manifest.json or index.json, where the form was told by it: it is read once."""
    if form == "smalti":
        data = files.whole(MANIFEST, _checks(files)[MANIFEST]) if known is None else known
        value = parsed_json(data, f"{files.where}/{MANIFEST}")
        digest = value.get("digest") if isinstance(value, dict) else None
        return Index("smalti", {"digest": digest}, {MANIFEST: data})
    if form == "mds":
        from smalti.data.sources.readers.mds import read_mds_index

        return read_mds_index(config, files, known or files.whole(INDEX, _checks(files)[INDEX]))
    if form == "litdata":
        from smalti.data.sources.readers.litdata import read_litdata_index

        return read_litdata_index(files, known or files.whole(INDEX, _checks(files)[INDEX]))
    if form == "megatron":
        from smalti.data.sources.readers.megatron import read_megatron_index

        return read_megatron_index(config, files, [name.removesuffix(".idx").removesuffix(".bin") for name in names])
    if form == "raw":
        from smalti.data.sources.readers.raw import read_raw_index

        return read_raw_index(config, files, names)
    from smalti.data.sources.readers.text import read_text_index

    return read_text_index(config, files, tokenizer, names)


def _place(config: "SourceConfig") -> tuple[str, str]:
    """Folder, and the one file in it that ``path`` names (empty: the path is the folder)."""
    path = config.path.rstrip("/")
    folder, _, name = path.rpartition("/")
    if config.files and store.is_local(path) and os.path.isfile(path):
        raise UserError(
            f"path={path} is a file, and files= names files below a folder",
            hint=f"leave files out, or path={folder or '.'}",
        )
    if config.format not in ("auto", *_OF_FILES) or config.files or not name:
        return config.path, ""
    if store.is_local(path):
        is_file = os.path.isfile(path) or (not os.path.isdir(path) and os.path.isfile(f"{path}.idx"))
    else:
        is_file = name.endswith((*_RAW, *_TEXT, ".idx")) or config.format == "megatron"
    return (folder or ("." if not path.startswith("/") else "/"), name) if is_file else (config.path, "")


def _mirrors(config: "SourceConfig", name: str) -> tuple[str, ...]:
    """Mirrors as folders: of one file they are copies of that file."""
    return tuple(url.rstrip("/").rpartition("/")[0] for url in config.mirrors) if name else config.mirrors


def _form(config: "SourceConfig", files: Files, name: str) -> tuple[str, bytes | None]:
    """The one form that lies there, and the index that told it."""
    if not store.is_local(config.path) and not name:
        return _form_in_store(files)
    if not os.path.exists(config.path) and not name:
        raise DataError(
            f"{config.path} holds no token files: it does not exist",
            hint="check the path; token files are written by 'smalti data tokenize'",
        )
    if name:
        return _form_of_file(files, name), None
    fitting = dict(_fitting(config, files))
    if len(fitting) == 1:
        return next(iter(fitting)), None
    told = ", ".join(f"{form} ({found})" for form, found in fitting.items())
    if fitting:
        raise DataError(
            f"{config.path} holds more than one form of tokens: {told}",
            allowed=", ".join(FORMS),
            hint=f"say which is meant: format={next(iter(fitting))}",
        )
    raise DataError(
        f"{config.path} holds no token files, and no other form of tokens or documents",
        allowed="manifest.json (ours), index.json (MDS, litData), .idx (Megatron), .npy, .bin, .jsonl, .parquet",
        hint=_hint_of_splits(config.path),
    )


def _fitting(config: "SourceConfig", files: Files) -> Iterator[tuple[str, str]]:
    """Forms that fit a local folder, with the file that shows it."""
    names = sorted(os.listdir(config.path))
    by_index = False
    if MANIFEST in names:
        by_index = True
        yield "smalti", MANIFEST
    if INDEX in names:
        by_index = True
        yield _form_of_index(files.whole(INDEX), files), INDEX
    if by_index:  # what else lies there belongs to it: litData's chunks end in .bin
        return
    prefixes = {name.removesuffix(".idx") for name in names if name.endswith(".idx")}
    if prefixes:
        yield "megatron", f"{min(prefixes)}.idx"
    rest = [name for name in names if name.removesuffix(".bin") not in prefixes]
    for form, suffixes in (("raw", _RAW), ("text", _TEXT)):
        found = next((name for name in rest if name.endswith(suffixes)), None)
        if found or (form == "raw" and not prefixes and config.files and config.dtype):
            yield form, found or config.files[0]


def _other_form(config: "SourceConfig", files: Files) -> str | None:
    """What to type where another form lies there than the one that is named; None where that is not so."""
    if config.format == "auto" or not store.is_local(config.path) or not os.path.isdir(config.path):
        return None
    try:
        fitting = dict(_fitting(config, files))
    except DataError:
        return None
    if not fitting or config.format in fitting:
        return None
    form = next(iter(fitting))
    return f"there lies {fitting[form]}: format={form}, or leave format out"


def _form_of_index(data: bytes, files: Files) -> str:
    value = parsed_json(data, f"{files.where}/{INDEX}")
    if isinstance(value, dict) and "shards" in value:
        return "mds"
    if isinstance(value, dict) and "chunks" in value:
        return "litdata"
    raise DataError(f"{files.where}/{INDEX} is neither of MDS (shards) nor of litData (chunks)", hint="say format=")


def _form_in_store(files: Files) -> tuple[str, bytes]:
    refused: DataError | None = None
    for name in (MANIFEST, INDEX):
        try:
            data = files.whole(name, _checks(files)[name])
        except Damaged:
            raise
        except DataError as error:
            refused = refused or (
                error if cloud.trouble(error.__cause__ or error) in ("forbidden", "keyless") else None
            )
            continue
        return "smalti" if name == MANIFEST else _form_of_index(data, files), data
    if refused is not None:
        raise refused
    raise DataError(
        f"{files.where} holds neither {MANIFEST} nor {INDEX}; a store is not listed, so no other form is looked for",
        allowed=", ".join(FORMS),
        hint="check the path, or say format= and files=",
    )


def _checks(files: Files) -> dict[str, Check]:
    """The check that the bytes of an index must pass."""
    return {
        MANIFEST: lambda data: Manifest.parse(data, f"{files.where}/{MANIFEST}"),
        INDEX: lambda data: parsed_json(data, f"{files.where}/{INDEX}"),
    }


def _form_of_file(files: Files, name: str) -> str:
    if name.endswith(_TEXT):
        return "text"
    if name.endswith((".npy", ".ds")):
        return "raw"
    bare = name.removesuffix(".bin").removesuffix(".idx")
    try:
        files.size(f"{bare}.idx")
    except DataError:
        if name.endswith(".idx"):
            raise
        if name.endswith(".bin"):
            return "raw"
        raise DataError(
            f"{files.where}/{name} is of no form that can be told by its name",
            allowed=", ".join(FORMS),
            hint="numbers without a header: format=raw dtype=uint16",
        ) from None
    return "megatron"


def _hint_of_splits(path: str) -> str:
    for name in sorted(os.listdir(path)):
        if any(os.path.isfile(os.path.join(path, name, index)) for index in (MANIFEST, INDEX)):
            return f"path={path.rstrip('/')}/{name}"
    return "check the path; a folder whose writing was cut off is written again: 'smalti data tokenize'"
