"""The copies of one folder: which is asked next, and how one of them is asked."""

import asyncio
import threading
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

from smalti.base import cloud, store
from smalti.base.errors import DataError, SmaltiError

_FAILURES = 3
"""After so many in a row a copy is left alone for a while."""
_REST_S, _LONGEST_REST_S = 5.0, 60.0
_LONGEST_S = 3600.0
"""The engine ends requests, each at its own deadline; the library's own is for all, whatever their length."""


class Short(DataError):
    """A file ends before the bytes that were asked for."""


class Truncated(Exception):
    """The store sent less of a file than it has."""


class OddAnswer(Exception):
    """A whole file came that cannot be the right one."""

    def __init__(self, final: SmaltiError) -> None:
        super().__init__(final.message)
        self.final = final
        """The error where it comes time and again."""


class Copy(Protocol):
    """One copy, asked from an event loop. Errors are those of its library; ``cloud.trouble`` reads them."""

    url: str

    async def range(self, name: str, start: int, length: int) -> Any:
        """A buffer; fewer bytes than asked where the file, or the transfer, ends."""

    async def begin(self, name: str, most: int) -> tuple[Any | None, int]:
        """(a whole file, its size); no bytes where there are more than ``most``."""

    async def size(self, name: str) -> int:
        """Size of a file."""


@dataclass
class _Health:
    failures: int = 0
    rests: int = 0
    until_s: float = 0.0
    answered: bool = False


class Copies:
    """The copies of a folder in the order in which they are asked. For one event loop."""

    def __init__(self, copies: tuple[Copy, ...]) -> None:
        self._copies = copies
        self._health = [_Health() for _ in copies]
        self._served: list[set[str]] = [set() for _ in copies]
        self._ranged = [False for _ in copies]

    def __len__(self) -> int:
        return len(self._copies)

    def __getitem__(self, index: int) -> Copy:
        return self._copies[index]

    def pick(self, now_s: float, *, first: int = 0, without: Collection[int] = ()) -> int:
        """The copy to ask: from ``first`` on the first that is well, else the one that has rested most."""
        order = [(first + n) % len(self) for n in range(len(self))]
        order = [index for index in order if index not in without]
        for index in order:
            if self._health[index].until_s <= now_s:
                return index
        return min(order, key=lambda index: self._health[index].until_s)

    def answered(self, index: int, what: str, *, ranged: bool) -> None:
        """It is well, and has given this file, or a range of it."""
        self._health[index] = _Health(answered=True)
        self._served[index].add(what)
        self._ranged[index] |= ranged

    def has_answered(self, index: int) -> bool:
        """True if it ever was well."""
        return self._health[index].answered

    def has_served(self, index: int, what: str) -> bool:
        """True if it ever gave this file, or a part of it."""
        return what in self._served[index]

    def has_given_ranges(self, index: int) -> bool:
        """True if it ever gave a range of a file."""
        return self._ranged[index]

    def failed(self, index: int, now_s: float) -> bool:
        """It did not answer; returns True if it is left alone from now on, for twice as long as the last time."""
        health = self._health[index]
        health.failures += 1
        if len(self) == 1 or health.failures < _FAILURES or health.until_s > now_s:
            return False
        health.until_s = now_s + min(_LONGEST_REST_S, _REST_S * 2**health.rests)
        health.rests = min(health.rests + 1, 8)
        return True


class CloudCopy:
    """A folder in a store of a cloud."""

    def __init__(self, url: str) -> None:
        self.url = url
        root, self._folder = cloud.split(url)
        self._store = cloud.open_store(root, timeout_s=_LONGEST_S, retries=False)

    async def range(self, name: str, start: int, length: int) -> Any:
        """Bytes of a file."""
        return await self._store.get_range_async(self._path(name), start=start, length=length)

    async def begin(self, name: str, most: int) -> tuple[Any | None, int]:
        """A whole file."""
        answer = await self._store.get_async(self._path(name))
        size = int(answer.meta["size"])
        return (await answer.bytes_async(), size) if size <= most else (None, size)

    async def size(self, name: str) -> int:
        """Size of a file."""
        return int((await self._store.head_async(self._path(name)))["size"])

    def _path(self, name: str) -> str:
        return f"{self._folder}/{name}" if self._folder else name


class OtherCopy:
    """A folder that base/store.py reaches (local, ``memory://``, fsspec), asked in threads.

    A thread that hangs cannot be stopped: its request is given up, and the thread with it until its library lets go or
    the process ends, which waits for none of them.
    """

    def __init__(self, url: str) -> None:
        self.url = url

    async def range(self, name: str, start: int, length: int) -> Any:
        """Bytes of a file."""
        return await self._call(store.read_range, name, start, length)

    async def begin(self, name: str, most: int) -> tuple[Any | None, int]:
        """A whole file."""
        data = await self._call(store.read_bytes, name)
        return data, len(data)

    async def size(self, name: str) -> int:
        """Size of a file."""
        return int(await self._call(store.size_bytes, name))

    async def _call(self, function: Any, name: str, *arguments: Any) -> Any:
        return await _in_thread(function, store.join(self.url, name), *arguments)


async def _in_thread(function: Callable[..., Any], *arguments: Any) -> Any:
    """What a function returns, called in a thread of its own; an executor's threads would be waited for at exit."""
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[Any] = loop.create_future()

    def settle(found: Any, error: BaseException | None) -> None:
        if answer.done():  # given up
            return
        if error is None:
            answer.set_result(found)
        else:
            answer.set_exception(error)

    def call() -> None:
        found, error = None, None
        try:
            found = function(*arguments)
        except BaseException as caught:
            error = caught
        with suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(settle, found, error)

    threading.Thread(target=call, name="fetch-call", daemon=True).start()
    return await answer
