"""Server-sent events, and a watch for clients that disconnect."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

DONE = "data: [DONE]\n\n"


def event(value: dict[str, Any]) -> str:
    """Return one server-sent event."""
    return f"data: {json.dumps(value, ensure_ascii=False, separators=(',', ':'), allow_nan=False)}\n\n"


class Watch:
    """``async with Watch(receive, gone)``: calls ``gone`` when the client disconnects before the block ends."""

    def __init__(self, receive: Receive, gone: Callable[[], None]) -> None:
        self._receive = receive
        self._gone = gone

    async def __aenter__(self) -> None:
        self._task = asyncio.create_task(self._listen())

    async def __aexit__(self, *error: object) -> None:
        self._task.cancel()

    async def _listen(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._gone()


class EventStream(Response):
    """Sends events as they are made; calls ``stop`` when the client disconnects and at the end, however it ends."""

    def __init__(self, events: AsyncIterator[str], stop: Callable[[], None], headers: dict[str, str]) -> None:
        self.status_code = 200
        self.background = None
        self.media_type = "text/event-stream"
        self.body = b""
        self.init_headers({**headers, "X-Accel-Buffering": "no"})
        self._events = events
        self._stop = stop

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send all events."""
        headers = [(name, value) for name, value in self.raw_headers if name != b"content-length"]
        try:
            async with Watch(receive, self._stop):
                await send({"type": "http.response.start", "status": 200, "headers": headers})
                async for text in self._events:
                    await send({"type": "http.response.body", "body": text.encode(), "more_body": True})
                await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            self._stop()
