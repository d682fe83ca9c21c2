"""Changes of the model registry; each is one transaction.

A version (1, 2, 3 of its name) is one content: other weights in the same folder are another version, and a number is
never used again. A tag is on at most one version of a name; every move of a tag is kept.
A registered checkpoint has a mark in its folder, so that its run does not delete it (``track/checkpoints/marks.py``).
"""

import json
import os
import shutil
import sqlite3
from dataclasses import asdict, replace
from pathlib import Path

from smalti.base import clock, database, log
from smalti.base.disk import writing
from smalti.base.errors import UserError
from smalti.track.checkpoints.marks import mark, registered_in, unmark
from smalti.track.registry.facts import Facts, digest
from smalti.track.registry.reference import Reference, check_name, check_tag
from smalti.track.registry.scores import Scores, merged
from smalti.track.registry.versions import Version, get, require, require_intact, select, tagged


def add(facts: Facts, name: str) -> tuple[Version, bool]:
    """Register a folder; returns its version, and whether that is new.

    The content that a version has, at its path or at another if the old one is gone, updates that version (a moved
    folder keeps its number); its scores are added to those it has.
    """
    check_name(name)
    with database.transaction() as db:
        version = _same_content(db, facts, name)
        if version is None:
            db.execute(
                "INSERT INTO models VALUES (?, 1) ON CONFLICT (name) DO UPDATE SET last_version=last_version+1", (name,)
            )
            number = int(db.execute("SELECT last_version FROM models WHERE name=?", (name,)).fetchone()[0])
        else:
            number = version.number
            # A folder that was moved away from its run says less than before.
            known = {key: getattr(version, key) for key, value in asdict(facts).items() if value in (None, {})}
            facts = replace(facts, **known | {"scores": merged(version.scores, facts.scores)})
        values = asdict(facts) | {"name": name, "version": number, "time": clock.utc_text()}
        values |= {"data": json.dumps(facts.data), "scores": json.dumps(facts.scores)}
        columns, marks = ", ".join(values), ", ".join(f":{column}" for column in values)
        updates = ", ".join(f"{column}=excluded.{column}" for column in values)
        db.execute(
            f"INSERT INTO model_versions ({columns}) VALUES ({marks}) "
            f"ON CONFLICT (name, version) DO UPDATE SET {updates}",
            values,
        )
        _mark(db, facts.path)
        return require(db, Reference(name, number=number)), version is None


def tag(reference: Reference, word: str) -> tuple[Version, int | None]:
    """Put a tag on a version; returns the version, and the number that had the tag, if any.

    The tag is on exactly one version at any time. Raises DataError where the folder is gone or has changed.
    """
    check_tag(word)
    checked = get(reference)
    require_intact(checked)  # before the transaction, as it reads files
    reference = Reference(checked.name, number=checked.number)
    with database.transaction() as db:
        version = require(db, reference)
        before = tagged(db, version.name, word)
        if before != version.number:
            db.execute("INSERT OR REPLACE INTO model_tags VALUES (?, ?, ?)", (version.name, word, version.number))
            _record_move(db, version.name, word, before, version.number)
        return require(db, reference), before


def untag(reference: Reference, word: str) -> Version:
    """Take a tag off a version. Raises UserError where the version does not have it."""
    with database.transaction() as db:
        version = require(db, reference)
        if word not in version.tags:
            raise UserError(
                f"{version.label} has no tag '{word}'",
                allowed=", ".join(version.tags) or "(it has none)",
                hint=f"smalti models ls {version.name}",
            )
        db.execute("DELETE FROM model_tags WHERE name=? AND tag=?", (version.name, word))
        _record_move(db, version.name, word, version.number, None)
        return require(db, Reference(version.name, number=version.number))


def check_remove(reference: Reference, *, files: bool) -> Version:
    """Return the version that ``remove`` would remove, or raise its errors."""
    with database.transaction(write=False) as db:
        return _removable(db, reference, files)


def remove(reference: Reference, *, files: bool) -> Version:
    """Remove a version from the registry; with ``files`` also delete its folder. Its number is not used again.

    Raises UserError where it has a tag, or its folder is that of another version, and DataError where, with ``files``,
    the folder is not what was registered.
    """
    aside: Path | None = None
    try:
        with database.transaction() as db:
            version = _removable(db, reference, files)
            db.execute("DELETE FROM model_versions WHERE name=? AND version=?", (version.name, version.number))
            _mark(db, version.path)
            if files:  # renamed first: a deletion that is interrupted leaves no folder that looks like a model
                path = Path(version.path)
                with writing(path):
                    aside = path.rename(path.with_name(f".{path.name}.{os.getpid()}.removed"))
    except BaseException:
        if aside is not None:  # not committed
            aside.rename(version.path)
        raise
    if aside is not None:
        with writing(aside):
            shutil.rmtree(aside)
    return version


def add_scores(path: str | Path, scores: Scores) -> list[Version]:
    """Add scores to every version whose content is that of the folder ``path`` now; returns them.

    None where there is no database yet: it is not created.
    """
    place = Path(path).resolve()
    if not database.location().exists():
        return []
    content = digest(place)
    with database.transaction() as db:
        same = [version for version in select(db, "path=?", (str(place),)) if version.digest == content]
        for version in same:
            text = json.dumps(merged(version.scores, scores))
            db.execute(
                "UPDATE model_versions SET scores=? WHERE name=? AND version=?", (text, version.name, version.number)
            )
        return same


def _mark(db: sqlite3.Connection, path: str) -> None:
    """Mark a checkpoint while any version is at its path; a folder that cannot be written is a warning."""
    rows = db.execute("SELECT kind, digest FROM model_versions WHERE path=?", (path,)).fetchall()
    name, place = registered_in(database.location()), Path(path)
    try:
        if any(row["kind"] == "checkpoint" and row["digest"] == digest(place) for row in rows):
            mark(place, name)
        else:
            unmark(place, name)
    except OSError as error:
        log.get("models").warning("%s is not marked as registered, so its run may delete it: %s", path, error)


def _same_content(db: sqlite3.Connection, facts: Facts, name: str) -> Version | None:
    """Return the version of ``name`` that these files are: registered at their path, or at one that is gone."""
    same = select(db, "name=? AND digest=?", (name, facts.digest))
    in_place = [version for version in same if version.path == facts.path]
    moved = [version for version in same if not os.path.exists(version.path)]
    return next(iter(in_place or moved), None)


def _removable(db: sqlite3.Connection, reference: Reference, files: bool) -> Version:
    if reference.number is None:
        raise UserError(
            f"'{reference.text}' may be another version tomorrow",
            allowed="NAME/NUMBER",
            hint=f"smalti models ls {reference.name}",
        )
    version = require(db, reference)
    if version.tags:
        raise UserError(
            f"{version.label} has the tag '{version.tags[0]}'",
            allowed="versions without tags",
            hint=f"smalti models tag {version.label} {version.tags[0]} --remove",
        )
    if files:
        require_intact(version)
        others = [other.label for other in select(db, "path=?", (version.path,)) if other.digest == version.digest]
        others.remove(version.label)
        if others:
            raise UserError(
                f"{version.path} is also {', '.join(others)}",
                allowed="--files for a folder of one version",
                hint=f"without --files, or first: smalti models rm {others[0]}",
            )
    return version


def _record_move(db: sqlite3.Connection, name: str, word: str, before: int | None, after: int | None) -> None:
    db.execute("INSERT INTO model_tag_moves VALUES (?, ?, ?, ?, ?)", (name, word, before, after, clock.utc_text()))
