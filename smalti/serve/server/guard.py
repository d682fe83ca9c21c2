"""Checks every request before its route: limits, key, Host and Origin.

Without a key the server listens on this machine only, but a web page in a browser on it can send requests to 127.0.0.1,
or by DNS rebinding under its own host name. So ``Host`` must then name this machine and ``Origin`` the server. The key
is never in a cookie, and no CORS header is sent, so no page of another origin can read an answer.
"""

import asyncio
import hashlib
import hmac
import ipaddress
import secrets
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from smalti.base import clock, log
from smalti.base.units import format_bytes, format_seconds
from smalti.serve.server.errors import ApiError, shutting_down
from smalti.serve.server.metrics import Metrics

BODY_TIMEOUT_S = 30.0

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

_ALWAYS = {
    "x-content-type-options": "nosniff",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "cache-control": "no-store",
}


@dataclass
class Guard:
    """An ASGI app in front of ``app`` that checks every request."""

    app: App
    metrics: Metrics
    key: str | None = None
    max_body_bytes: int = 4 << 20
    closing: bool = False
    """True once the server is stopping: running requests finish, new ones get 503."""
    open_page: App | None = None
    """Answers ``GET /`` without the key, with the page that prompts for it."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer with an error, or pass the request on."""
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
            return
        start_s = clock.now_s()
        responder = _Responder(send)
        try:
            await self._answer(scope, receive, responder)
        except ApiError as error:
            if responder.status is None:
                await error.response()(scope, receive, responder)
        finally:
            self._note(scope, responder.status, clock.now_s() - start_s)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self.closing:
            raise shutting_down()
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        if self.key is None:
            check_host_and_origin(headers)
        elif not _same(_bearer(headers), self.key):
            if self.open_page is not None and scope["path"] == "/" and scope["method"] in ("GET", "HEAD"):
                await self.open_page(scope, receive, send)
                return
            raise ApiError(
                401,
                "a key is required: send the header 'Authorization: Bearer KEY'"
                if "authorization" not in headers
                else "the key is wrong",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
        body = await self._body(headers, receive)
        if body is not None:
            await self.app(scope, _replay(body, receive), send)

    async def _body(self, headers: dict[str, str], receive: Receive) -> bytes | None:
        """Return the whole body; None if the client disconnected before it arrived."""
        too_large = ApiError(
            413, f"the body is larger than {format_bytes(self.max_body_bytes)}", code="request_too_large"
        )
        length = headers.get("content-length", "0")
        if not length.isdigit() or int(length[:20]) > self.max_body_bytes:
            raise too_large
        body = bytearray()
        try:
            async with asyncio.timeout(BODY_TIMEOUT_S):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return None
                    body += message.get("body", b"")
                    if len(body) > self.max_body_bytes:
                        raise too_large
                    if not message.get("more_body"):
                        return bytes(body)
        except TimeoutError:
            raise ApiError(
                408,
                f"the body did not arrive within {BODY_TIMEOUT_S:.0f} s",
                code="timeout",
                headers={"Connection": "close"},
            ) from None

    def _note(self, scope: Scope, status: int | None, wall_s: float) -> None:
        self.metrics.http.labels(status or "gone").inc()
        # repr: a path may contain anything, including terminal escape codes.
        path = repr(scope["path"])[1:-1][:80]
        log.get("serve").info("%s %s %s %s", scope["method"], path, status or "gone", format_seconds(wall_s))


class _Responder:
    """Sends messages with the headers of every answer, and records the status."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.status: int | None = None

    async def __call__(self, message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            present = {name for name, _ in message["headers"]}
            headers = {**_ALWAYS, "x-request-id": f"req-{secrets.token_hex(12)}"}
            message["headers"] = [
                *message["headers"],
                *((name.encode(), value.encode()) for name, value in headers.items() if name.encode() not in present),
            ]
        await self._send(message)


def check_host_and_origin(headers: dict[str, str]) -> None:
    """Raise ApiError 403 if the request names another machine, or comes from a page of another origin."""
    host = headers.get("host", "")
    if not _is_this_machine(_host_name(host)):
        raise ApiError(
            403,
            f"the Host '{_printable(host)}' is not this machine; without a key the server answers only as "
            "localhost, 127.0.0.1 and ::1 (start it with a key to allow other names)",
            code="host_not_allowed",
        )
    origin = headers.get("origin")
    if origin is not None and _netloc(origin) != host.lower():
        raise ApiError(
            403,
            f"pages of '{_printable(origin)}' may not use this server; start it with a key to allow other programs",
            code="origin_not_allowed",
        )


def _netloc(origin: str) -> str | None:
    """Return ``a:1`` for ``http://a:1``; None for a value that is not an origin (``null``)."""
    try:
        return urlsplit(origin).netloc.lower() or None
    except ValueError:
        return None


def _host_name(host: str) -> str:
    try:
        return (urlsplit(f"//{host}").hostname or "").rstrip(".")
    except ValueError:
        return ""


def _is_this_machine(name: str) -> bool:
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def _printable(text: str) -> str:
    return repr(text)[1:-1][:80]


def _bearer(headers: dict[str, str]) -> str:
    scheme, _, key = headers.get("authorization", "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else ""


def _same(candidate: str, key: str) -> bool:
    """Compare digests, so that the time taken reveals neither the key nor its length."""
    digests = [hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest() for text in (candidate, key)]
    return hmac.compare_digest(*digests)


def _replay(body: bytes, receive: Receive) -> Receive:
    """Return a ``receive`` that returns the body once, then the messages after it (a disconnect)."""
    pending = [{"type": "http.request", "body": body, "more_body": False}]

    async def next_message() -> MutableMapping[str, Any]:
        return pending.pop() if pending else await receive()

    return next_message
