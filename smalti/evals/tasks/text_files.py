"""Held-out text in plain files: a .txt or .md file is a document, and so is the field ``text`` of a row of a .jsonl."""

from smalti.base import store
from smalti.base.errors import DataError
from smalti.evals.rows import read_rows

_SUFFIXES = (".txt", ".md", ".jsonl")


def is_text_file(path: str) -> bool:
    """Return whether ``path`` is a text file by its name, and not a folder of token files."""
    return path.endswith(_SUFFIXES)


def read_texts(path: str) -> list[bytes]:
    """Return the documents in UTF-8. Raises DataError for other encodings, and for a row without text."""
    if not path.endswith(".jsonl"):
        text = store.read_bytes(path)
        try:
            text.decode()
        except UnicodeDecodeError as error:
            raise DataError(f"{path} is not UTF-8 text: {error}", allowed="UTF-8") from error
        return [text]
    texts = []
    for line, row in read_rows(path):
        if not isinstance(row.get("text"), str):
            raise DataError(
                f"{path}:{line}: there is no text",
                allowed=f"a row with a field 'text'; this one has {', '.join(row) or 'nothing'}",
            )
        texts.append(row["text"].encode())
    return texts
