"""Clients that send half a request, read no answer, or come by the hundred: the others are answered all the same."""

import asyncio
import contextlib
import resource
import socket
import threading
import time
from collections.abc import Callable, Iterator, MutableMapping
from pathlib import Path
from typing import Any

import httpx
import pytest
from server_process import start_server
from tiny_runs import tiny_run

from smalti.base.errors import UserError
from smalti.distributed.checkpoint.export import export
from smalti.serve.server import connections, guard, process
from smalti.serve.server.metrics import Metrics

MAX_CONNECTIONS = 20
HALF = {
    "nothing": b"",
    "half a head": b"GET /health HTTP/1.1\r\nHost: localhost\r\nX-Sl",
    "half a body": b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    b"Content-Length: 999\r\n\r\n{",
}


class App:
    """Answers at once; ``/slow`` when ``release`` is set; ``/large`` with more than the kernel's buffers hold."""

    def __init__(self) -> None:
        self.release = threading.Event()
        self.closing = False
        self.n_asked = 0
        self.aborted = threading.Event()
        self.inner: guard.App = self.answer

    async def __call__(self, scope: MutableMapping[str, Any], receive: Callable[..., Any], send: Any) -> None:
        await self.inner(scope, receive, send)

    async def answer(self, scope: MutableMapping[str, Any], receive: Callable[..., Any], send: Any) -> None:
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            if not message.get("more_body"):
                break
        self.n_asked += 1
        while scope["path"] == "/slow" and not self.release.is_set():
            await asyncio.sleep(0.01)
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/plain")]})
        if scope["path"] == "/large":
            await self._large(receive, send)
        await send({"type": "http.response.body", "body": b"fine", "more_body": False})

    def wait_until_asked(self, n: int) -> None:
        """Until so many requests are whole."""
        end_s = time.monotonic() + 60
        while self.n_asked < n:
            assert time.monotonic() < end_s
            time.sleep(0.01)

    async def _large(self, receive: Callable[..., Any], send: Any) -> None:
        gone = asyncio.create_task(receive())
        while not gone.done():
            await send({"type": "http.response.body", "body": b"x" * 100_000, "more_body": True})
            await asyncio.sleep(0)
        self.aborted.set()


@pytest.fixture
def app() -> App:
    return App()


@pytest.fixture
def port(app: App) -> Iterator[int]:
    """A server in a thread of this process, ended with the test."""
    failed = threading.Event()
    listening = socket.socket()
    listening.bind(("127.0.0.1", 0))
    listening.listen()
    options = {"name": "test", "finish_s": 1.0, "max_connections": MAX_CONNECTIONS, "failed": failed.is_set}
    thread = threading.Thread(target=process.run, args=(app, listening), kwargs=options)
    thread.start()
    yield listening.getsockname()[1]
    app.release.set()
    failed.set()
    thread.join(60)
    listening.close()
    assert not thread.is_alive()


def begin(port: int, sent: bytes) -> socket.socket:
    client = socket.create_connection(("127.0.0.1", port), timeout=60)
    client.sendall(sent)
    return client


def read_to_end(client: socket.socket) -> bytes:
    """What the server sends until it closes the connection; TimeoutError where it does not."""
    client.settimeout(60)
    found = b""
    with contextlib.suppress(ConnectionError):
        while data := client.recv(65536):
            found += data
    return found


def is_open(client: socket.socket) -> bool:
    client.setblocking(False)
    try:
        return client.recv(1) != b""
    except BlockingIOError:
        return True
    except ConnectionError:
        return False


def good(port: int, path: str = "/") -> str:
    return httpx.get(f"http://127.0.0.1:{port}{path}", timeout=60).text


@pytest.mark.parametrize("name", ["nothing", "half a head"])
def test_a_head_that_does_not_come_ends_the_connection(port: int, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "HEAD_TIMEOUT_S", 0.2)
    with begin(port, HALF[name]) as client:
        assert read_to_end(client) == b""


def test_a_trickled_head_does_not_win_time(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "HEAD_TIMEOUT_S", 0.5)
    begun_s = time.monotonic()
    with begin(port, b"GET / HTTP/1.1\r\nHost: localhost\r\nX-Slow: ") as client, contextlib.suppress(ConnectionError):
        while time.monotonic() < begun_s + 20:
            client.sendall(b"a")
            time.sleep(0.05)
    assert time.monotonic() < begun_s + 15


