"""The server as one ASGI app: guard, routes, errors."""

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response

from smalti import __version__
from smalti.serve.server import errors
from smalti.serve.server.errors import from_engine
from smalti.serve.server.guard import Guard
from smalti.serve.server.metrics import CONTENT_TYPE
from smalti.serve.server.page import page
from smalti.serve.server.routes import routes
from smalti.serve.server.serving import Serving


def build(serving: Serving, *, key: str | None = None, max_body_bytes: int = 4 << 20) -> Guard:
    """Build the app of one model. With a ``key`` every route requires it."""
    # FastAPI's documentation pages load a script from another host.
    app = FastAPI(title="Smalti", version=__version__, openapi_url=None)
    errors.install(app)
    app.include_router(routes(serving))

    @app.get("/health")
    async def health() -> Response:
        if serving.loop.error is not None:
            raise from_engine(serving.loop.error)
        return JSONResponse({"status": "ok"})

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(serving.metrics.text(), headers={"Content-Type": CONTENT_TYPE})

    @app.get("/version")
    async def version() -> Response:
        return JSONResponse({"version": __version__})

    @app.get("/")
    async def chat_page(request: Request) -> Response:
        return page()

    return Guard(app, serving.metrics, key, max_body_bytes, open_page=page(401))
