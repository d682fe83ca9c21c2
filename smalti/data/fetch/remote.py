"""Files of a folder behind a URL, and of its copies."""

import asyncio
import os
import threading
from collections.abc import Coroutine, Sequence
from concurrent.futures import CancelledError, Future
from typing import Any, TypeVar

from smalti.base import clock, cloud, log, store
from smalti.base.errors import RetryableError
from smalti.config.data import FetchConfig
from smalti.data.fetch.cache import BlockCache
from smalti.data.fetch.copies import CloudCopy, Copies, Copy, OddAnswer, OtherCopy, Short, Truncated
from smalti.data.fetch.counts import Counts
from smalti.data.fetch.engine import Engine, shared, store_path
from smalti.data.fetch.files import Check, Damaged, Range, Share, confined, require
from smalti.data.fetch.pieces import PIECE_BYTES, Piece, Plan

T = TypeVar("T")


class RemoteFiles:
    """A folder behind a URL, and its copies. Connections are made when something is read."""

    def __init__(
        self, urls: Sequence[str], fetch: FetchConfig, share: Share, digest: str | None, counts: Counts
    ) -> None:
        self.where = urls[0]
        self._urls, self._fetch, self._share = tuple(urls), fetch, share
        self.counts = counts
        self._cache = BlockCache(fetch.cache, fetch.cache_bytes, digest) if fetch.cache and digest else None
        self._untold = bool(fetch.cache) and not digest
        self._lock = threading.Lock()
        self._opened: tuple[Engine, Copies] | None = None
        self._under_way: set[Future[Any]] = set()
        self._again: dict[Range, int] = {}

    def whole(self, name: str, check: Check | None = None) -> bytes:
        """A whole file."""
        engine, copies = self._open()
        return self._wait(engine, self._whole(engine, copies, confined(name), check))

    def size(self, name: str) -> int:
        """Bytes of a file."""
        engine, copies = self._open()
        asked = engine.ask(copies, confined(name), lambda copy: copy.size(name), self.counts, length=None)
        return self._wait(engine, asked)

    def read(self, wanted: Sequence[Range]) -> list[memoryview]:
        """The bytes of each range."""
        if self._untold:
            self._untold = False
            log.get("data").warning(
                "%s is not kept in data.fetch.cache: nothing in it says what its bytes must be, so what has changed or "
                "came damaged would stay there",
                self.where,
            )
        found: list[memoryview | None] = [self._cache.get(one) if self._cache else None for one in wanted]
        absent = [index for index, data in enumerate(found) if data is None]
        self.counts.add("cache_hits", len(wanted) - len(absent))
        if absent:
            fetched = self._fetched([wanted[index] for index in absent], first=0)
            for index, data in zip(absent, fetched, strict=True):
                found[index] = data
                if self._cache and wanted[index].length:
                    self._cache.put(wanted[index], data)
        return [data for data in found if data is not None]

    def read_again(self, wanted: Range) -> memoryview:
        """The range once more; each time it is asked for again another copy is the first to be asked."""
        with self._lock:
            times = self._again.get(wanted, 0) + 1
            if len(self._again) > 1000:
                self._again.clear()
            self._again[wanted] = times
        if self._cache:
            self._cache.drop(wanted)
        data = self._fetched([wanted], first=times % len(self._urls))[0]
        if self._cache:
            self._cache.put(wanted, data)
        return data

    def close(self) -> None:
        """End what is under way; a reader that waits for it gets a RetryableError."""
        with self._lock:
            self._opened = None
            under_way = list(self._under_way)
        for future in under_way:
            future.cancel()

    def _open(self) -> tuple[Engine, Copies]:
        with self._lock:
            if self._opened is None or self._opened[0].pid != os.getpid():
                engine = shared(self._fetch, self._share)
                self._opened = engine, Copies(tuple(_copy(url) for url in self._urls))
            if any(cloud.is_cloud(url) for url in self._urls):
                cloud.guard_fork()
            return self._opened

    def _fetched(self, wanted: Sequence[Range], *, first: int) -> list[memoryview]:
        for one in wanted:
            confined(one.name)
        engine, copies = self._open()
        plan = Plan(wanted)
        return plan.parts(self._wait(engine, self._pieces(engine, copies, plan.pieces, first)))

    def _wait(self, engine: Engine, work: Coroutine[Any, Any, T]) -> T:
        begun_s = clock.now_s()
        future = engine.start(work)
        with self._lock:
            self._under_way.add(future)
        try:
            return future.result()
        except CancelledError as error:
            raise RetryableError(f"{self.where} was closed while it was read") from error
        except BaseException:  # Ctrl-C, in the main thread
            future.cancel()
            raise
        finally:
            self.counts.add("wait_s", clock.now_s() - begun_s)
            with self._lock:
                self._under_way.discard(future)

    # ---- in the engine's loop ---------------------------------------------------------------------------------------

    async def _pieces(self, engine: Engine, copies: Copies, pieces: Sequence[Piece], first: int) -> list[memoryview]:
        tasks = [asyncio.ensure_future(self._piece(engine, copies, piece, first)) for piece in pieces]
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()

    async def _piece(self, engine: Engine, copies: Copies, piece: Piece, first: int) -> memoryview:
        cut: set[str] = set()
        """Copies whose answer was short: the second time it is asked whether the file is."""

        async def send(copy: Copy) -> memoryview:
            data = memoryview(await copy.range(*piece)).cast("B")
            if len(data) == piece.length:
                return data
            if copy.url not in cut:
                cut.add(copy.url)
                raise Truncated(f"{len(data):,} of {piece.length:,} bytes came")
            await engine.leave(self.counts)
            size = await copy.size(piece.name)
            if size >= piece.start + piece.length:
                raise Truncated(f"{len(data):,} of {piece.length:,} bytes came")
            raise Short(
                f"{store_path(copy.url, piece.name)} has {size:,} bytes; "
                f"bytes {piece.start:,} to {piece.start + piece.length:,} were asked for",
                hint="the file is cut short: copy it again",
            )

        data = await engine.ask(copies, piece.name, send, self.counts, length=piece.length, first=first)
        self.counts.add("bytes", len(data))
        return data

    async def _whole(self, engine: Engine, copies: Copies, name: str, check: Check | None) -> bytes:
        async def send(copy: Copy) -> tuple[bytes | None, int]:
            found, size = await copy.begin(name, PIECE_BYTES)
            if found is None:
                return None, size
            if len(found) != size:
                raise Truncated(f"{len(found):,} of {size:,} bytes came")
            data = bytes(found)
            _check(data, store_path(copy.url, name), check)
            return data, size

        data, size = await engine.ask(copies, name, send, self.counts, length=None)
        if data is not None:
            self.counts.add("bytes", size)
            return data
        pieces = Plan([Range(name, 0, size)]).pieces
        reading = 0
        while True:
            data = b"".join(await self._pieces(engine, copies, pieces, reading % len(copies)))
            try:
                _check(data, store_path(self.where, name), check)
                return data
            except OddAnswer as error:
                reading += 1
                if reading == cloud.ODD_ANSWERS:
                    raise error.final from error


def _check(data: bytes, path: str, check: Check | None) -> None:
    """Raises OddAnswer for what cannot be the file."""
    if cloud.is_page(data, path):
        raise OddAnswer(cloud.page_error(path, data))
    try:
        require(data, check)
    except Damaged as error:
        raise OddAnswer(error) from error


def _copy(url: str) -> Copy:
    if cloud.is_cloud(url):
        return CloudCopy(url)
    return OtherCopy(f"file://{os.path.abspath(url)}" if store.is_local(url) else url)
