"""The text of a Jupyter notebook: Markdown as it is, code in fences; outputs and metadata are left out."""

import json
from typing import Any

from smalti.data.build.extract.unreadable import Unreadable


def notebook_text(data: bytes) -> str:
    """Return the cells, separated by blank lines. Raises Unreadable if it is no notebook."""
    try:
        notebook = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise Unreadable("extract/file", f"it is not valid JSON: {error}") from error
    if not isinstance(notebook, dict):
        raise Unreadable("extract/file", "it is not a notebook")
    sheets = notebook.get("worksheets")  # before version 4
    holder = sheets[0] if isinstance(sheets, list) and sheets and isinstance(sheets[0], dict) else notebook
    cells = holder.get("cells")
    if not isinstance(cells, list):
        raise Unreadable("extract/file", "it is a notebook without cells")
    language = _language(notebook)
    texts = [_cell(cell, language) for cell in cells if isinstance(cell, dict)]
    return "\n\n".join(text for text in texts if text)


def _cell(cell: dict[str, Any], language: str) -> str:
    source = cell.get("source", cell.get("input", ""))
    text = "".join(part for part in source if isinstance(part, str)) if isinstance(source, list) else source
    if not isinstance(text, str) or not text.strip():
        return ""
    if cell.get("cell_type") == "code":
        fence = "````" if "```" in text else "```"
        return f"{fence}{language}\n{text.rstrip()}\n{fence}"
    level = cell.get("level")
    if cell.get("cell_type") == "heading" and isinstance(level, int):
        return f"{'#' * max(1, min(level, 6))} {text.strip()}"
    return text.strip()


def _language(notebook: dict[str, Any]) -> str:
    metadata = notebook.get("metadata")
    for holder, name in (("language_info", "name"), ("kernelspec", "language")):
        values = metadata.get(holder) if isinstance(metadata, dict) else None
        value = values.get(name) if isinstance(values, dict) else None
        if isinstance(value, str) and value.isidentifier() and len(value) <= 30:
            return value
    return "python"
