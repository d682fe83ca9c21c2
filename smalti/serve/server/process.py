"""Runs uvicorn with one worker, signal handlers that finish running requests, and an exit code."""

import asyncio
import functools
import logging
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

import uvicorn

from smalti.base.errors import ExitCode
from smalti.base.units import format_seconds
from smalti.serve.server.connections import BACKLOG, Connection, ConnectionLimit
from smalti.serve.server.guard import Guard

_KEEP_ALIVE_S = 60
_CANCEL_S = 5.0


def run(
    app: Guard,
    listening: socket.socket,
    *,
    name: str,
    finish_s: float,
    max_connections: int,
    failed: Callable[[], bool],
) -> int:
    """Answer until a signal arrives or ``failed`` returns True.

    Returns 0 when every request got its answer; 130 (Ctrl-C) or 143 (SIGTERM) when some were cut off.
    """
    config = uvicorn.Config(
        app,
        http=functools.partial(Connection, ConnectionLimit(max_connections)),  # type: ignore[arg-type]
        backlog=BACKLOG,
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        lifespan="off",
        ws="none",
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=finish_s,  # type: ignore[arg-type]
    )
    server = _Server(config, app, failed, f"{name} at {_url(listening)} (chat page; the API is under /v1)")
    asyncio.run(server.serve(sockets=[listening]))
    if not server.cut_off:
        return ExitCode.DONE
    return ExitCode.TERMINATED if server.signal == signal.SIGTERM else ExitCode.INTERRUPTED


class _Server(uvicorn.Server):
    """Finishes running requests on the first signal, ends at once on the second; never re-raises the signal."""

    def __init__(self, config: uvicorn.Config, app: Guard, failed: Callable[[], bool], ready: str) -> None:
        super().__init__(config)
        self._app = app
        self._failed = failed
        self._ready = ready
        self.signal: int | None = None
        self.cut_off = False

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start to answer, and print the address."""
        await super().startup(sockets=sockets)
        print(self._ready, flush=True)

    async def on_tick(self, counter: int) -> bool:
        """Return True to end the server."""
        return await super().on_tick(counter) or self._failed()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Finish running requests, up to the limit, and cut off the others; prints a line for each of the two."""
        self._app.closing = True
        if self.server_state.tasks:
            n_answers = _answers(len(self.server_state.tasks))
            limit = format_seconds(self.config.timeout_graceful_shutdown or 0)
            print(f"finishing {n_answers} (up to {limit}); press Ctrl-C again to stop now", file=sys.stderr, flush=True)
        logger = logging.getLogger("uvicorn.error")
        logger.addFilter(_is_not_cut_off)
        try:
            await super().shutdown(sockets=sockets)
            await self._cut_off(set(self.server_state.tasks))
        finally:
            logger.removeFilter(_is_not_cut_off)

    async def _cut_off(self, tasks: set[asyncio.Task[None]]) -> None:
        if not tasks:
            return
        self.cut_off = True
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks, timeout=_CANCEL_S)
        print(f"{_answers(len(tasks))} cut off", file=sys.stderr, flush=True)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Install our handlers while the server runs."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self.handle_exit) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """First signal: finish running requests. Second: end at once."""
        self.force_exit = self.should_exit
        self.should_exit = True
        self.signal = self.signal or sig


def _answers(n: int) -> str:
    return f"{n} answer" if n == 1 else f"{n} answers"


def _is_not_cut_off(record: logging.LogRecord) -> bool:
    """Return False for uvicorn's records of requests that are cut off: a line, and a traceback for each."""
    error = record.exc_info[1] if record.exc_info else None
    return not isinstance(error, asyncio.CancelledError) and "graceful shutdown exceeded" not in str(record.msg)


def _url(listening: socket.socket) -> str:
    host, port = listening.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
