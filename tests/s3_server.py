"""Servers for tests of stores: moto's S3, one that counts and gives a few objects out, and a proxy that spoils answers.

Each is a context manager on a free port of 127.0.0.1 and is gone afterwards, whatever happened.
"""

import asyncio
import random
import re
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

PAGE = b"<!DOCTYPE html>\n<html><body>Down for maintenance</body></html>"
SLOW_DOWN = b"<Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message></Error>"


@dataclass
class Faults:
    """What goes wrong with a share of the answers; may be changed while a server runs."""

    unavailable: float = 0.0
    """503 without a word."""
    slow_down: float = 0.0
    """503 SlowDown, as S3 says it."""
    hang: float = 0.0
    """No answer for ``hang_s``, then the connection is closed."""
    truncate: float = 0.0
    """Half of the body, then the connection is closed."""
    reset: float = 0.0
    """The connection is closed at once."""
    flip: float = 0.0
    """One bit of the body is another."""
    page: float = 0.0
    """200 with a page of HTML, as a proxy or a login answers."""
    unranged: float = 0.0
    """200 with the whole object, whatever range was asked for."""
    gone: float = 0.0
    """404."""
    unsatisfiable: float = 0.0
    """416."""
    cut: float = 0.0
    """The connection is closed when half of the request's body has come (``Proxy``)."""
    first: list[str] = field(default_factory=list)
    """Faults of the next answers, in this order, before chance decides."""
    hang_s: float = 60.0
    latency_s: float = 0.0
    seed: int = 0
    only_get: bool = True
    chance: random.Random = field(init=False)
    done: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.chance = random.Random(self.seed)

    def draw(self) -> str:
        """The fault of the next answer, or "none"."""
        if self.first:
            kind = self.first.pop(0)
            self.done[kind] += 1
            return kind
        dice = self.chance.random()
        kinds = ("unavailable", "slow_down", "hang", "truncate", "reset", "flip", "page", "unranged", "gone")
        for kind in (*kinds, "unsatisfiable", "cut"):
            dice -= getattr(self, kind)
            if dice < 0:
                self.done[kind] += 1
                return kind
        return "none"


Answer = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[bool]]
"""Reads a request and answers it; False: the connection ends."""


class _Server:
    """An asyncio server in a thread."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self._loop = asyncio.new_event_loop()
        self._server: asyncio.Server | None = None
        self._connections: dict[asyncio.StreamWriter, asyncio.Task[None]] = {}
        self.port = 0
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        self._thread.start()
        assert self._ready.wait(10)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._open())
        self._ready.set()
        self._loop.run_forever()
        for task in asyncio.all_tasks(self._loop):
            task.cancel()
        self._loop.run_until_complete(asyncio.sleep(0.01))
        self._loop.close()

    def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._connections[writer] = self._loop.create_task(self._serve(reader, writer))

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while await self._answer(reader, writer):
                pass
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()
            self._connections.pop(writer, None)

    async def _open(self) -> None:
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", self.port, backlog=1000)
        self.port = self._server.sockets[0].getsockname()[1]

    def cut(self) -> None:
        """Stop listening and close every connection: a server that was killed."""
        asyncio.run_coroutine_threadsafe(self._cut(), self._loop).result(10)

    async def _cut(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None
        for writer, task in list(self._connections.items()):
            writer.transport.abort()
            task.cancel()  # one that has not begun closes nothing itself
        self._connections.clear()

    def back(self) -> None:
        """Listen again on the same port."""
        asyncio.run_coroutine_threadsafe(self._open(), self._loop).result(10)

    def stop(self) -> None:
        self.cut()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)


@dataclass
class Objects:
    """A store that gives out what it was given, over HTTP and (unsigned as far as it looks) S3, and counts."""

    objects: Mapping[str, bytes]
    """Path (bucket and key) -> content."""
    faults: Faults
    counts: Counter[str] = field(default_factory=Counter)
    """``GET path``, ``HEAD path``, ``LIST`` -> how often."""
    requests: list[tuple[float, str, str]] = field(default_factory=list)
    """(time, path, range) of each GET."""
    tokens: list[str] = field(default_factory=list)
    """Bearer tokens that were sent here."""
    url: str = ""
    server: Any = None

    def gets(self, ending: str) -> int:
        """GETs of paths with this ending."""
        return sum(n for what, n in self.counts.items() if what.startswith("GET") and what.endswith(ending))

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        method, target, _ = head.split(" ", 2)
        path, _, query = target.partition("?")
        found = re.search(r"(?im)^range: bytes=(\d+)-(\d*)", head)
        self.tokens += re.findall(r"(?im)^authorization: bearer (.*)\r$", head)
        listed = "list-type" in query or "prefix=" in query or method == "PROPFIND"
        self.counts["LIST" if listed else f"{method} {path}"] += 1
        self.requests.append((time.monotonic(), path, found[0] if found else ""))
        if self.faults.latency_s:
            await asyncio.sleep(self.faults.latency_s)
        body = self.objects.get(path.lstrip("/"))
        status, extra = "200 OK", ""
        if body is None:
            status, body = "404 Not Found", b""
        elif found:
            start, end = int(found[1]), min(int(found[2] or len(body)), len(body) - 1)
            if start >= len(body):
                status, body = "416 Range Not Satisfiable", b""
            else:
                status, extra = "206 Partial Content", f"Content-Range: bytes {start}-{end}/{len(body)}\r\n"
                body = body[start : end + 1]
        fault = self.faults.draw() if method == "GET" else "none"
        if fault == "hang":
            await asyncio.sleep(self.faults.hang_s)
            return False
        if fault == "reset":
            return False
        if fault in ("unavailable", "slow_down"):
            status, extra, body = "503 Service Unavailable", "", SLOW_DOWN if fault == "slow_down" else b""
        if fault == "page" or (fault == "unranged" and found):
            status, extra = "200 OK", ""
            body = PAGE if fault == "page" else self.objects.get(path.lstrip("/"), b"")
        if fault == "gone":
            status, extra, body = "404 Not Found", "", b""
        if fault == "unsatisfiable":
            status, extra, body = "416 Range Not Satisfiable", "", b""
        if fault == "flip" and body:
            at = self.faults.chance.randrange(len(body))
            body = body[:at] + bytes([body[at] ^ 1]) + body[at + 1 :]
        head = (
            f'HTTP/1.1 {status}\r\n{extra}Content-Length: {len(body)}\r\nETag: "1"\r\n'
            "Last-Modified: Wed, 21 Oct 2015 07:28:00 GMT\r\n\r\n"
        )
        part = body[: len(body) // 2] if fault == "truncate" else body
        writer.write(head.encode() + (b"" if method == "HEAD" else part))
        await writer.drain()
        return fault != "truncate"


Held = TypeVar("Held", "Objects", "Proxy")


@contextmanager
def _running(held: Held) -> Iterator[Held]:
    server = _Server(held.answer)
    server.start()
    held.url, held.server = f"http://127.0.0.1:{server.port}", server
    try:
        yield held
    finally:
        server.stop()


@contextmanager
def object_server(objects: Mapping[str, bytes], faults: Faults | None = None) -> Iterator[Objects]:
    """A store over HTTP and S3 with these objects (``bucket/key`` -> content)."""
    with _running(Objects(objects, faults or Faults())) as held:
        yield held


@contextmanager
def moto_server() -> Iterator[str]:
    """moto's S3; its URL."""
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        yield f"http://{host}:{port}"
    finally:
        server.stop()
        server._server.server_close()  # moto leaves its socket open


