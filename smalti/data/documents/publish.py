"""Replaces what a verb wrote into a folder, whole: work goes on in a hidden folder inside, then takes the final names.

Promises: a reader finds either the old result or the new one, or a record that says ``complete: false``; only entries
that an earlier run listed as its own are ever removed; two writers in one folder are refused. Local folders only.
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

_WORK = ".smalti-work"


@dataclass
class Publication:
    """Where to write now, and the record that will describe the result."""

    work: Path
    """Folder for the new entries; what lies in it at the end takes the old entries' place."""
    record: dict[str, Any] = field(default_factory=dict)
    """Content of the record file, filled in by the writer; equal inputs must give equal records."""


@contextmanager
def publication(output: str, *, kind: str, record_name: str) -> Iterator[Publication]:
    """Write into ``.work``, fill ``.record``; when the block ends well everything appears under ``output``.

    ``kind`` says what wrote the folder. UserError when ``output`` holds entries of the same names that no earlier run
    of this kind has written.
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
            _take_place(folder, result, kind, record_name)
        finally:
            shutil.rmtree(work, ignore_errors=True)


def read_record(output: str, *, kind: str, record_name: str, verb: str) -> dict[str, Any]:
    """The record of a finished result. DataError when there is none or its writer was cut off."""
    path = store.join(output, record_name)
    hint = f"write it with '{verb}'"
    if not store.exists(path):
        raise DataError(f"{output} was not written by '{verb}': {record_name} is missing", hint=hint)
    record = store.read_json(path)
    if not isinstance(record, dict) or record.get("kind") != kind:
        raise DataError(f"{path} is not the record of '{verb}'", hint=hint)
    if not record.get("complete"):
        raise DataError(
            f"{output} is incomplete: '{verb}' was cut off while it wrote", hint="run the same command again"
        )
    return record


def _take_place(folder: Path, result: Publication, kind: str, record_name: str) -> None:
    new = sorted(entry.name for entry in result.work.iterdir())
    old = _own_entries(folder, kind, record_name)
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


def _own_entries(folder: Path, kind: str, record_name: str) -> list[str]:
    path = folder / record_name
    if not path.exists():
        return []
    try:
        record = json.loads(path.read_bytes())
        mine = record["kind"] == kind
        entries = [str(name) for name in record["entries"]]
    except (ValueError, TypeError, KeyError):
        mine, entries = False, []
    if not mine:
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
    # The lock is the system's and goes with the process: nothing stale is left behind by a kill.
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise UserError(f"another process is writing to {folder}", hint="wait for it to end") from error
        yield
    finally:
        os.close(descriptor)
