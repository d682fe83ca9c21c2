"""What is recorded of the code of a launched run, and the copy that ``--pack`` makes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from queued import controller, state, until_ended

from smalti.base.errors import UserError
from smalti.config.launch import LaunchConfig
from smalti.fleet.launch.code import code_of
from smalti.fleet.queue import changes
from smalti.fleet.queue.schedule import Room


def git(folder: Path, *arguments: str) -> str:
    command = ["git", "-C", str(folder), "-c", "user.name=a", "-c", "user.email=a@b", *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A package in a checkout, committed."""
    package = tmp_path / "checkout" / "tiny"
    (package / "part").mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "__main__.py").write_text("from tiny.part import word; print(word.WORD)\n")
    (package / "part" / "word.py").write_text("WORD = 'one'\n")
    (package / ".gitignore").write_text("*.log\n__pycache__\n")
    git(tmp_path / "checkout", "init", "-q")
    git(tmp_path / "checkout", "add", ".")
    git(tmp_path / "checkout", "commit", "-qm", "one")
    return package


def test_a_commit_is_recorded_and_a_change_is_refused(package: Path, tmp_path: Path) -> None:
    code = code_of(package, tmp_path / "copies", pack=False)
    assert (code.commit, code.folder) == (git(package, "rev-parse", "HEAD"), None)
    (package / "part" / "word.py").write_text("WORD = 'two'\n")
    with pytest.raises(UserError, match="has changes that are not committed") as caught:
        code_of(package, tmp_path / "copies", pack=False)
    assert "--pack" in (caught.value.hint or "")
    assert not (tmp_path / "copies").exists()


def test_an_installed_package_has_no_commit(package: Path, tmp_path: Path) -> None:
    (tmp_path / "site").mkdir()
    package = package.rename(tmp_path / "site" / "tiny")
    assert code_of(package, tmp_path / "copies", pack=False).commit is None
    assert (code_of(package, tmp_path / "copies", pack=True).commit or "").startswith("installed+")


@pytest.mark.slow
@pytest.mark.usefixtures("home")
def test_a_packed_run_executes_the_copy(package: Path, tmp_path: Path) -> None:
    """Also from a directory with the checkout, after the files have changed again."""
    (package / "part" / "word.py").write_text("WORD = 'packed'\n")
    (package / "part" / "new.py").write_text("")
    (package / "part" / "x.log").write_text("not code")
    code = code_of(package, tmp_path / "copies", pack=True)
    again = code_of(package, tmp_path / "copies", pack=True)
    assert code == again
    assert code.folder is not None
    files = {str(file.relative_to(code.folder)) for file in code.folder.rglob("*") if file.is_file()}
    assert files == {f"tiny/{name}" for name in
                     ("__init__.py", "__main__.py", ".gitignore", "part/word.py", "part/new.py")}  # fmt: skip
    (package / "part" / "word.py").write_text("WORD = 'later'\n")
    command = ["/bin/sh", "-c", f"{sys.executable} -m tiny > {tmp_path / 'word'}"]
    run = changes.add("a", command, LaunchConfig(), Room(cores=1), directory=os.fspath(package.parent), code=code)
    until_ended(controller(), run)
    assert (tmp_path / "word").read_text() == "packed\n"
    assert (state(run).code_commit or "").startswith(git(package, "rev-parse", "HEAD") + "+")
