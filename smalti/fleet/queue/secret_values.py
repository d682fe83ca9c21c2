"""Secret values: in files that only their owner can read, and in the environment of runs; nowhere else.

``SMALTI_HOME/secrets/NAME`` holds a value for every run that names it. ``SMALTI_HOME/secrets/runs/NUMBER.json`` holds
those that a run was launched with, until the run is completed.
"""

import json
import os
import secrets
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

from smalti.base.disk import writing
from smalti.base.env import user_folder, variables_of
from smalti.base.errors import DataError, UserError, nearest


def keep(run: int, names: Iterable[str], made: Mapping[str, str] | None = None) -> None:
    """Keep the values of this process's environment for a run, and those that were made for it. Raises UserError for a
    name that has none, and is not stored either."""
    names = list(names)
    variables = variables_of(names)
    for name in names:
        if name not in variables and name not in stored():
            close = nearest(name, stored())
            raise UserError(
                f"launch.secrets: {name} is neither a variable of the environment nor a stored secret",
                allowed="names of 'smalti fleet secret ls', or of variables that are set",
                hint=f"did you mean {close}?" if close else f"smalti fleet secret set {name}",
            )
    kept = {**variables, **(made or {})}
    if kept:
        _write(_of_run(run), json.dumps(kept))


def values(run: int, names: Iterable[str]) -> dict[str, str]:
    """Return the values of a run's secrets: those that it was launched with, else those stored now.

    Raises UserError for one that was removed, and DataError for a file that others can read.
    """
    kept = json.loads(_read(_of_run(run)) or "{}")
    secret_values: dict[str, str] = {}
    for name in names:
        value = kept.get(name) if name in kept else _read(_place() / name)
        if value is None:
            raise UserError(f"the secret {name} is not stored any more", hint=f"smalti fleet secret set {name}")
        secret_values[name] = value
    return secret_values


def value(name: str) -> str:
    """Return a stored value. Raises UserError where there is none, DataError for a file that others can read."""
    stored_value = _read(_place() / name)
    if stored_value is None:
        raise UserError(f"the secret {name} is not stored", hint=f"smalti fleet secret set {name}")
    return stored_value


def forget(run: int) -> None:
    """Delete what was kept for a run."""
    with suppress(FileNotFoundError):
        _of_run(run).unlink()


def store(name: str, value: str) -> None:
    """Store a value under a name, or replace it."""
    _write(_place() / name, value)


def stored() -> list[str]:
    """Return the names of the stored values, sorted."""
    try:
        return sorted(file.name for file in _place().iterdir() if file.is_file() and "." not in file.name)
    except FileNotFoundError:
        return []


def remove(name: str) -> None:
    """Delete a stored value. Raises UserError where there is none of this name."""
    if name not in stored():
        close = nearest(name, stored())
        hint = f"did you mean {close}?" if close else "smalti fleet secret ls"
        raise UserError(f"there is no stored secret '{name}'", allowed=", ".join(stored()) or "none", hint=hint)
    (_place() / name).unlink()


def _place() -> Path:
    return Path(user_folder()).absolute() / "secrets"


def _of_run(run: int) -> Path:
    return _place() / "runs" / f"{run}.json"


def _write(file: Path, text: str) -> None:
    """Write a file that from its first byte on only its owner can read."""
    with writing(file.parent):
        _place().mkdir(mode=0o700, parents=True, exist_ok=True)
        file.parent.mkdir(mode=0o700, exist_ok=True)
        partial = file.with_name(f"{file.name}.{secrets.token_hex(4)}.tmp")
        with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as opened:
            opened.write(text)
        partial.replace(file)


def _read(file: Path) -> str | None:
    try:
        with open(file, encoding="utf-8") as opened:
            if os.fstat(opened.fileno()).st_mode & 0o077:
                raise DataError(f"others may read {file}", allowed="mode 0600", hint=f"chmod 600 {file}")
            return opened.read()
    except FileNotFoundError:
        return None
