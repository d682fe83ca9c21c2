"""``smalti serve``: answer requests over HTTP."""

from typing import Annotated

import typer

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command(epilog="Example: smalti serve runs/demo")
def serve(model: Annotated[str, typer.Argument(metavar="MODEL", help="A run, or a Hugging Face folder.")]) -> None:
    """Serve an exported model over HTTP."""
    from smalti.base.errors import UserError

    raise UserError(f"{model} cannot be served: this version has no server yet", hint=f"smalti chat {model}")
