"""Limits on connections: how long the server waits for a client, and how many are open at once.

uvicorn itself limits only the time between an answer and the next request. Added are ``HEAD_TIMEOUT_S``,
``STALL_TIMEOUT_S`` and ``ConnectionLimit``; ``guard`` limits the body.
"""

import asyncio
import json
import math
import resource
from collections import Counter
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

from smalti.base import log
from smalti.base.errors import UserError
from smalti.serve.server.errors import ApiError, too_many_connections

HEAD_TIMEOUT_S = 10.0
"""A connection is closed if the head of a request is not complete this long after the connection was made (on a
connection that is kept alive: after the first byte)."""
STALL_TIMEOUT_S = 60.0
"""A client that does not read its answer for this long, so that asyncio's buffer stays full, is disconnected."""
BACKLOG = 512
"""asyncio accepts up to this many connections before ``Connection`` receives the first."""
_OTHER_FILES = 256
_WARN_EVERY_S = 60.0


def allow_files(max_connections: int) -> None:
    """Raise this process's limit of open files to what the connections need. UserError if that is not allowed."""
    others = BACKLOG + _OTHER_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= max_connections + others:
        return
    if hard != resource.RLIM_INFINITY and hard < max_connections + others:
        max_here = hard - others
        raise UserError(
            f"--max-connections {max_connections} needs {max_connections + others} open files; "
            f"this process may have {hard}",
            allowed=f"up to {max_here} here" if max_here > 0 else None,
            hint=f"--max-connections {max_here}" if max_here > 0 else f"ulimit -Hn {max_connections + others}",
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (max_connections + others, hard))


@dataclass
class ConnectionLimit:
    """The limit on open connections, shared by all of them.

    A connection beyond it closes the oldest idle one of the address with the most idle ones; if every connection is
    being answered, the new one gets 503.
    """

    max_connections: int
    _warned_s: float = -math.inf

    def admit(self, new: "Connection") -> None:
        """Close an idle connection, or refuse this one, if there are too many."""
        others = [other for other in new.connections if other is not new and isinstance(other, Connection)]
        if len(others) < self.max_connections:
            return
        self._warn(new.loop.time())
        idle = [other for other in others if other.waits_for_client and not other.transport.is_closing()]
        if idle:
            count = Counter(other.host for other in idle)
            min(idle, key=lambda other: (-count[other.host], other.idle_since_s)).transport.abort()
        else:
            new.refuse(too_many_connections())

    def _warn(self, now_s: float) -> None:
        if now_s - self._warned_s > _WARN_EVERY_S:
            self._warned_s = now_s
            log.get("serve").warning(
                "all %d connections are open (--max-connections); closing the oldest idle ones",
                self.max_connections,
            )


class Connection(H11Protocol):
    """uvicorn's connection with the limits above."""

    def __init__(self, limit: ConnectionLimit, **options: Any) -> None:
        super().__init__(**options)
        self._limit = limit
        self._head_timer: asyncio.TimerHandle | None = None
        self._stall_timer: asyncio.TimerHandle | None = None
        self.idle_since_s = 0.0

    @property
    def host(self) -> str:
        """Return the client's address."""
        return self.client[0] if self.client else ""

    @property
    def waits_for_client(self) -> bool:
        """True while a request is not complete; False while one is being answered."""
        return self._waits_for_head or bool(self.cycle.more_body)

    @property
    def _waits_for_head(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def refuse(self, error: ApiError) -> None:
        """Answer with an error before any request, and close."""
        body = json.dumps(error.body()).encode()
        headers = {
            **error.headers,
            "Content-Type": "application/json",
            "Content-Length": str(len(body)),
            "Connection": "close",
        }
        lines = [f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        self.transport.write("\r\n".join([*lines, "", ""]).encode() + body)
        self.transport.close()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start to wait for a request."""
        super().connection_made(transport)
        self.idle_since_s = self.loop.time()
        self._limit_head()
        self._limit.admit(self)

    def data_received(self, data: bytes) -> None:
        """Start the timer of a head that has begun; cancel that of a complete one."""
        super().data_received(data)
        self._limit_head()

    def on_response_complete(self) -> None:
        """Wait for the next request; the rest of a refused body has the time limit of a head."""
        self.idle_since_s = self.loop.time()
        super().on_response_complete()
        if self.waits_for_client and self.cycle.more_body:
            self._limit_head()

    def pause_writing(self) -> None:
        """Start the timer: the client reads more slowly than the server writes."""
        super().pause_writing()
        self._stall_timer = self.loop.call_later(STALL_TIMEOUT_S, self.transport.abort)

    def resume_writing(self) -> None:
        """Cancel the timer: the client has read."""
        super().resume_writing()
        self._stall_timer = _cancelled(self._stall_timer)

    def timeout_keep_alive_handler(self) -> None:
        """Close the connection, even if the client never read its last answer."""
        self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel the timers."""
        self._head_timer = _cancelled(self._head_timer)
        self._stall_timer = _cancelled(self._stall_timer)
        super().connection_lost(exc)

    def _limit_head(self) -> None:
        if not self._waits_for_head:
            self._head_timer = _cancelled(self._head_timer)
        elif self._head_timer is None:
            self._head_timer = self.loop.call_later(HEAD_TIMEOUT_S, self.transport.abort)


def _cancelled(timer: asyncio.TimerHandle | None) -> asyncio.TimerHandle | None:
    if timer is not None:
        timer.cancel()
    return None
