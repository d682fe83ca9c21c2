"""The replicas of one folder: chooses the one to read next, and reads it."""

import asyncio
import threading
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

from smalti.base import cloud, store
from smalti.base.errors import DataError, SmaltiError

_FAILURES = 3
"""Consecutive failures after which a replica is not used for a while."""
_COOLDOWN_S = 5.0
_MAX_COOLDOWN_S = 60.0
_CLIENT_TIMEOUT_S = 3600.0
"""Timeout of the store's client, which has one for all requests; the engine sets a deadline for each by its length."""


class ShortFile(DataError):
    """A file ends before the bytes that were requested."""


class TruncatedResponse(Exception):
    """The store sent less of a file than it has."""


class WrongContent(Exception):
    """The content of a file failed its check, or is an error page."""

    def __init__(self, final: SmaltiError) -> None:
        super().__init__(final.message)
        self.final = final
        """The error if it occurs repeatedly."""


class Replica(Protocol):
    """One replica, read from an event loop. Raises the errors of its library, which ``cloud.trouble`` classifies."""

    url: str

    async def range(self, name: str, start: int, length: int) -> Any:
        """Read a range into a buffer, which is shorter if the file or the transfer ends early."""

    async def begin(self, name: str, limit_bytes: int) -> tuple[Any | None, int]:
        """Return (content, size) of a file; None instead of the content of more than ``limit_bytes``."""

    async def size(self, name: str) -> int:
        """Return the size of a file in bytes."""


@dataclass
class _Health:
    failures: int = 0
    cooldowns: int = 0
    until_s: float = 0.0
    answered: bool = False


class Replicas:
    """The replicas of a folder in order of preference, and their health. For one event loop."""

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
        """Choose the first replica, from ``first`` on, that is not cooling down, else the one that is ready first."""
        order = [(first + n) % len(self) for n in range(len(self))]
        order = [index for index in order if index not in without]
        for index in order:
            if self._health[index].until_s <= now_s:
                return index
        return min(order, key=lambda index: self._health[index].until_s)

    def answered(self, index: int, what: str, *, ranged: bool) -> None:
        """Record that a replica returned this file, or a range of it."""
        self._health[index] = _Health(answered=True)
        self._served[index].add(what)
        self._ranged[index] |= ranged

    def has_answered(self, index: int) -> bool:
        """Whether a replica ever returned anything."""
        return self._health[index].answered

    def has_served(self, index: int, what: str) -> bool:
        """Whether a replica ever returned this file, or a part of it."""
        return what in self._served[index]

    def has_given_ranges(self, index: int) -> bool:
        """Whether a replica ever returned a range of a file."""
        return self._ranged[index]

    def failed(self, index: int, now_s: float) -> bool:
        """Record a failure; returns whether a cool-down begins. Each is twice as long as the one before."""
        health = self._health[index]
        health.failures += 1
        if len(self) == 1 or health.failures < _FAILURES or health.until_s > now_s:
            return False
        health.until_s = now_s + min(_MAX_COOLDOWN_S, _COOLDOWN_S * 2**health.cooldowns)
        health.cooldowns = min(health.cooldowns + 1, 8)
        return True


class CloudReplica:
    """A replica in a cloud store."""

    def __init__(self, url: str) -> None:
        self.url = url
        root, self._folder = cloud.split(url)
        self._store = cloud.open_store(root, timeout_s=_CLIENT_TIMEOUT_S, retries=False)

    async def range(self, name: str, start: int, length: int) -> Any:
        """Read a range of a file."""
        return await self._store.get_range_async(self._path(name), start=start, length=length)

    async def begin(self, name: str, limit_bytes: int) -> tuple[Any | None, int]:
        """Read a whole file of at most ``limit_bytes``."""
        response = await self._store.get_async(self._path(name))
        size = int(response.meta["size"])
        return (await response.bytes_async(), size) if size <= limit_bytes else (None, size)

    async def size(self, name: str) -> int:
        """Return the size of a file in bytes."""
        return int((await self._store.head_async(self._path(name)))["size"])

    def _path(self, name: str) -> str:
        return f"{self._folder}/{name}" if self._folder else name


class StoreReplica:
    """A replica that base/store.py reads (local, ``memory://``, fsspec), in threads.

    A thread that hangs cannot be stopped: its request is abandoned, and the daemon thread ends when the library returns
    or the process exits.
    """

    def __init__(self, url: str) -> None:
        self.url = url

    async def range(self, name: str, start: int, length: int) -> Any:
        """Read a range of a file."""
        return await self._call(store.read_range, name, start, length)

    async def begin(self, name: str, limit_bytes: int) -> tuple[Any | None, int]:
        """Read a whole file."""
        data = await self._call(store.read_bytes, name)
        return data, len(data)

    async def size(self, name: str) -> int:
        """Return the size of a file in bytes."""
        return int(await self._call(store.size_bytes, name))

    async def _call(self, function: Any, name: str, *arguments: Any) -> Any:
        return await _in_thread(function, store.join(self.url, name), *arguments)


async def _in_thread(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function in a thread of its own; Python would wait at exit for the threads of an executor."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Any] = loop.create_future()

    def settle(result: Any, error: BaseException | None) -> None:
        if future.done():  # abandoned
            return
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error)

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
    return await future
