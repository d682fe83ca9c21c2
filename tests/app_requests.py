"""Sends requests to the server's app in the test process, without a port."""

import asyncio
from typing import Any

import httpx

from smalti.serve.server.guard import Guard


def send(app: Guard, method: str, path: str, *, host: str = "127.0.0.1:8000", **more: Any) -> httpx.Response:
    async def one() -> httpx.Response:
        transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url=f"http://{host}") as client:
            return await client.request(method, path, **more)

    return asyncio.run(one())


def error_message(answer: httpx.Response, status: int, **parts: Any) -> str:
    """The message of an error in OpenAI's shape."""
    assert answer.status_code == status, answer.text
    assert set(answer.json()) == {"error"}
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    for name, value in parts.items():
        assert error[name] == value
    return str(error["message"])
