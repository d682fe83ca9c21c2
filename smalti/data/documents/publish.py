"""Replaces the output of a command in a folder as a whole.

New entries are written to a hidden folder inside and renamed at the end. Guarantees: a reader sees the old result, the
new one, or a record with ``complete: false``; only entries that an earlier record lists are removed; a second writer in
the same folder is an error. Local folders only.
"""

import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from smalti.base import store
from smalti.base.errors import DataError, UserError
from smalti.base.hashing import sha256_file

_WORK = ".smalti-work"


@dataclass
class Publication:
    """The folder for new entries, and the record that describes them."""

    work: Path
    """Folder for the new entries; at the end they replace the old ones."""
    record: dict[str, Any] = field(default_factory=dict)
    """Content of the record file, set by the writer; equal inputs must give equal records."""


@contextmanager
def publication(output: str, *, kind: str, record_name: str) -> Iterator[Publication]:
    """Yield a ``Publication``; when the block ends without an error its entries appear under ``output``.

    ``kind`` is the command that writes the folder.

    Raises:
        UserError: ``output`` has entries of the same names that no earlier run of this kind wrote.
    """
    if not store.is_local(output):
        raise UserError(f"'{output}' cannot be written to", allowed="a local folder", hint="write locally, then copy")
    folder = Path(output)
    if folder.exists() and not folder.is_dir():
        raise UserError(f"output '{output}' is a file, not a folder")
    store.make_folder(folder)
    with only_writer(folder):
        work = folder / _WORK
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir()
        try:
            result = Publication(work)
            yield result
            _replace_entries(folder, result, kind, record_name)
        finally:
            shutil.rmtree(work, ignore_errors=True)


def read_record(output: str, *, kind: str, record_name: str, verb: str) -> dict[str, Any]:
    """Return the record of a finished result. DataError if there is none or its writer was interrupted."""
    path = store.join(output, record_name)
    hint = f"write it with '{verb}'"
    if not store.exists(path):
        raise DataError(f"{output} was not written by '{verb}': {record_name} is missing", hint=hint)
    record = store.read_json(path)
    if not isinstance(record, dict) or record.get("kind") != kind:
        raise DataError(f"{path} is not the record of '{verb}'", hint=hint)
    if not record.get("complete"):
        raise DataError(
            f"{output} is incomplete: '{verb}' was interrupted while it wrote", hint="run the same command again"
        )
    return record


def parquet_digests(folder: Path) -> dict[str, str]:
    """Return path -> SHA-256 of every Parquet file under ``folder``, sorted."""
    files = sorted(path for path in folder.rglob("*.parquet") if path.is_file())
    return {path.relative_to(folder).as_posix(): sha256_file(path) for path in files}


def check_not_nested(source: str, output: str, what: str) -> None:
    """Raise UserError if ``source`` (``what`` in the message) contains ``output`` or is a folder inside it."""
    paths = os.path.realpath(source), os.path.realpath(output)
    if os.path.commonpath(paths) in paths and (paths[0] == paths[1] or not os.path.isfile(paths[0])):
        raise UserError(
            f"{what} and the output ({output}) overlap: one folder contains the other",
            hint="choose an output folder beside it",
        )


def _replace_entries(folder: Path, result: Publication, kind: str, record_name: str) -> None:
    new = sorted(entry.name for entry in result.work.iterdir())
    old = _listed_entries(folder, kind, record_name)
    foreign = [name for name in new if name not in old and (folder / name).exists()]
    if foreign:
        raise UserError(
            f"{folder / foreign[0]} exists and was not written by 'smalti data {kind}'; it would be lost",
            hint="name another output folder, or remove it",
        )
    head = {"format": 1, "kind": kind}
    store.write_json(folder / record_name, {**head, "complete": False, "entries": sorted({*old, *new})})
    for name in old:
        _remove(folder / name)
    for name in new:
        os.replace(result.work / name, folder / name)
    store.write_json(folder / record_name, {**head, "complete": True, "entries": new, **result.record})


def _listed_entries(folder: Path, kind: str, record_name: str) -> list[str]:
    """Return the entries that an earlier run of this kind wrote. UserError if another kind wrote the record."""
    path = folder / record_name
    if not path.exists():
        return []
    try:
        record = json.loads(path.read_bytes())
        same_kind = record["kind"] == kind
        entries = [str(name) for name in record["entries"]]
    except (ValueError, TypeError, KeyError):
        same_kind = False
        entries = []
    if not same_kind:
        raise UserError(
            f"{path} exists and was not written by 'smalti data {kind}'",
            hint="name another output folder, or remove it",
        )
    return [name for name in entries if name == os.path.basename(name) and name not in ("", ".", "..")]


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


@contextmanager
def only_writer(folder: Path) -> Iterator[None]:
    """Lock ``folder`` for this process; UserError if another one holds the lock."""
    # The lock is the system's and ends with the process: a kill leaves nothing stale.
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise UserError(f"another process is writing to {folder}", hint="wait for it to end") from error
        yield
    finally:
        os.close(descriptor)
