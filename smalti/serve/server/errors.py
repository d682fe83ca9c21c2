"""The errors that the server answers with, in OpenAI's format: ``{"error": {"message", "type", "param", "code"}}``."""

from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException

from smalti.base.errors import RetryableError, SmaltiError, UserError
from smalti.serve.engine.sampling import NotFinite
from smalti.serve.engine.scheduler import QueueFull

INVALID = "invalid_request_error"


class ApiError(Exception):
    """An error answer. ``param`` names the field at fault, ``code`` is for programs to test."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = INVALID,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind = kind
        self.param = param
        self.code = code
        self.headers = headers or {}

    def body(self) -> dict[str, Any]:
        """Return the JSON body."""
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        """Return the HTTP response."""
        return JSONResponse(self.body(), self.status, headers=self.headers)


def unsupported(field: str, why: str) -> ApiError:
    """Return the error for a field that would change the answer and that this server does not support."""
    return ApiError(400, f"'{field}' {why}", param=field, code="unsupported_parameter")


def from_smalti(error: SmaltiError) -> ApiError:
    """Return the error of a request that was refused before it ran: its own fault (400), or to be retried."""
    if isinstance(error, QueueFull):
        return ApiError(
            429,
            f"{error.message}; try again in a second",
            kind="rate_limit_error",
            code="too_many_requests",
            headers={"Retry-After": "1"},
        )
    if isinstance(error, RetryableError):
        return shutting_down()
    if isinstance(error, UserError):
        return ApiError(400, str(error), code="invalid_value")
    return from_engine(error)


def from_engine(error: BaseException) -> ApiError:
    """Return the error of a request that failed in the engine. Names the kind of error, but no internals."""
    what = error.message if isinstance(error, NotFinite) else f"the engine failed ({type(error).__name__})"
    return ApiError(500, what, kind="server_error", code="engine_failed")


def from_bug(error: Exception) -> ApiError:
    """Return the error of an unforeseen exception."""
    return ApiError(500, f"a bug in the server ({type(error).__name__})", kind="server_error")


def shutting_down() -> ApiError:
    """Return the error of a server that is stopping."""
    return ApiError(
        503, "the server is shutting down", kind="server_error", code="shutting_down", headers={"Retry-After": "5"}
    )


def too_many_connections() -> ApiError:
    """Return the error for a connection beyond ``max_connections``."""
    return ApiError(
        503, "too many connections are open; try again in a second",
        kind="server_error", code="too_many_connections", headers={"Retry-After": "1"},
    )  # fmt: skip


def install(app: FastAPI) -> None:
    """Answer every exception of a route in this format."""

    async def api(request: Request, error: Exception) -> Response:
        assert isinstance(error, ApiError)
        return error.response()

    async def smalti(request: Request, error: Exception) -> Response:
        assert isinstance(error, SmaltiError)
        return from_smalti(error).response()

    async def http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code)
        messages = {
            404: f"there is no {request.url.path} here; the API is /v1/chat/completions, /v1/completions, /v1/models",
            405: f"{request.url.path} does not take {request.method}",
        }
        message = messages.get(error.status_code, str(error.detail))
        return ApiError(error.status_code, message, code=code, headers=dict(error.headers or {})).response()

    async def bug(request: Request, error: Exception) -> Response:
        # uvicorn logs the traceback: the error is raised on to it.
        return from_bug(error).response()

    app.add_exception_handler(ApiError, api)
    app.add_exception_handler(SmaltiError, smalti)
    app.add_exception_handler(HTTPException, http)
    app.add_exception_handler(Exception, bug)
