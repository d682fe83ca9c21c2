"""``smalti serve``: serves a model over HTTP with OpenAI's API."""

from pathlib import Path
from typing import Annotated

import typer

from smalti.cli.options import Model

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command(epilog="Example: smalti serve runs/demo --port 8000")
def serve(
    model: Model,
    host: Annotated[str, typer.Option(help="Address to listen on; any beyond this machine needs a key.")] = (
        "127.0.0.1"
    ),
    port: Annotated[int, typer.Option(help="Port to listen on; 0: a free one, which is printed.")] = 8000,
    key_file: Annotated[
        Path | None,
        typer.Option(help="File whose first line is the key of every request; or SMALTI_SERVE_KEY."),
    ] = None,
    name: Annotated[str | None, typer.Option(help="Name of the model in the API; absent: the run's or folder's.")] = (
        None
    ),
    adapter: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=FOLDER", help="Adapter that requests choose as their model; may be repeated."),
    ] = None,
    dtype: Annotated[str, typer.Option(help="Compute in fp32 or bf16.")] = "fp32",
    max_rows: Annotated[int, typer.Option(help="Answers generated at the same time.")] = 32,
    max_waiting: Annotated[int, typer.Option(help="Answers that may wait; more get 429.")] = 512,
    max_body_mb: Annotated[float, typer.Option(help="Largest request, in MiB; larger ones get 413.")] = 4.0,
    max_connections: Annotated[int, typer.Option(help="Open connections; one more closes the oldest idle one.")] = 1000,
    finish_s: Annotated[float, typer.Option(help="Seconds for running requests to finish on Ctrl-C.")] = 30.0,
) -> None:
    """Serve an exported model: /v1/chat/completions, /v1/completions, /v1/models, /health, /metrics, a chat page at /.

    Ctrl-C or SIGTERM lets running requests finish; a second one stops them at once.
    """
    from smalti.base import log
    from smalti.base.env import log_level
    from smalti.serve.folders import find
    from smalti.serve.server.run import Options
    from smalti.serve.server.run import serve as run

    log.setup(log_level())
    options = Options(
        host=host,
        port=port,
        key=_key(key_file),
        name=name,
        dtype=dtype,
        max_rows=max_rows,
        max_waiting=max_waiting,
        max_body_bytes=int(min(max_body_mb, 1 << 20) * (1 << 20)) if max_body_mb > 0 else 0,
        max_connections=max_connections,
        finish_s=finish_s,
        adapters=tuple(adapter or ()),
    )
    code = run(find(model), options)
    if code:
        raise typer.Exit(code)


def _key(path: Path | None) -> str | None:
    """Return the key from the file, else from the environment; None where neither has one."""
    from smalti.base import store
    from smalti.base.env import serve_key
    from smalti.base.errors import UserError

    if path is None:
        return serve_key()
    lines = store.read_text(path).splitlines()
    if not lines or not lines[0].strip():
        raise UserError(
            f"{path} has no key on its first line",
            hint="python -c 'import secrets; print(secrets.token_urlsafe(32))' > key.txt",
        )
    return lines[0].strip()
