"""``smalti models``: the model registry."""

from typing import Annotated

import typer

from smalti.cli.options import Json

app = typer.Typer(
    add_completion=False,
    rich_markup_mode=None,
    no_args_is_help=True,
    help="List, tag and remove registered models: versions of exports and checkpoints, in SMALTI_HOME (~/.smalti).",
)

_Version = Annotated[
    str, typer.Argument(metavar="VERSION", help="NAME/NUMBER, NAME@TAG, or NAME for its newest version.")
]
_DryRun = Annotated[bool, typer.Option("--dry-run", help="Print what would change, and change nothing.")]


@app.command(epilog="Example: smalti models ls demo --tag candidate")
def ls(
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="Only versions of this model.")] = None,
    tag: Annotated[str | None, typer.Option(help="Only versions with this tag.")] = None,
    every: Annotated[
        bool, typer.Option("--all", help="Also versions without a tag whose folder is gone or holds a later version.")
    ] = False,
    as_json: Json = False,
) -> None:
    """List the versions, newest first. A folder that is gone, or holds a later version, is marked."""
    from smalti.cli.models.text import HEAD, row
    from smalti.cli.tables import print_json, print_table
    from smalti.track.registry.versions import versions

    matching = versions(name=name, tag=tag)
    listed = [version for version in matching if every or version.tags or version.is_in_place]
    if as_json:
        print_json([version.to_json() for version in listed])
        return
    empty = (
        "no version matches" if name or tag or matching else "no model is registered; smalti export RUN registers one"
    )
    print_table(HEAD, [row(version) for version in listed], empty=empty)
    if len(listed) < len(matching):
        typer.echo(f"--all lists {len(matching) - len(listed)} more, whose files are gone or replaced", err=True)


@app.command(epilog="Example: smalti models show demo/1")
def show(version: _Version, as_json: Json = False) -> None:
    """Show one version: run, step, tokens, data, scores, path, and the moves of its name's tags."""
    from dataclasses import asdict

    from smalti.cli.models.text import about
    from smalti.cli.tables import print_json
    from smalti.track.registry.reference import parse
    from smalti.track.registry.versions import get, moves

    shown = get(parse(version))
    history = moves(shown.name)
    if as_json:
        print_json(shown.to_json() | {"problem": shown.problem(), "tag_moves": [asdict(move) for move in history]})
        return
    print(about(shown, history))


@app.command(epilog="Example: smalti models add runs/demo/export --name chat --tag candidate")
def add(
    path: Annotated[
        str, typer.Argument(metavar="PATH", help="Folder of an export, of an adapter, or of a checkpoint.")
    ],
    name: Annotated[str | None, typer.Option(help="Name of the model; absent: that of its run.")] = None,
    tag: Annotated[list[str] | None, typer.Option(help="Tag of the version; may be repeated.")] = None,
    dry_run: _DryRun = False,
    as_json: Json = False,
) -> None:
    """Register a folder as the next version of a model. The same files again update their version."""
    from smalti.base.errors import UserError
    from smalti.cli.tables import print_json
    from smalti.track.registry import changes
    from smalti.track.registry.facts import read_facts
    from smalti.track.registry.reference import Reference, check_name, check_tag
    from smalti.track.trackers import move_tag

    facts = read_facts(path)
    name = name or facts.run
    if name is None:
        raise UserError(
            f"{path} does not name its run", allowed="--name NAME", hint=f"--name {facts.path.rsplit('/')[-1]}"
        )
    check_name(name)
    for word in tag or ():
        check_tag(word)
    if dry_run:
        print(f"would register {facts.path} as a version of {name}")
        return
    version, is_new = changes.add(facts, name)
    for word in tag or ():
        version, _ = changes.tag(Reference(name, number=version.number), word)
        for line in move_tag(version, word):
            typer.echo(line, err=True)
    if as_json:
        print_json(version.to_json())
        return
    print(f"{'registered as' if is_new else 'updated'} models:/{version.label}: {version.kind}, {version.path}")


@app.command("tag", epilog="Example: smalti models tag demo production")
def tag_(
    version: _Version,
    tag: Annotated[str, typer.Argument(metavar="TAG", help="Any word, such as candidate or production.")],
    remove: Annotated[bool, typer.Option("--remove", help="Take the tag off this version.")] = False,
    dry_run: _DryRun = False,
    as_json: Json = False,
) -> None:
    """Put a tag on a version. Another version of the same name that has it loses it in the same moment."""
    from smalti.cli.models.text import tag_line
    from smalti.cli.tables import print_json
    from smalti.track.registry import changes
    from smalti.track.registry.reference import check_tag, parse
    from smalti.track.registry.versions import get, holder, require_intact
    from smalti.track.trackers import move_tag

    reference = parse(version)
    check_tag(tag)
    if dry_run:
        tagged = get(reference)
        if not remove:
            require_intact(tagged)
        print(f"would be: {tag_line(tagged, tag, holder(tagged.name, tag), remove=remove)}")
        return
    if remove:
        changed, before = changes.untag(reference, tag), None
    else:
        changed, before = changes.tag(reference, tag)
    for line in move_tag(changed, tag, remove=remove):
        typer.echo(line, err=True)
    print_json(changed.to_json()) if as_json else print(tag_line(changed, tag, before, remove=remove))


@app.command(epilog="Example: smalti models rm demo/1 --dry-run")
def rm(
    version: Annotated[str, typer.Argument(metavar="VERSION", help="NAME/NUMBER, without tags.")],
    files: Annotated[bool, typer.Option("--files", help="Also delete its folder; needs --yes.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Delete the folder without asking.")] = False,
    dry_run: _DryRun = False,
    as_json: Json = False,
) -> None:
    """Remove a version from the registry. Its number is not used again, and its files stay, but for --files."""
    from smalti.base.errors import UserError
    from smalti.cli.tables import print_json
    from smalti.track.registry import changes
    from smalti.track.registry.reference import parse

    if yes and not files:
        raise UserError("--yes has no effect without --files", allowed="--files --yes")
    reference = parse(version)
    if dry_run or (files and not yes):
        removable = changes.check_remove(reference, files=files)
        what = f"{removable.label}, and the folder {removable.path}" if files else removable.label
        if dry_run:
            print(f"would remove {what}")
            return
        raise UserError(
            f"--files deletes {removable.path}", allowed="with --yes, or --dry-run", hint=f"add --yes to remove {what}"
        )
    removed = changes.remove(reference, files=files)
    if as_json:
        print_json(removed.to_json())
        return
    print(f"removed {removed.label}; {'deleted' if files else 'its files stay:'} {removed.path}")
