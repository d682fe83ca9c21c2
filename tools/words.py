"""Find words that are never right in code, messages and docs; ``tools/words.txt`` lists them with replacements.

``tools/words_allowed.txt`` lists files that still have some. The list can only shrink: a file that is clean or gone
must be removed from it. Release notes, the log and decisions are not checked.

    python tools/words.py            check the repository; exit 3 when a word is found
    python tools/words.py --shrink   remove clean files from the list
"""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

LIST, ALLOWED = "tools/words.txt", "tools/words_allowed.txt"
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
    allowed = [line for line in _lines(root / ALLOWED) if not line.startswith("#")]
    failed, with_words = [], set()
    for path in sorted({path for pattern in TEXTS for path in root.glob(pattern)}):
        name = path.relative_to(root).as_posix()
        if name.startswith(UNREAD):
            continue
        lines = problems(path.read_text(encoding="utf-8"), rules, names=path.suffix == ".py" and name.startswith(NAMES))
        if lines:
            with_words.add(name)
        if name not in allowed:
            failed += [f"{name}:{number}: '{word}'; write: {instead}" for number, word, instead in lines]
    idle = [name for name in allowed if name not in with_words]
    return failed + [f"{ALLOWED} lists {name}, which is clean or gone; take it out" for name in idle]


def shrink(root: Path) -> None:
    """Remove files that are clean or gone from the list of allowed files."""
    idle = {line.split()[2].rstrip(",") for line in check(root) if line.startswith(f"{ALLOWED} lists ")}
    remaining = [line for line in _lines(root / ALLOWED) if line not in idle]
    (root / ALLOWED).write_text("".join(f"{line}\n" for line in remaining), encoding="utf-8")


def _lines(path: Path) -> list[str]:
    return [line for line in path.read_text(encoding="utf-8").splitlines() if line] if path.exists() else []


def main(arguments: list[str]) -> int:
    """Check the repository of this file; return the exit code."""
    root = Path(__file__).resolve().parent.parent
    if arguments not in ([], ["--shrink"]):
        print(f"words.py takes nothing or --shrink, not {' '.join(arguments)}", file=sys.stderr)
        return 2
    if arguments:
        shrink(root)
    failed = check(root)
    for line in failed:
        print(f"words: {line}", file=sys.stderr)
    print(f"words: {len(failed)} problems")
    return 3 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
