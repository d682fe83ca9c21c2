"""Writes the sources of the installed Python as documents: ``code`` and ``prose``.

Equal files give equal bytes; the corpus depends on the Python version. A file and its docstrings share a ``group``, so
that they are in the same split. Without ``everything``, tests (17 MB of 31) and packages that some distributions lack
(idlelib, tkinter, turtledemo, lib2to3, distutils, ensurepip, venv) are left out, so that corpora of different builds
are comparable. ``site-packages``, which have other licences, are never read.
"""

import ast
import json
import os
import platform
import sysconfig
import tokenize
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from smalti.base import store
from smalti.base.errors import DataError
from smalti.base.progress import Progress, no_progress
from smalti.data.documents.docstrings import Docstring, cut_docstrings

_NEVER = frozenset({"site-packages", "dist-packages", "__pycache__", "lib-dynload"})
_LEFT_OUT = frozenset(
    {"test", "tests", "idle_test", "idlelib", "tkinter", "turtledemo", "lib2to3", "distutils", "ensurepip", "venv"}
)
_TOPICS = "pydoc_data/topics.py"
_GENERATED = "_sysconfigdata"
"""Build settings, which are generated and differ between machines."""

CODE = "code"
PROSE = "prose"


@dataclass
class DocumentCounts:
    """Number and bytes of the documents that were written, by source."""

    documents: dict[str, int] = field(default_factory=lambda: {CODE: 0, PROSE: 0})
    n_bytes: dict[str, int] = field(default_factory=lambda: {CODE: 0, PROSE: 0})
    skipped: list[str] = field(default_factory=list)
    """Files that are not valid Python in this version, with the reason."""


def write_documents(
    output: str, *, stdlib: str | None = None, everything: bool = False, progress: Progress = no_progress
) -> DocumentCounts:
    """Write ``code.jsonl`` and ``prose.jsonl`` into ``output``.

    Each line has ``id``, ``text``, ``group`` (the path of the file inside the library) and ``license``. ``stdlib`` is
    the folder of another library than this Python's; ``progress`` counts bytes of source files.

    Raises DataError if the folder has no Python source.
    """
    root = Path(stdlib or sysconfig.get_paths()["stdlib"])
    license_note = f"PSF-2.0 (standard library of {platform.python_implementation()} {platform.python_version()})"
    counts = DocumentCounts()
    with ExitStack() as stack:
        files = {
            source: stack.enter_context(store.open_write(store.join(output, f"{source}.jsonl")))
            for source in (CODE, PROSE)
        }
        for source, record in _records(root, everything, counts, progress):
            _write(files[source], record | {"license": license_note})
            counts.documents[source] += 1
            counts.n_bytes[source] += len(record["text"].encode())
        if not any(counts.documents.values()):
            raise DataError(f"{root} holds no Python source", hint="name a folder that holds a standard library")
    return counts


def _write(file: IO[bytes], record: dict[str, Any]) -> None:
    file.write(json.dumps(record, ensure_ascii=False).encode() + b"\n")


def _records(
    root: Path, everything: bool, counts: DocumentCounts, progress: Progress
) -> Iterator[tuple[str, dict[str, Any]]]:
    paths = list(_source_files(root, everything))
    total = sum(path.stat().st_size for path in paths)
    done = 0
    for path in paths:
        done += path.stat().st_size
        progress("reading the library", done, total)
        name = path.relative_to(root).as_posix()
        try:
            with tokenize.open(path) as file:
                source = file.read()
            code, docstrings = cut_docstrings(source)
            topics = _topics(source) if name == _TOPICS else {}
        except (SyntaxError, UnicodeDecodeError, ValueError) as error:
            counts.skipped.append(f"{name}: {error}")
            continue
        if topics:
            # All topics share a group: they quote whole passages from one another.
            for topic in sorted(topics):
                yield PROSE, {"id": f"{name}#{topic}", "text": topics[topic].strip("\n"), "group": name}
            continue
        if code.strip():
            yield CODE, {"id": name, "text": code.strip("\n"), "group": name}
        if docstrings:
            yield PROSE, {"id": f"{name}#docstrings", "text": _join(docstrings), "group": name}


def _source_files(root: Path, everything: bool) -> Iterator[Path]:
    left_out = _NEVER if everything else _NEVER | _LEFT_OUT
    for folder, folders, files in os.walk(root):
        folders[:] = sorted(name for name in folders if name not in left_out and not name.startswith("config-"))
        for name in sorted(files):
            if name.endswith(".py") and not name.startswith(_GENERATED):
                yield Path(folder, name)


def _topics(source: str) -> dict[str, str]:
    """Return the dictionary of the help topics, read from the syntax tree without executing it."""
    for node in ast.parse(source).body:
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == "topics" for t in node.targets):
            return dict(ast.literal_eval(node.value))
    return {}


def _join(docstrings: list[Docstring]) -> str:
    """Join the docstrings of a file into one document, each below its name."""
    return "\n\n".join(f"{doc.name}\n\n{doc.text}" if doc.name else doc.text for doc in docstrings if doc.text.strip())
