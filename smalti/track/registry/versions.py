"""Reads versions of models, their tags and the moves of tags from the database of ``SMALTI_HOME``."""

import json
import os
import sqlite3
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from smalti.base import database
from smalti.base.errors import DataError, nearest
from smalti.track.registry.facts import Facts, digest
from smalti.track.registry.reference import Reference, parse


@dataclass(frozen=True)
class Version(Facts):
    """A registered folder, with its facts at that time."""

    name: str = ""
    number: int = 0
    time: str = ""
    """When it was registered last."""
    tags: tuple[str, ...] = ()
    replaced_by: str | None = None
    """``NAME/NUMBER`` that was registered later at the same path, whose content is another."""

    @property
    def label(self) -> str:
        """``NAME/NUMBER``."""
        return f"{self.name}/{self.number}"

    @property
    def is_in_place(self) -> bool:
        """Whether its folder exists, and no later version was registered there; ``problem`` reads the files."""
        return self.replaced_by is None and os.path.isdir(self.path)

    def problem(self) -> str | None:
        """Return why the folder is no longer what was registered, or None."""
        if not os.path.isdir(self.path):
            return f"{self.path} is gone"
        if digest(Path(self.path)) != self.digest:
            now = f"; it holds {self.replaced_by} now" if self.replaced_by else ""
            return f"{self.path} has changed since {self.label} was registered{now}"
        return None

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object with all fields and the reference."""
        return {"reference": f"models:/{self.label}", **asdict(self), "tags": list(self.tags)}


@dataclass(frozen=True)
class TagMove:
    """A tag moved from a version (None: it was new) to another (None: it was removed)."""

    tag: str
    from_version: int | None
    to_version: int | None
    time: str


def versions(*, name: str | None = None, tag: str | None = None) -> list[Version]:
    """Return the versions, by name, newest first; only those of ``name`` or with ``tag``."""
    with database.transaction(write=False) as db:
        if name is not None:
            require_name(db, name)
        every = select(db, "name=?" if name is not None else "1", (name,) if name is not None else ())
    return [version for version in every if tag is None or tag in version.tags]


def get(reference: Reference) -> Version:
    """Return a version as it was registered. Raises DataError, with what there is, where there is none."""
    with database.transaction(write=False) as db:
        return require(db, reference)


def resolve(text: str) -> Version:
    """Return the version that ``models:/...`` means, whose folder is what was registered.

    Raises UserError for text of another form, DataError where there is no such version, or its folder is gone or has
    changed.
    """
    version = get(parse(text))
    require_intact(version)
    return version


def holder(name: str, tag: str) -> int | None:
    """Return the number of the version of ``name`` that has a tag; None where none has it."""
    with database.transaction(write=False) as db:
        return tagged(db, name, tag)


def moves(name: str) -> list[TagMove]:
    """Return the moves of all tags of a name, oldest first."""
    with database.transaction(write=False) as db:
        rows = db.execute(
            "SELECT tag, from_version, to_version, time FROM model_tag_moves WHERE name=? ORDER BY rowid", (name,)
        )
        return [TagMove(**dict(row)) for row in rows]


def require_intact(version: Version) -> None:
    """Raise DataError where the folder of a version is gone, or has another content than was registered."""
    problem = version.problem()
    if problem is not None:
        raise DataError(
            f"models:/{version.label} cannot be used: {problem}",
            allowed="a folder with the config and weights that were registered",
            hint=f"restore it, or register another folder: smalti models add FOLDER --name {version.name}",
        )


def require(db: sqlite3.Connection, reference: Reference) -> Version:
    """Return a version as it was registered. Raises DataError, with what there is, where there is none."""
    name, word, number = reference.name, reference.tag, reference.number
    require_name(db, name)
    rows = select(db, "name=?", (name,))
    if word is not None:
        number = tagged(db, name, word)
        if number is None:
            tags = sorted(tag for version in rows for tag in version.tags)
            raise DataError(
                f"no version of {name} has the tag '{word}'",
                allowed=", ".join(f"{name}@{tag}" for tag in tags) or "(there are no tags)",
                hint=f"smalti models tag {name}/NUMBER {word}",
            )
    for version in rows:
        if number is None or version.number == number:
            return version
    raise DataError(
        f"there is no version {number} of {name}" if rows else f"{name} has no version left",
        allowed=", ".join(version.label for version in reversed(rows)) or None,
        hint=f"smalti models ls {name}",
    )


def require_name(db: sqlite3.Connection, name: str) -> None:
    """Raise DataError, with the nearest name, where no model of this name was ever registered."""
    names = [row["name"] for row in db.execute("SELECT name FROM models ORDER BY name")]
    if name not in names:
        close = nearest(name, names)
        raise DataError(
            f"there is no registered model '{name}'",
            allowed=", ".join(names) or "(none is registered)",
            hint=f"did you mean {close}?" if close else f"smalti models add FOLDER --name {name}",
        )


def select(db: sqlite3.Connection, condition: str, values: tuple[Any, ...]) -> list[Version]:
    """Return the versions that meet a condition on their row, by name, newest first."""
    tags: dict[tuple[str, int], list[str]] = {}
    for row in db.execute("SELECT name, version, tag FROM model_tags ORDER BY tag"):
        tags.setdefault((row["name"], row["version"]), []).append(row["tag"])
    newest: dict[str, tuple[str, str]] = {}
    for row in db.execute("SELECT path, name, version, digest FROM model_versions ORDER BY time, rowid"):
        newest[row["path"]] = (row["digest"], f"{row['name']}/{row['version']}")
    rows = db.execute(f"SELECT * FROM model_versions WHERE {condition} ORDER BY name, version DESC", values)
    return [_version_of(row, tuple(tags.get((row["name"], row["version"]), ())), *newest[row["path"]]) for row in rows]


def _version_of(row: sqlite3.Row, tags: tuple[str, ...], newest_digest: str, newest_label: str) -> Version:
    values = dict(row)
    number, data, scores = values.pop("version"), json.loads(values.pop("data")), json.loads(values.pop("scores"))
    replaced_by = None if newest_digest == row["digest"] else newest_label
    return Version(**values, number=number, data=data, scores=scores, tags=tags, replaced_by=replaced_by)


def tagged(db: sqlite3.Connection, name: str, word: str) -> int | None:
    """Return the number of the version that has a tag; None where none has it."""
    row = db.execute("SELECT version FROM model_tags WHERE name=? AND tag=?", (name, word)).fetchone()
    return None if row is None else int(row["version"])
