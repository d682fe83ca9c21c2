"""Rules that no linter knows: the environment is read in two places, names say what is in a file."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted((ROOT / "smalti").rglob("*.py"))

ENVIRONMENT_ALLOWED = {"smalti/base/env.py"}


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def test_environment_is_read_and_set_in_cli_and_base_env_only():
    guilty = set()
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv", "putenv"):
                guilty.add(name_of(path))
    outside = {name for name in guilty if not name.startswith("smalti/cli/")}
    assert outside <= ENVIRONMENT_ALLOWED


@pytest.mark.parametrize("word", ["utils", "common", "helpers", "misc", "manager"])
def test_no_file_is_named_after_nothing(word):
    assert [name_of(path) for path in FILES if word in path.stem.split("_")] == []


def test_every_module_says_what_it_is():
    without = [name_of(path) for path in FILES if ast.get_docstring(ast.parse(path.read_text())) is None]
    assert without == []


def test_test_files_have_unique_names():
    names = [path.name for path in (ROOT / "tests").rglob("test_*.py")]
    assert sorted(names) == sorted(set(names))
    assert list((ROOT / "tests").rglob("__init__.py")) == []