@pytest.mark.slow
def test_a_trickled_head_after_an_answer_neither(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "HEAD_TIMEOUT_S", 0.5)
    with begin(port, b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n") as client:
        assert client.recv(12) == b"HTTP/1.1 200"
        client.sendall(HALF["half a head"])
        assert b"fine" in read_to_end(client)


def test_a_body_that_does_not_come_ends_the_connection(app: App, port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "BODY_TIMEOUT_S", 0.2)
    app.inner = guard.Guard(app.answer, Metrics(lambda: None))
    with begin(port, HALF["half a body"]) as client:
        found = read_to_end(client)
    assert found.startswith(b"HTTP/1.1 408 ")
    assert b'"code":"timeout"' in found


def test_a_body_that_was_refused_does_not_hold_the_connection(
    app: App, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "HEAD_TIMEOUT_S", 0.3)
    app.inner = guard.Guard(app.answer, Metrics(lambda: None), key="a key of some length")
    with begin(port, HALF["half a body"]) as client:
        assert read_to_end(client).startswith(b"HTTP/1.1 401 ")


@pytest.mark.slow
def test_an_answer_may_take_longer_than_a_head(port: int, app: App, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "HEAD_TIMEOUT_S", 0.2)
    threading.Timer(0.6, app.release.set).start()
    assert good(port, "/slow") == "fine"


def test_a_client_that_reads_nothing_is_left(port: int, app: App, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "STALL_TIMEOUT_S", 0.3)
    with begin(port, b"GET /large HTTP/1.1\r\nHost: localhost\r\n\r\n"):
        assert app.aborted.wait(60)


@pytest.mark.parametrize("name", HALF)
def test_the_oldest_that_waits_makes_room(port: int, name: str) -> None:
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(begin(port, HALF[name])) for _ in range(5 * MAX_CONNECTIONS)]
        assert good(port) == "fine"
        left = [is_open(client) for client in clients]
        assert not any(left[: 4 * MAX_CONNECTIONS])
        assert sum(left) >= MAX_CONNECTIONS - 1


def test_an_answer_that_runs_is_never_closed_for_a_newcomer(port: int, app: App) -> None:
    answers: list[str] = []
    asking = [threading.Thread(target=lambda: answers.append(good(port, "/slow"))) for _ in range(5)]
    for thread in asking:
        thread.start()
    app.wait_until_asked(5)
    with contextlib.ExitStack() as stack:
        for _ in range(3 * MAX_CONNECTIONS):
            stack.enter_context(begin(port, b""))
        assert good(port) == "fine"
        app.release.set()
        for thread in asking:
            thread.join(60)
    assert answers == ["fine"] * 5


def test_where_all_are_being_answered_the_newcomer_gets_503(port: int, app: App) -> None:
    with contextlib.ExitStack() as stack:
        for _ in range(MAX_CONNECTIONS):
            stack.enter_context(begin(port, b"GET /slow HTTP/1.1\r\nHost: localhost\r\n\r\n"))
        app.wait_until_asked(MAX_CONNECTIONS)
        found = read_to_end(stack.enter_context(begin(port, b"")))
    assert found.startswith(b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\n")
    assert b'"code": "too_many_connections"' in found


def test_the_address_with_most_of_them_makes_room(port: int) -> None:
    with contextlib.ExitStack() as stack:
        first = [stack.enter_context(begin(port, b"")) for _ in range(3)]
        for _ in range(3 * MAX_CONNECTIONS):
            other = socket.create_connection(("127.0.0.1", port), 10, source_address=("127.0.0.2", 0))
            stack.enter_context(other)
        assert good(port) == "fine"
        assert all(is_open(client) for client in first)


def test_open_files_are_raised_or_the_option_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = [(1024, 4096)]
    monkeypatch.setattr(resource, "getrlimit", lambda kind: limits[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda kind, value: limits.append(value))
    connections.allow_files(100)
    assert limits == [(1024, 4096)]
    connections.allow_files(1000)
    assert limits[-1] == (1768, 4096)
    with pytest.raises(UserError, match="5000 needs 5768 open files; this process may have 4096\nallowed: up to 3328"):
        connections.allow_files(5000)


@pytest.mark.exhaustive
def test_hundreds_of_half_open_connections_lock_nobody_out(tmp_path: Path) -> None:
    """The whole command: its option, the limit of open files, and the engine answering meanwhile."""
    run = tiny_run(tmp_path, context=2048)
    export(run)
    body = {"prompt": "def ", "max_tokens": 4, "temperature": 0}
    with start_server(run, "--max-connections", "100") as server, contextlib.ExitStack() as stack:
        port = int(server.url.rsplit(":", 1)[1])
        alone = httpx.post(f"{server.url}/v1/completions", json=body, timeout=30).json()["choices"]
        clients: list[socket.socket] = []
        for kind in (*HALF, "half a head"):
            clients += [stack.enter_context(begin(port, HALF[kind])) for _ in range(100)]
            answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=30)
            assert answer.status_code == 200
            assert answer.json()["choices"] == alone
        assert sum(map(is_open, clients)) <= 100
        end_s = time.monotonic() + 30
        while any(map(is_open, clients)):
            assert time.monotonic() < end_s
            time.sleep(0.5)
    told = "".join(server.errors)
    assert told.count("all 100 connections are open") == 1
    assert "Traceback" not in told
