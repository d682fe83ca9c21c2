"""Which files of a folder are meant, where no index says it: named one by one, or locally by patterns; and what each
says of itself, asked of a store at once."""

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


def named_files(files: Files, given: Sequence[str], suffixes: Sequence[str]) -> list[str]:
    """Names below the folder of ``files``: those of ``given``, patterns spelled out, in the order given.

    Nothing given: all local files that end in one of ``suffixes``, sorted. Raises UserError for a store, which is never
    listed, DataError where nothing is found, or a file twice.
    """
    local = store.is_local(files.where)
    wanted = given or [f"*{suffix}" for suffix in suffixes]
    names: list[str] = []
    for name in wanted:
        if not any(sign in name for sign in _MAGIC):
            names.append(confined(name))
            continue
        if not local:
            raise UserError(
                f"{files.where} is not listed" + (f", so '{name}' finds nothing" if given else ""),
                hint="name its files: files=[part-00.bin, part-01.bin]",
            )
        found = sorted(_found(files.where, name))
        if given and not found:
            raise DataError(f"no file of {files.where} fits '{name}'", hint="check path and files of the source")
        names += found
    if not given:
        names.sort()
    if not names:
        raise DataError(f"{files.where} holds no files that end in {' or '.join(suffixes)}", hint="name them: files=")
    twice = sorted({name for name in names if names.count(name) > 1}) if len(set(names)) < len(names) else []
    if twice:
        raise UserError(f"'{twice[0]}' of {files.where} is meant twice by files=", allowed="each file once")
    return names


def ask_each(files: Files, ask: Callable[[str], T], names: Sequence[str]) -> list[T]:
    """``ask(name)`` of every file, in order; of a store, whose answers take their time, many at once. Raises what the
    first that fails raises."""
    if store.is_local(files.where) or len(names) < 2:
        return [ask(name) for name in names]
    with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="ask-each") as threads:
        try:
            return list(threads.map(ask, names))
        except BaseException:
            threads.shutdown(wait=False, cancel_futures=True)
            raise


def _found(folder: str, pattern: str) -> list[str]:
    names = glob.glob(confined(pattern), root_dir=folder, recursive=True)
    return [name for name in names if os.path.isfile(os.path.join(folder, name))]
