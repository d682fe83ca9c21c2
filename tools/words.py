"""Find words that are never right in code, messages and docs; ``tools/words.txt`` lists them with replacements.

Exits with 3 when a word is found. Release notes, the log and decisions are not checked.
"""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

LIST = "tools/words.txt"
TEXTS = ("smalti/**/*.py", "tests/**/*.py", "tools/**/*.py", "bench/**/*.py", "*.md", "docs/**/*.md", "bench/*.md")
NAMES = ("smalti/", "tools/", "bench/")
"""Folders in which names of variables are checked."""
UNREAD = ("CHANGELOG.md", "docs/log.md", "docs/decisions/", "tests/repository/test_words.py", "tests/fixtures/")


class Rule(NamedTuple):
    """A word and its replacement."""

    pattern: re.Pattern[str]
    instead: str
    of_names: bool
    """True if it applies only to names of variables."""


def read_rules(path: Path) -> list[Rule]:
    """Read the rules of a list like ``tools/words.txt``."""
    rules = []
    for line in path.read_text(encoding="utf-8").splitlines():
        if line and not line.startswith("#"):
            pattern, _, instead = line.rpartition(" | ")
            of_names = pattern.startswith("name ")
            words = re.compile(rf"\b({pattern.removeprefix('name ').strip()})\b", re.IGNORECASE)
            rules.append(Rule(words, instead.strip(), of_names))
    return rules


def problems(text: str, rules: list[Rule], *, names: bool) -> list[tuple[int, str, str]]:
    """Return (line, word, replacement) of each word in a text; ``names``: it is Python, whose names are checked."""
    problems = [
        (number, match[0], rule.instead)
        for rule in rules
        if not rule.of_names
        for number, line in enumerate(text.splitlines(), 1)
        for match in rule.pattern.finditer(line)
    ]
    if names:
        for number, name in _assigned(ast.parse(text)):
            problems += [
                (number, f"{name} = ...", rule.instead)
                for rule in rules
                if rule.of_names and rule.pattern.fullmatch(name)
            ]
    return sorted(problems)


def _assigned(tree: ast.AST) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id


def check(root: Path) -> list[str]:
    """Return the problems, a sentence each."""
    rules = read_rules(root / LIST)
    failed = []
    for path in sorted({path for pattern in TEXTS for path in root.glob(pattern)}):
        name = path.relative_to(root).as_posix()
        if not name.startswith(UNREAD):
            names = path.suffix == ".py" and name.startswith(NAMES)
            found_words = problems(path.read_text(encoding="utf-8"), rules, names=names)
            failed += [f"{name}:{number}: '{word}'; write: {instead}" for number, word, instead in found_words]
    return failed


if __name__ == "__main__":
    failed = check(Path(__file__).resolve().parent.parent)
    for line in failed:
        print(f"words: {line}", file=sys.stderr)
    print(f"words: {len(failed)} problems")
    sys.exit(3 if failed else 0)
