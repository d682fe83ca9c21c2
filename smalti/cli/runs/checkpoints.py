"""``smalti runs checkpoints``: lists, verifies, protects, deletes and copies the checkpoints of a run."""

import sys
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from smalti.cli.options import Json


class _ListsByDefault(TyperGroup):
    """A group whose command is ``ls`` where none is named: ``smalti runs checkpoints RUN``."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, self.with_command(args))

    def with_command(self, args: list[str]) -> list[str]:
        """Return the arguments with a command at their begin."""
        return ["ls", *args] if args and args[0] not in (*self.commands, "--help") else args


app = typer.Typer(
    cls=_ListsByDefault,
    add_completion=False,
    rich_markup_mode=None,
    no_args_is_help=True,
    help="List the checkpoints of a run: smalti runs checkpoints RUN. Verify, protect, delete and copy them. RUN may "
    "be a folder or the URL of its copies.",
)

_Run = Annotated[
    str,
    typer.Argument(
        metavar="RUN", help="A run folder, its name in runs/, or a folder or URL of copies: s3://bucket/runs/NAME."
    ),
]

_Step = Annotated[str, typer.Argument(metavar="STEP", help="A step, or newest, best or blessed.")]


@app.command(epilog="Example: smalti runs checkpoints ls runs/demo")
def ls(run: _Run, as_json: Json = False) -> None:
    """List checkpoints: step, tokens, size, time that the save blocked training, last verification, what keeps them.

    The parent of a checkpoint is the one from which it was trained.
    """
    from smalti.cli.runs.checkpoint_table import checkpoint_table
    from smalti.cli.tables import print_json
    from smalti.track.checkpoint_places import open_place

    place = open_place(run)
    rows = [each.to_json() for each in place.facts()]
    if as_json:
        print_json(rows)
        return
    print(checkpoint_table(rows) if rows else f"no checkpoint in {place.url}")


@app.command(epilog="Example: smalti runs checkpoints verify runs/demo")
def verify(
    run: _Run,
    step: Annotated[
        str | None, typer.Argument(metavar="STEP", help="A step, or newest, best or blessed; absent: all.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Read every file again and compare it with its digest; exit code 3 if one is damaged, of another run, or
    none is there."""
    from smalti.base.errors import CheckFailed
    from smalti.cli.progress import ProgressLine
    from smalti.cli.tables import print_json
    from smalti.track.checkpoint_places import open_place

    place = open_place(run)
    if step is None and (missing := place.missing()) is not None:
        print(f"note: {missing} was saved, and is missing or not complete", file=sys.stderr)
    faults: dict[str, str | None] = {}
    for name in place.named([] if step is None else [step]):
        with ProgressLine() as progress:
            faults[name] = place.verify(name, progress)
        if not as_json:
            print(f"{name}: {faults[name] or 'every file matches its digest'}")
    if as_json:
        print_json([{"checkpoint": name, "fault": fault} for name, fault in faults.items()])
    if not faults:
        raise CheckFailed(f"{run} has no complete checkpoint", hint=f"smalti runs show {run}")
    damaged = [name for name, fault in faults.items() if fault is not None]
    if damaged:
        raise CheckFailed(
            f"{len(damaged)} of {len(faults)} checkpoints cannot be used: {', '.join(damaged)}",
            hint="a resume skips them; restore them from a copy, or delete them with 'smalti runs checkpoints rm'",
        )


@app.command(epilog="Example: smalti runs checkpoints keep runs/demo newest")
def keep(
    run: _Run,
    step: _Step,
    off: Annotated[bool, typer.Option("--off", help="Remove the protection.")] = False,
) -> None:
    """Protect a checkpoint, also while the run trains: neither train.checkpoint.keep nor a full disk deletes it."""
    from smalti.track.checkpoint_places import open_place

    place = open_place(run)
    (name,) = place.named([step])
    place.protect(name, off=off)
    print(f"{name} of {place.url} is {'no longer ' if off else ''}protected")


@app.command(epilog="Example: smalti runs checkpoints rm runs/demo 150 300 --dry-run")
def rm(
    run: _Run,
    steps: Annotated[list[str], typer.Argument(metavar="STEP...", help="Steps.")],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would be deleted.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Delete without asking.")] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Also the newest, best, newest blessed, registered and protected ones.")
    ] = False,
) -> None:
    """Delete checkpoints. While the run trains, only those older than its newest two."""
    from smalti.base.errors import UserError
    from smalti.base.units import format_bytes
    from smalti.track.checkpoint_places import open_place

    place = open_place(run)
    names = place.named(steps)
    place.check_deletable(names, force=force)
    what = f"{', '.join(names)} of {place.url} ({format_bytes(sum(map(place.n_bytes, names)))})"
    if dry_run:
        print(f"would delete {what}")
        return
    if not yes and not sys.stdin.isatty():
        raise UserError(f"this deletes {what}", hint="--yes deletes, --dry-run only prints")
    if yes or typer.confirm(f"delete {what}?"):
        place.remove(names, force=force)
        print(f"deleted {what}")


@app.command(epilog="Example: smalti runs checkpoints copy runs/demo newest copies/demo")
def copy(
    run: _Run,
    step: _Step,
    target: Annotated[str, typer.Argument(metavar="TARGET", help="A folder, or a URL of an object store.")],
) -> None:
    """Copy a checkpoint to a folder or a store, verified. Repeat the command to continue an interrupted copy."""
    from smalti.cli.progress import ProgressLine
    from smalti.track.checkpoint_places import open_place

    place = open_place(run)
    (name,) = place.named([step])
    with ProgressLine() as progress:
        print(place.copy(name, target, progress))
