"""Splits a Python source into code and docstrings, which become two documents without common text.

The code that is left parses and is otherwise unchanged, comments and layout included. Docstrings are found by the
syntax tree, not by their quotes.
"""

import ast
import warnings
from dataclasses import dataclass

_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(frozen=True)
class Docstring:
    """A docstring without its indentation."""

    name: str
    """Dotted name inside the file; empty for the docstring of the module."""
    text: str


def cut_docstrings(source: str) -> tuple[str, list[Docstring]]:
    """Return ``(code without docstrings, docstrings in the order of the file)``.

    Raises SyntaxError if the source does not parse.
    """
    docstrings: list[Docstring] = []
    cuts: list[tuple[ast.Expr, bool]] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of invalid escapes in old files
        tree = ast.parse(source)
    _collect(tree, "", docstrings, cuts)
    lines = source.encode().split(b"\n")  # columns of the syntax tree are UTF-8 bytes
    for node, is_whole_body in sorted(cuts, key=lambda cut: cut[0].lineno, reverse=True):
        _cut(lines, node, is_whole_body)
    return b"\n".join(lines).decode(), docstrings


def _collect(node: ast.AST, name: str, docstrings: list[Docstring], cuts: list[tuple[ast.Expr, bool]]) -> None:
    if isinstance(node, _DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
        expression = node.body[0]
        assert isinstance(expression, ast.Expr)
        docstrings.append(Docstring(name, ast.get_docstring(node) or ""))
        cuts.append((expression, len(node.body) == 1 and not isinstance(node, ast.Module)))
    for child in ast.iter_child_nodes(node):
        child_name = getattr(child, "name", "") if isinstance(child, _DOCUMENTED) else ""
        _collect(child, f"{name}.{child_name}".strip(".") if child_name else name, docstrings, cuts)


def _cut(lines: list[bytes], node: ast.Expr, is_whole_body: bool) -> None:
    assert node.end_lineno is not None
    assert node.end_col_offset is not None
    first = node.lineno - 1
    last = node.end_lineno - 1
    before = lines[first][: node.col_offset]
    after = lines[last][node.end_col_offset :]
    if is_whole_body or before.strip() or after.strip():
        # The line has other code, or the body would be empty: a statement is needed.
        lines[first : last + 1] = [before + b"pass" + after]
    else:
        del lines[first : last + 1]
