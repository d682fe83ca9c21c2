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
    names = ("environ", "getenv", "putenv")
    guilty = set()
    for path in FILES:
        text = path.read_text()
        tree = ast.parse(text if any(name in text for name in names) else "")
        if any(isinstance(node, ast.Attribute) and node.attr in names for node in ast.walk(tree)):
            guilty.add(name_of(path))
    outside = {name for name in guilty if not name.startswith("smalti/cli/")}
    assert outside <= ENVIRONMENT_ALLOWED


@pytest.mark.parametrize("word", ["utils", "common", "helpers", "misc", "manager"])
def test_no_file_is_named_after_nothing(word):
    assert [name_of(path) for path in FILES if word in path.stem.split("_")] == []


def test_every_module_says_what_it_is():
    texts = {path: path.read_text() for path in FILES}
    without = [name_of(path) for path, text in texts.items() if not text.startswith(('"""', 'r"""'))]
    assert without == []


def test_test_files_have_unique_names():
    names = [path.name for path in (ROOT / "tests").rglob("test_*.py")]
    assert sorted(names) == sorted(set(names))
    assert list((ROOT / "tests").rglob("__init__.py")) == []
