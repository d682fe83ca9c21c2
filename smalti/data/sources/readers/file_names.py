"""The files of a source without an index: listed by name, or in a local folder by pattern."""

import glob
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from smalti.base import store
from smalti.base.errors import DataError, UserError
from smalti.data.fetch import Files
from smalti.data.fetch.files import confined

T = TypeVar("T")

_MAGIC = "*?["
_AT_ONCE = 32


def expand_names(files: Files, patterns: Sequence[str], suffixes: Sequence[str]) -> list[str]:
    """Expand ``patterns`` to file names below the folder of ``files``, in their order.

    Without patterns: all local files that end in one of ``suffixes``, sorted. Raises UserError for a pattern in a
    store, which is never listed, and for a repeated file; DataError if no file matches.
    """
    local = store.is_local(files.where)
    names: list[str] = []
    for name in patterns or [f"*{suffix}" for suffix in suffixes]:
        if not any(sign in name for sign in _MAGIC):
            names.append(confined(name))
            continue
        if not local:
            raise UserError(
                f"{files.where} is a store, which is not listed"
                + (f", so '{name}' matches no file" if patterns else ""),
                hint="name its files: files=[part-00.bin, part-01.bin]",
            )
        matches = sorted(_matches(files.where, name))
        if patterns and not matches:
            raise DataError(f"no file of {files.where} matches '{name}'", hint="check path and files of the source")
        names += matches
    if not patterns:
        names.sort()
    if not names:
        raise DataError(f"{files.where} holds no files that end in {' or '.join(suffixes)}", hint="name them: files=")
    repeated = sorted({name for name in names if names.count(name) > 1}) if len(set(names)) < len(names) else []
    if repeated:
        raise UserError(f"files= names '{repeated[0]}' of {files.where} twice", allowed="each file once")
    return names


def map_files(files: Files, function: Callable[[str], T], names: Sequence[str]) -> list[T]:
    """Call ``function(name)`` for each file and return the results in order; in a store, concurrently.

    Raises the error of the first call that failed.
    """
    if store.is_local(files.where) or len(names) < 2:
        return [function(name) for name in names]
    with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="map-files") as threads:
        try:
            return list(threads.map(function, names))
        except BaseException:
            threads.shutdown(wait=False, cancel_futures=True)
            raise


def _matches(folder: str, pattern: str) -> list[str]:
    names = glob.glob(confined(pattern), root_dir=folder, recursive=True)
    return [name for name in names if os.path.isfile(os.path.join(folder, name))]
