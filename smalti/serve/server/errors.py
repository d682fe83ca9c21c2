"""Every error that leaves the server, in OpenAI's shape: ``{"error": {"message", "type", "param", "code"}}``."""

from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException

from smalti.base.errors import RetryableError, SmaltiError, UserError
from smalti.serve.engine.sampling import NotFinite
from smalti.serve.engine.scheduler import QueueFull

INVALID = "invalid_request_error"


class ApiError(Exception):
    """An answer that is an error. ``param`` is the field that is to blame, ``code`` what a program may test for."""

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
        """What is sent."""
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        """The whole answer."""
        return JSONResponse(self.body(), self.status, headers=self.headers)


def unsupported(field: str, why: str) -> ApiError:
    """A field that would change the answer, and that this server does not know how to honour."""
    return ApiError(400, f"'{field}' {why}", param=field, code="unsupported_parameter")


def from_house(error: SmaltiError) -> ApiError:
    """What refused a request before it ran: the request is to blame (with all the error's lines), or the moment."""
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
    """What ended a request that ran, or the engine: never the client's fault. Its kind, and not its innards."""
    what = error.message if isinstance(error, NotFinite) else f"the engine failed ({type(error).__name__})"
    return ApiError(500, what, kind="server_error", code="engine_failed")


def from_bug(error: Exception) -> ApiError:
    """What nobody foresaw."""
    return ApiError(500, f"a bug in the server ({type(error).__name__})", kind="server_error")


def shutting_down() -> ApiError:
    """The answer of a server that has been told to stop."""
    return ApiError(
        503, "the server is shutting down", kind="server_error", code="shutting_down", headers={"Retry-After": "5"}
    )


def too_many_connections() -> ApiError:
    """The answer to a connection for which there is no place."""
    return ApiError(
        503, "too many connections are open; try again in a second",
        kind="server_error", code="too_many_connections", headers={"Retry-After": "1"},
    )  # fmt: skip


def install(app: FastAPI) -> None:
    """Give every way in which a route may fail this shape."""

    async def api(request: Request, error: Exception) -> Response:
        assert isinstance(error, ApiError)
        return error.response()

    async def house(request: Request, error: Exception) -> Response:
        assert isinstance(error, SmaltiError)
        return from_house(error).response()

    async def http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code)
        words = {
            404: f"there is no {request.url.path} here; the API is /v1/chat/completions, /v1/completions, /v1/models",
            405: f"{request.url.path} does not take {request.method}",
        }
        message = words.get(error.status_code, str(error.detail))
        return ApiError(error.status_code, message, code=code, headers=dict(error.headers or {})).response()

    async def bug(request: Request, error: Exception) -> Response:
        # The traceback is written by uvicorn, to which the error goes on.
        return from_bug(error).response()

    app.add_exception_handler(ApiError, api)
    app.add_exception_handler(SmaltiError, house)
    app.add_exception_handler(HTTPException, http)
    app.add_exception_handler(Exception, bug)
