"""``smalti fleet secret``: values that runs get by name."""

import sys
from typing import Annotated

import typer

from smalti.cli.options import Json

app = typer.Typer(
    add_completion=False,
    rich_markup_mode=None,
    no_args_is_help=True,
    help="Store values that runs get as environment variables, by name (launch.secrets).",
)

_Name = Annotated[str, typer.Argument(metavar="NAME", help="Name of the environment variable.")]


@app.command("set", epilog="Example: smalti fleet secret set HF_TOKEN")
def set_value(name: _Name) -> None:
    """Store a value in a file that only you can read, or replace it: asked for, or read from the standard input."""
    from smalti.config.launch import LaunchConfig
    from smalti.config.load import from_dict
    from smalti.fleet.queue import secret_values

    from_dict(LaunchConfig, {"secrets": [name]}, "the name")
    value = typer.prompt(name, hide_input=True) if sys.stdin.isatty() else sys.stdin.read()
    secret_values.store(name, value.removesuffix("\n"))
    print(f"{name} is stored")


@app.command(epilog="Example: smalti fleet secret ls --json")
def ls(as_json: Json = False) -> None:
    """List the names of the stored values."""
    from smalti.cli.tables import print_json, print_table
    from smalti.fleet.queue import secret_values

    names = secret_values.stored()
    if as_json:
        print_json(names)
        return
    print_table(("name",), [(name,) for name in names], empty="none; smalti fleet secret set NAME stores one")


@app.command(epilog="Example: smalti fleet secret rm HF_TOKEN --yes")
def rm(
    name: _Name,
    yes: Annotated[bool, typer.Option("--yes", help="Do it; without it, print what would be done.")] = False,
) -> None:
    """Delete a stored value. Runs that were launched with one of their environment keep it."""
    from smalti.base.errors import UserError
    from smalti.fleet.queue import secret_values

    if not yes:
        raise UserError(f"this deletes {name}", allowed="--yes", hint=f"smalti fleet secret rm {name} --yes")
    secret_values.remove(name)
    print(f"{name} is deleted")
