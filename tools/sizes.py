"""Limit the sizes of files and functions: a file over 600 lines fails, over 400 warns; a function over 60 lines fails.

``tools/sizes_allowed.txt`` may list exceptions as ``path[::function] lines``. The list can only shrink: an entry whose
subject is smaller now must be lowered, one that fits the limits must be removed, and a larger subject fails.

    python tools/sizes.py            check the repository; exit 3 when something is too large
"""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

FILE_LINES = 600
FILE_WARN_LINES = 400
FUNCTION_LINES = 60
FOLDERS = ("smalti", "tests", "tools", "bench")
ALLOWED = "tools/sizes_allowed.txt"


def sizes(root: Path) -> dict[str, int]:
    """Return the lines of every Python file (``path``) and function (``path::qualified.name``) that is checked."""
    lines_of: dict[str, int] = {}
    for folder in FOLDERS:
        for path in sorted((root / folder).rglob("*.py")):
            name = path.relative_to(root).as_posix()
            text = path.read_text(encoding="utf-8")
            lines_of[name] = len(text.splitlines())
            for function, lines in _functions(ast.parse(text, filename=name), ""):
                lines_of[f"{name}::{function}"] = lines
    return lines_of


def _functions(node: ast.AST, prefix: str) -> Iterator[tuple[str, int]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield prefix + child.name, (child.end_lineno or child.lineno) - child.lineno + 1
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield from _functions(child, f"{prefix}{child.name}.")
        else:
            yield from _functions(child, prefix)


def limit(name: str) -> int:
    """Return the most lines that ``name`` may have without an exception."""
    return FUNCTION_LINES if "::" in name else FILE_LINES


def read_allowed(path: Path) -> dict[str, int]:
    """Read the exceptions; an absent file allows none."""
    if not path.exists():
        return {}
    lines = [line.partition("#")[0].split() for line in path.read_text().splitlines()]
    return {parts[0]: int(parts[1]) for parts in lines if parts}


def problems(lines_of: dict[str, int], allowed: dict[str, int]) -> list[str]:
    """Return the problems, a sentence each."""
    failed = []
    for name, lines in lines_of.items():
        maximum = allowed.get(name, limit(name))
        if lines > maximum:
            failed.append(f"{name} has {lines} lines; at most {maximum}")
    for name, granted in allowed.items():
        if name not in lines_of:
            failed.append(f"{ALLOWED} lists {name}, which does not exist; take it out")
        elif lines_of[name] <= limit(name):
            failed.append(f"{ALLOWED} lists {name}, which fits the limit of {limit(name)} lines; take it out")
        elif lines_of[name] < granted:
            failed.append(f"{ALLOWED} grants {name} {granted} lines, it has {lines_of[name]}; lower the entry")
    return failed


def main() -> int:
    """Check the repository of this file."""
    root = Path(__file__).resolve().parent.parent
    lines_of = sizes(root)
    for name, lines in lines_of.items():
        if "::" not in name and FILE_WARN_LINES < lines <= FILE_LINES:
            print(f"warning: {name} has {lines} lines; over {FILE_WARN_LINES} wants a reason", file=sys.stderr)
    failed = problems(lines_of, read_allowed(root / ALLOWED))
    for line in failed:
        print(f"too large: {line}", file=sys.stderr)
    files = [name for name in lines_of if "::" not in name]
    print(f"sizes: {len(files)} files, {len(lines_of) - len(files)} functions, {len(failed)} too large")
    return 3 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
