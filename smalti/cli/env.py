"""``smalti env``: what a bug report needs to say about this installation and machine."""

from typing import Annotated

import typer

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command(epilog="Example: smalti env --json")
def env(as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """Print versions, machine and devices, to be pasted into a bug report."""
    import platform

    from smalti import __version__
    from smalti.cli.tables import print_json, print_pairs

    found = {"smalti": __version__, "python": platform.python_version(), "platform": platform.platform()}
    if as_json:
        print_json(found)
        return
    print_pairs(list(found.items()))