@dataclass
class Proxy:
    """Hands requests on to a server and spoils some of the answers."""

    host: str
    port: int
    faults: Faults
    url: str = ""
    server: Any = None
    counts: Counter[str] = field(default_factory=Counter)
    times: list[float] = field(default_factory=list)
    """When each request came."""
    refuse: Callable[[str, str], tuple[int, str] | None] = lambda head, key: None
    """(head, access key) -> status and S3's error code of a request that is refused; None: it is answered."""

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = await reader.readuntil(b"\r\n\r\n")
        method = head.split(b" ", 1)[0].decode()
        target = head.split(b" ", 2)[1]
        self.counts["LIST" if b"list-type" in target else method] += 1
        self.times.append(time.monotonic())
        fault = self.faults.draw() if method == "GET" or not self.faults.only_get else "none"
        if fault == "cut":
            await reader.readexactly(_length(head) // 2)
            return False
        body = await reader.readexactly(_length(head))
        if self.faults.latency_s:
            await asyncio.sleep(self.faults.latency_s)
        key = re.search(rb"Credential=([^/]+)/", head)
        refusal = self.refuse(head.decode("latin-1"), key[1].decode() if key else "")
        if refusal is not None:
            text = f"<Error><Code>{refusal[1]}</Code><Message>{refusal[1]}</Message></Error>".encode()
            writer.write(f"HTTP/1.1 {refusal[0]} No\r\nContent-Length: {len(text)}\r\n\r\n".encode() + text)
            await writer.drain()
            return True
        if fault == "hang":
            await asyncio.sleep(self.faults.hang_s)
            return False
        if fault == "reset":
            return False
        if fault in ("unavailable", "slow_down"):
            text = SLOW_DOWN if fault == "slow_down" else b""
            writer.write(b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: %d\r\n\r\n" % len(text) + text)
            await writer.drain()
            return True
        answer, content = await self._upstream(head, body, method)
        if fault == "flip" and content:
            at = self.faults.chance.randrange(len(content))
            content = content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]
        writer.write(answer + (content[: len(content) // 2] if fault == "truncate" else content))
        await writer.drain()
        return fault != "truncate"

    async def _upstream(self, head: bytes, body: bytes, method: str) -> tuple[bytes, bytes]:
        reader, writer = await asyncio.open_connection(self.host, self.port)
        try:
            writer.write(re.sub(rb"(?i)\r\nconnection: [^\r]*", b"", head)[:-2] + b"Connection: close\r\n\r\n" + body)
            answer = await reader.readuntil(b"\r\n\r\n")
            content = b"" if method == "HEAD" else await reader.read()
        finally:
            writer.close()
        return re.sub(rb"(?i)\r\nconnection: [^\r]*", b"", answer), content


def _length(head: bytes) -> int:
    found = re.search(rb"(?i)\r\ncontent-length: *(\d+)", head)
    return int(found[1]) if found else 0


@contextmanager
def fault_proxy(url: str, faults: Faults) -> Iterator[Proxy]:
    """A proxy in front of a server that gives its answers with faults."""
    host, _, port = url.removeprefix("http://").partition(":")
    with _running(Proxy(host, int(port), faults)) as held:
        yield held


def s3_environment(url: str) -> dict[str, str]:
    """The variables with which S3 clients talk to a server of this module."""
    return {
        "AWS_ENDPOINT_URL": url,
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_REGION": "us-east-1",
    }
