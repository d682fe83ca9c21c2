"""Reads the files of a folder in a store, and of its replicas."""

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
from smalti.data.fetch.counts import Counts
from smalti.data.fetch.engine import Engine, shared, store_path
from smalti.data.fetch.files import Check, Damaged, Range, Share, confined, require
from smalti.data.fetch.replicas import (
    CloudReplica,
    Replica,
    Replicas,
    ShortFile,
    StoreReplica,
    TruncatedResponse,
    WrongContent,
)
from smalti.data.fetch.requests import MAX_REQUEST_BYTES, Request, RequestPlan

T = TypeVar("T")


class RemoteFiles:
    """A folder in a store, and its replicas. Connections are opened by the first read."""

    def __init__(
        self, urls: Sequence[str], fetch: FetchConfig, share: Share, digest: str | None, counts: Counts
    ) -> None:
        self.where = urls[0]
        self._urls = tuple(urls)
        self._fetch = fetch
        self._share = share
        self.counts = counts
        self._cache = BlockCache(fetch.cache, fetch.cache_bytes, digest) if fetch.cache and digest else None
        self._warns_uncached = bool(fetch.cache) and not digest
        self._lock = threading.Lock()
        self._opened: tuple[Engine, Replicas] | None = None
        self._pending: set[Future[Any]] = set()
        self._again: dict[Range, int] = {}

    def whole(self, name: str, check: Check | None = None) -> bytes:
        """Read a whole file."""
        engine, replicas = self._open()
        return self._wait(engine, self._whole(engine, replicas, confined(name), check))

    def size(self, name: str) -> int:
        """Return the size of a file in bytes."""
        engine, replicas = self._open()
        work = engine.request(replicas, confined(name), lambda replica: replica.size(name), self.counts, length=None)
        return self._wait(engine, work)

    def read(self, wanted: Sequence[Range]) -> list[memoryview]:
        """Read ranges, in the order given."""
        if self._warns_uncached:
            self._warns_uncached = False
            log.get("data").warning(
                "%s is not kept in data.fetch.cache: its format has no checksum for each range, so stale or damaged "
                "blocks would not be noticed",
                self.where,
            )
        parts: list[memoryview | None] = [self._cache.get(part) if self._cache else None for part in wanted]
        absent = [index for index, data in enumerate(parts) if data is None]
        self.counts.add("cache_hits", len(wanted) - len(absent))
        if absent:
            fetched = self._fetched([wanted[index] for index in absent], first=0)
            for index, data in zip(absent, fetched, strict=True):
                parts[index] = data
                if self._cache and wanted[index].length:
                    self._cache.put(wanted[index], data)
        return [data for data in parts if data is not None]

    def read_again(self, wanted: Range) -> memoryview:
        """Read a range again; each call begins with another replica."""
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
        """Cancel pending reads; their callers get a RetryableError."""
        with self._lock:
            self._opened = None
            pending = list(self._pending)
        for future in pending:
            future.cancel()

    def _open(self) -> tuple[Engine, Replicas]:
        with self._lock:
            if self._opened is None or self._opened[0].pid != os.getpid():
                engine = shared(self._fetch, self._share)
                self._opened = engine, Replicas(tuple(_replica(url) for url in self._urls))
            if any(cloud.is_cloud(url) for url in self._urls):
                cloud.guard_fork()
            return self._opened

    def _fetched(self, wanted: Sequence[Range], *, first: int) -> list[memoryview]:
        for part in wanted:
            confined(part.name)
        engine, replicas = self._open()
        plan = RequestPlan(wanted)
        return plan.parts(self._wait(engine, self._send_all(engine, replicas, plan.requests, first)))

    def _wait(self, engine: Engine, work: Coroutine[Any, Any, T]) -> T:
        begun_s = clock.now_s()
        future = engine.start(work)
        with self._lock:
            self._pending.add(future)
        try:
            return future.result()
        except CancelledError as error:
            raise RetryableError(f"{self.where} was closed while a read was pending") from error
        except BaseException:  # Ctrl-C, in the main thread
            future.cancel()
            raise
        finally:
            self.counts.add("wait_s", clock.now_s() - begun_s)
            with self._lock:
                self._pending.discard(future)

    # ---- in the engine's loop ---------------------------------------------------------------------------------------

    async def _send_all(
        self, engine: Engine, replicas: Replicas, requests: Sequence[Request], first: int
    ) -> list[memoryview]:
        tasks = [asyncio.ensure_future(self._send(engine, replicas, request, first)) for request in requests]
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()

    async def _send(self, engine: Engine, replicas: Replicas, request: Request, first: int) -> memoryview:
        short: set[str] = set()
        """Replicas that have returned a short response; after a second one the size of the file is requested."""

        async def send(replica: Replica) -> memoryview:
            data = memoryview(await replica.range(*request)).cast("B")
            if len(data) == request.length:
                return data
            if replica.url not in short:
                short.add(replica.url)
                raise TruncatedResponse(f"{len(data):,} of {request.length:,} bytes arrived")
            await engine.acquire(self.counts)
            size = await replica.size(request.name)
            if size >= request.start + request.length:
                raise TruncatedResponse(f"{len(data):,} of {request.length:,} bytes arrived")
            raise ShortFile(
                f"{store_path(replica.url, request.name)} has only {size:,} bytes; "
                f"bytes {request.start:,} to {request.start + request.length:,} are needed",
                hint="the file is truncated: copy it again",
            )

        data = await engine.request(replicas, request.name, send, self.counts, length=request.length, first=first)
        self.counts.add("bytes", len(data))
        return data

    async def _whole(self, engine: Engine, replicas: Replicas, name: str, check: Check | None) -> bytes:
        async def send(replica: Replica) -> tuple[bytes | None, int]:
            content, size = await replica.begin(name, MAX_REQUEST_BYTES)
            if content is None:
                return None, size
            if len(content) != size:
                raise TruncatedResponse(f"{len(content):,} of {size:,} bytes arrived")
            data = bytes(content)
            _check(data, store_path(replica.url, name), check)
            return data, size

        data, size = await engine.request(replicas, name, send, self.counts, length=None)
        if data is not None:
            self.counts.add("bytes", size)
            return data
        requests = RequestPlan([Range(name, 0, size)]).requests
        attempt = 0
        while True:
            data = b"".join(await self._send_all(engine, replicas, requests, attempt % len(replicas)))
            try:
                _check(data, store_path(self.where, name), check)
                return data
            except WrongContent as error:
                attempt += 1
                if attempt == cloud.ODD_ANSWERS:
                    raise error.final from error


def _check(data: bytes, path: str, check: Check | None) -> None:
    """Raise WrongContent for an error page, and for bytes that fail ``check``."""
    if cloud.is_page(data, path):
        raise WrongContent(cloud.page_error(path, data))
    try:
        require(data, check)
    except Damaged as error:
        raise WrongContent(error) from error


def _replica(url: str) -> Replica:
    if cloud.is_cloud(url):
        return CloudReplica(url)
    return StoreReplica(f"file://{os.path.abspath(url)}" if store.is_local(url) else url)
