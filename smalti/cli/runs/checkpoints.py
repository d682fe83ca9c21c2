"""``smalti runs checkpoints``: lists, verifies, protects, deletes and copies the checkpoints of a run."""

import sys
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from smalti.cli.options import Json, Run


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
    help="List the checkpoints of a run: smalti runs checkpoints RUN. Verify, protect, delete and copy them.",
)

_Step = Annotated[str, typer.Argument(metavar="STEP", help="A step, or newest, best or blessed.")]


@app.command(epilog="Example: smalti runs checkpoints ls runs/demo")
def ls(run: Run, as_json: Json = False) -> None:
    """List checkpoints: step, tokens, size, time that the save blocked training, last verification, what keeps them.

    The parent of a checkpoint is the one from which it was trained.
    """
    from smalti.cli.runs.checkpoint_table import checkpoint_table
    from smalti.cli.tables import print_json
    from smalti.track.checkpoints.facts import checkpoints
    from smalti.track.run import RunFolder

    folder = RunFolder.read(run).path
    rows = [each.to_json() for each in checkpoints(folder)]
    if as_json:
        print_json(rows)
        return
    print(checkpoint_table(rows) if rows else f"no checkpoint in {folder / 'checkpoints'}")


@app.command(epilog="Example: smalti runs checkpoints verify runs/demo")
def verify(
    run: Run,
    step: Annotated[
        str | None, typer.Argument(metavar="STEP", help="A step, or newest, best or blessed; absent: all.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Read every file again and compare it with its digest; exit code 3 if one is damaged."""
    from smalti.base.errors import CheckFailed
    from smalti.cli.progress import ProgressLine
    from smalti.cli.tables import print_json
    from smalti.track import checkpoint_commands as commands
    from smalti.track.run import RunFolder

    paths = commands.named(RunFolder.read(run).path, [] if step is None else [step])
    faults: dict[str, str | None] = {}
    for path in paths:
        with ProgressLine() as progress:
            faults[path.name] = commands.verify(path, progress)
        if not as_json:
            print(f"{path.name}: {faults[path.name] or 'every file matches its digest'}")
    if as_json:
        print_json([{"checkpoint": name, "fault": fault} for name, fault in faults.items()])
    damaged = [name for name, fault in faults.items() if fault is not None]
    if damaged:
        raise CheckFailed(
            f"{len(damaged)} of {len(faults)} checkpoints are damaged: {', '.join(damaged)}",
            hint="a resume skips them; restore them from a copy, or delete them with 'smalti runs checkpoints rm'",
        )


@app.command(epilog="Example: smalti runs checkpoints keep runs/demo newest")
def keep(
    run: Run,
    step: _Step,
    off: Annotated[bool, typer.Option("--off", help="Remove the protection.")] = False,
) -> None:
    """Protect a checkpoint, also while the run trains: neither train.checkpoint.keep nor a full disk deletes it."""
    from smalti.base.disk import writing
    from smalti.track.checkpoint_commands import named
    from smalti.track.checkpoints.marks import PROTECTED, mark, unmark
    from smalti.track.run import RunFolder

    (path,) = named(RunFolder.read(run).path, [step])
    with writing(path):
        (unmark if off else mark)(path, PROTECTED)
    print(f"{path} is {'no longer ' if off else ''}protected")


@app.command(epilog="Example: smalti runs checkpoints rm runs/demo 150 300 --dry-run")
def rm(
    run: Run,
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
    from smalti.track import checkpoint_commands as commands
    from smalti.track.checkpoints.retention import stored_bytes
    from smalti.track.run import RunFolder

    folder = RunFolder.read(run).path
    paths = commands.named(folder, steps)
    commands.check_deletable(folder, paths, force=force)
    what = f"{', '.join(path.name for path in paths)} of {folder} ({format_bytes(sum(map(stored_bytes, paths)))})"
    if dry_run:
        print(f"would delete {what}")
        return
    if not yes and not sys.stdin.isatty():
        raise UserError(f"this deletes {what}", hint="--yes deletes, --dry-run only prints")
    if yes or typer.confirm(f"delete {what}?"):
        commands.remove(folder, paths, force=force)
        print(f"deleted {what}")


@app.command(epilog="Example: smalti runs checkpoints copy runs/demo newest copies/demo")
def copy(
    run: Run,
    step: _Step,
    target: Annotated[str, typer.Argument(metavar="TARGET", help="A folder, or a URL of an object store.")],
) -> None:
    """Copy a checkpoint to a folder or a store, verified. Repeat the command to continue an interrupted copy."""
    from smalti.cli.progress import ProgressLine
    from smalti.track import checkpoint_commands as commands
    from smalti.track.run import RunFolder

    folder = RunFolder.read(run).path
    (path,) = commands.named(folder, [step])
    with ProgressLine() as progress:
        print(commands.copy(folder, path, target, progress))
