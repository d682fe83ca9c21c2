"""Takes the docstrings out of a Python source, so that code and prose become two texts with nothing in common.

Promises: what is left parses again and is otherwise the source, comments and layout included. Docstrings are found by
the syntax tree, not by their quotes.
"""

import ast
import warnings
from dataclasses import dataclass

_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(frozen=True)
class Docstring:
    """One docstring, cleaned of its indentation."""

    name: str
    """Dotted name inside the file; empty for the module's own."""
    text: str


def cut_docstrings(source: str) -> tuple[str, list[Docstring]]:
    """``(code without docstrings, docstrings in the order of the file)``; SyntaxError if the source does not parse."""
    found: list[Docstring] = []
    cuts: list[tuple[ast.Expr, bool]] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # invalid escapes in old files are none of our business
        tree = ast.parse(source)
    _collect(tree, "", found, cuts)
    lines = source.encode().split(b"\n")  # columns of the syntax tree are UTF-8 bytes
    for node, is_whole_body in sorted(cuts, key=lambda cut: cut[0].lineno, reverse=True):
        _cut(lines, node, is_whole_body)
    return b"\n".join(lines).decode(), found


def _collect(node: ast.AST, name: str, found: list[Docstring], cuts: list[tuple[ast.Expr, bool]]) -> None:
    if isinstance(node, _DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
        expression = node.body[0]
        assert isinstance(expression, ast.Expr)
        found.append(Docstring(name, ast.get_docstring(node) or ""))
        cuts.append((expression, len(node.body) == 1 and not isinstance(node, ast.Module)))
    for child in ast.iter_child_nodes(node):
        own = getattr(child, "name", "") if isinstance(child, _DOCUMENTED) else ""
        _collect(child, f"{name}.{own}".strip(".") if own else name, found, cuts)


def _cut(lines: list[bytes], node: ast.Expr, is_whole_body: bool) -> None:
    assert node.end_lineno is not None
    assert node.end_col_offset is not None
    first, last = node.lineno - 1, node.end_lineno - 1
    before, after = lines[first][: node.col_offset], lines[last][node.end_col_offset :]
    if is_whole_body or before.strip() or after.strip():
        # Something shares the line, or the body would be empty: a statement has to stand there.
        lines[first : last + 1] = [before + b"pass" + after]
    else:
        del lines[first : last + 1]
