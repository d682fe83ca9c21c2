"""The replicas of one folder: which is read next, and how one is read."""

import asyncio
import threading
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

from smalti.base import cloud, store
from smalti.base.errors import DataError, SmaltiError

_FAILURES = 3
"""After so many in a row a replica is not used for a while."""
_COOLDOWN_S, _MAX_COOLDOWN_S = 5.0, 60.0
_LONGEST_S = 3600.0
"""The engine ends requests, each at its own deadline; the library has one for all, whatever their length."""


class ShortFile(DataError):
    """A file ends before the bytes that were requested."""


class TruncatedResponse(Exception):
    """The store sent less of a file than it has."""


class WrongContent(Exception):
    """The content of a whole file cannot be the right one."""

    def __init__(self, final: SmaltiError) -> None:
        super().__init__(final.message)
        self.final = final
        """The error if it occurs repeatedly."""


class Replica(Protocol):
    """One replica, read from an event loop. Errors are those of its library; ``cloud.trouble`` classifies them."""

    url: str

    async def range(self, name: str, start: int, length: int) -> Any:
        """Read a range into a buffer; it is shorter where the file, or the transfer, ends."""

    async def begin(self, name: str, most: int) -> tuple[Any | None, int]:
        """Read (a whole file, its size); None instead of a file of more than ``most`` bytes."""

    async def size(self, name: str) -> int:
        """Size of a file in bytes."""


@dataclass
class _Health:
    failures: int = 0
    cooldowns: int = 0
    until_s: float = 0.0
    answered: bool = False


class Replicas:
    """The replicas of a folder in the order in which they are read. For one event loop."""

    def __init__(self, replicas: tuple[Replica, ...]) -> None:
        self._replicas = replicas
        self._health = [_Health() for _ in replicas]
        self._served: list[set[str]] = [set() for _ in replicas]
        self._ranged = [False for _ in replicas]

    def __len__(self) -> int:
        return len(self._replicas)

    def __getitem__(self, index: int) -> Replica:
        return self._replicas[index]

    def pick(self, now_s: float, *, first: int = 0, without: Collection[int] = ()) -> int:
        """Choose a replica: from ``first`` on the first that works, else the one whose cool-down ends first."""
        order = [(first + n) % len(self) for n in range(len(self))]
        order = [index for index in order if index not in without]
        for index in order:
            if self._health[index].until_s <= now_s:
                return index
        return min(order, key=lambda index: self._health[index].until_s)

    def answered(self, index: int, what: str, *, ranged: bool) -> None:
        """Record that it responded with this file, or a range of it."""
        self._health[index] = _Health(answered=True)
        self._served[index].add(what)
        self._ranged[index] |= ranged

    def has_answered(self, index: int) -> bool:
        """Whether it ever responded."""
        return self._health[index].answered

    def has_served(self, index: int, what: str) -> bool:
        """Whether it ever returned this file, or a part of it."""
        return what in self._served[index]

    def has_given_ranges(self, index: int) -> bool:
        """Whether it ever returned a range of a file."""
        return self._ranged[index]

    def failed(self, index: int, now_s: float) -> bool:
        """Record a failure; returns whether a cool-down begins, twice as long as the last one."""
        health = self._health[index]
        health.failures += 1
        if len(self) == 1 or health.failures < _FAILURES or health.until_s > now_s:
            return False
        health.until_s = now_s + min(_MAX_COOLDOWN_S, _COOLDOWN_S * 2**health.cooldowns)
        health.cooldowns = min(health.cooldowns + 1, 8)
        return True


class CloudReplica:
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
        """Size of a file in bytes."""
        return int((await self._store.head_async(self._path(name)))["size"])

    def _path(self, name: str) -> str:
        return f"{self._folder}/{name}" if self._folder else name


class StoreReplica:
    """A folder that base/store.py reaches (local, ``memory://``, fsspec), read in threads.

    A thread that hangs cannot be stopped: its request is abandoned, and the thread until its library returns or the
    process ends, which waits for none of them.
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
        """Size of a file in bytes."""
        return int(await self._call(store.size_bytes, name))

    async def _call(self, function: Any, name: str, *arguments: Any) -> Any:
        return await _in_thread(function, store.join(self.url, name), *arguments)


async def _in_thread(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function in its own thread; an executor's threads would be waited for at exit."""
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[Any] = loop.create_future()

    def settle(result: Any, error: BaseException | None) -> None:
        if answer.done():  # abandoned
            return
        if error is None:
            answer.set_result(result)
        else:
            answer.set_exception(error)

    def call() -> None:
        result: Any = None
        error: BaseException | None = None
        try:
            result = function(*arguments)
        except BaseException as caught:
            error = caught
        with suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=call, name="fetch-call", daemon=True).start()
    return await answer
