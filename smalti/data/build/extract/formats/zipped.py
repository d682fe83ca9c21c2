"""The text of EPUB and DOCX: ZIP archives, whose directory is not trusted; what is read of them is counted."""

import io
import posixpath
import zipfile
from collections.abc import Callable
from urllib.parse import unquote
from xml.parsers import expat

from smalti.data.build.extract.encoding import decode
from smalti.data.build.extract.html import html_text
from smalti.data.build.extract.unreadable import Unreadable, too_large

_WORD = "http://schemas.openxmlformats.org/wordprocessingml/2006/main "
_BREAKS = {"p": "\n\n", "br": "\n", "cr": "\n", "tab": "\t", "tr": "\n", "tc": "\t", "noBreakHyphen": "-"}
_SKIPPED = frozenset(("del", "moveFrom", "instrText", "pict"))
"""Deleted text, codes of fields, and pictures; text is in ``t`` only."""
_FALLBACK = "http://schemas.openxmlformats.org/markup-compatibility/2006 Fallback"
_MAX_DEPTH = 1000


class _Archive:
    """The members of an archive; all that is read counts against ``limit_bytes``."""

    def __init__(self, data: bytes, limit_bytes: int) -> None:
        try:
            self._zip = zipfile.ZipFile(io.BytesIO(data))
        except (zipfile.BadZipFile, NotImplementedError, ValueError, OSError) as error:
            raise Unreadable("extract/file", f"it is not a complete ZIP archive: {error}") from error
        self._limit_bytes = self._left = limit_bytes

    def read(self, name: str) -> bytes:
        """Return a member. Unreadable if it is missing, damaged, encrypted or too large."""
        try:
            with self._zip.open(name) as stream:
                data = stream.read(self._left + 1)
        except KeyError as error:
            raise Unreadable("extract/file", f"it has no {name}") from error
        except Exception as error:  # zlib, lzma, a password, an unknown method
            raise Unreadable("extract/file", f"its {name} cannot be read: {error}") from error
        self._left -= len(data)
        if self._left < 0:
            raise too_large(self._limit_bytes)
        return data


def docx_text(data: bytes, limit_bytes: int) -> str:
    """Return the paragraphs of a DOCX, footnotes last; cells are separated by tabs."""
    archive = _Archive(data, limit_bytes)
    texts = [_word_text(archive.read("word/document.xml"))]
    for name in ("word/footnotes.xml", "word/endnotes.xml"):
        try:
            texts.append(_word_text(archive.read(name)))
        except Unreadable as error:
            if error.rule != "extract/file":
                raise
    return "\n\n".join(text for text in texts if text)


def _word_text(xml: bytes) -> str:
    parts: list[str] = []
    open_elements: list[str] = []
    skipped = 0

    def start(name: str, attributes: dict[str, str]) -> None:
        nonlocal skipped
        if len(open_elements) > _MAX_DEPTH:
            raise Unreadable("extract/file", f"its elements are nested more than {_MAX_DEPTH} deep")
        open_elements.append(name)
        skipped += _is_skipped(name)

    def end(name: str) -> None:
        nonlocal skipped
        open_elements.pop()
        skipped -= _is_skipped(name)
        tag = name.removeprefix(_WORD)
        if not skipped and tag in _BREAKS:
            in_cell = tag == "p" and f"{_WORD}tc" in open_elements
            parts.append(" " if in_cell else _BREAKS[tag])

    def text(value: str) -> None:
        if not skipped and open_elements and open_elements[-1] == f"{_WORD}t":
            parts.append(value)

    _parse(xml, start, end, text)
    lines = [line.strip() for line in "".join(parts).split("\n")]
    return "\n".join(line for i, line in enumerate(lines) if line or (i and lines[i - 1])).strip()


def _is_skipped(name: str) -> bool:
    return name == _FALLBACK or (name.startswith(_WORD) and name.removeprefix(_WORD) in _SKIPPED)


def epub_text(data: bytes, method: str, limit_bytes: int) -> str:
    """Return the chapters of an EPUB in reading order, each by the method of HTML pages."""
    archive = _Archive(data, limit_bytes)
    packages = _elements(archive.read("META-INF/container.xml"), "rootfile")
    if not packages or "full-path" not in packages[0]:
        raise Unreadable("extract/file", "its container names no package")
    package = packages[0]["full-path"]
    content = archive.read(package)
    files = {item.get("id"): item for item in _elements(content, "item")}
    chapters = []
    for reference in _elements(content, "itemref"):
        item = files.get(reference.get("idref"), {})
        if "html" not in item.get("media-type", "") or "nav" in item.get("properties", "").split():
            continue
        name = posixpath.normpath(posixpath.join(posixpath.dirname(package), unquote(item.get("href", ""))))
        page = archive.read(name.partition("#")[0])
        chapters.append(html_text(decode(page, is_html=True)[0], method).strip())
    if not any(chapters):
        raise Unreadable("extract/file", "it has no chapter with text")
    return "\n\n".join(chapter for chapter in chapters if chapter)


def _elements(xml: bytes, tag: str) -> list[dict[str, str]]:
    """Return the attributes of all elements with a local name, in order."""
    elements: list[dict[str, str]] = []

    def start(name: str, attributes: dict[str, str]) -> None:
        if name.rpartition(" ")[2] == tag:
            elements.append(attributes)

    _parse(xml, start, lambda name: None, lambda value: None)
    return elements


def _parse(
    xml: bytes, start: Callable[[str, dict[str, str]], None], end: Callable[[str], None], text: Callable[[str], None]
) -> None:
    """Parse XML. Documents that declare entities are refused: they may expand to any size."""
    parser = expat.ParserCreate(namespace_separator=" ")

    def refuse(*_: object) -> None:
        raise Unreadable("extract/file", "its XML declares entities")

    parser.EntityDeclHandler = refuse
    parser.StartElementHandler, parser.EndElementHandler, parser.CharacterDataHandler = start, end, text
    try:
        parser.Parse(xml, True)
    except expat.ExpatError as error:
        raise Unreadable("extract/file", f"its XML is damaged: {error}") from error
