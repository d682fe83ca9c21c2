"""The code that a launched run executes: an installed version, a commit of a checkout, or a packed copy of one."""

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from smalti.base.disk import writing
from smalti.base.errors import DataError, UserError
from smalti.base.hashing import digest_json, sha256_file
from smalti.track.provenance import git_state


@dataclass(frozen=True)
class Code:
    """What is recorded of the code of a run."""

    commit: str | None
    """Commit of the checkout, with ``+DIGEST`` of a packed copy; None: an installed version."""
    folder: Path | None = None
    """Folder of the packed copy, first in the run's search path; None: the package where it is."""


def code_of(package: Path, copies: Path, *, pack: bool) -> Code:
    """Return the code of a ``package`` that is launched; with ``pack`` a copy of its files is made below ``copies``.

    Raises UserError for a checkout with changes that are not committed, unless it is packed.
    """
    state = git_state(package)
    if pack:
        return _packed(package, copies, None if state is None else state["commit"])
    if state is None:
        return Code(None)
    if state["dirty"]:
        raise UserError(
            f"{package} has changes that are not committed, so what runs would not be known, nor stay the same",
            allowed="a commit, or a copy",
            hint="git commit, or --pack: the run gets a copy of the files as they are",
        )
    return Code(state["commit"])


def _packed(package: Path, copies: Path, commit: str | None) -> Code:
    names = _files(package, is_checkout=commit is not None)
    digest = digest_json({name: sha256_file(package / name) for name in names})[:16]
    folder, partial = copies / digest, copies / f"{digest}.tmp"
    if not folder.is_dir():
        with writing(copies):
            shutil.rmtree(partial, ignore_errors=True)
            for name in names:
                copy = partial / package.name / name
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(package / name, copy)
            partial.rename(folder)
    return Code(f"{commit or 'installed'}+{digest[:8]}", folder)


def _files(package: Path, *, is_checkout: bool) -> list[str]:
    """Return the files of a package, of a checkout those that git does not ignore."""
    if not is_checkout:
        files = (file for file in package.rglob("*") if file.is_file() and "__pycache__" not in file.parts)
        return sorted(str(file.relative_to(package)) for file in files)
    command = ["git", "-C", str(package), "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--", "."]
    listed = subprocess.run(command, capture_output=True, check=False)
    if listed.returncode != 0:
        raise DataError(f"git lists no files of {package}: {listed.stderr.decode(errors='replace').strip()}")
    return sorted(name for name in listed.stdout.decode().split("\0") if name and (package / name).is_file())
