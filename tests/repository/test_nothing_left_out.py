"""No folder is passed over because of its name: by default pytest and ruff leave out ``dist`` and ``build``."""

import fnmatch
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("smalti", "tests", "tools", "bench")


def _python_files() -> set[str]:
    found = {path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")}
    return {path.relative_to(ROOT).as_posix() for path in found if "__pycache__" not in path.parts}


def test_pytest_enters_every_folder_of_tests(pytestconfig: pytest.Config) -> None:
    folders = {Path(path).parent for path in _python_files() if Path(path).name.startswith("test_")}
    left_out = pytestconfig.getini("norecursedirs")
    assert not [str(one) for one in folders if any(fnmatch.fnmatch(part, p) for part in one.parts for p in left_out)]


def test_ruff_reads_every_file() -> None:
    command = [sys.executable, "-m", "ruff", "check", "--show-files", *FOLDERS]
    shown = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert _python_files() <= {Path(line).relative_to(ROOT).as_posix() for line in shown.splitlines()}
