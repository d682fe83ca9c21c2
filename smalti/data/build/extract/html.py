"""The text of an HTML page, by trafilatura, resiliparse, or by removing tags, scripts and what surrounds it."""

import re
from html.parser import HTMLParser
from importlib.metadata import version
from typing import Any

from smalti.base.errors import UserError, missing_extra

_SKIPPED_TAGS = "script style noscript template svg math iframe object canvas head select button"
_FRAME_TAGS = "nav header footer aside form dialog menu"
_BLOCK_TAGS = (
    "address article blockquote body br caption center dd details div dl dt fieldset figcaption figure h1 h2 h3 h4 h5 "
    "h6 hr html li main ol p pre section summary table tbody td tfoot th thead tr ul"
)
_VOID_TAGS = "area base br col embed hr img input link meta param source track wbr"
_PARAGRAPH_TAGS = "p h1 h2 h3 h4 h5 h6 pre blockquote table ul ol dl section article"
_SKIPPED = frozenset(f"{_SKIPPED_TAGS} {_FRAME_TAGS}".split())
_BLOCKS = frozenset(_BLOCK_TAGS.split())
_VOID = frozenset(_VOID_TAGS.split())
_PARAGRAPHS = frozenset(_PARAGRAPH_TAGS.split())
_BLANKS = re.compile(r"[ \t\f\v\r\n]+")
_GAPS = re.compile(r"\n{3,}")


def html_method(method: str) -> str:
    """Resolve ``auto`` and return the method with its version. UserError if its package is not installed."""
    if method == "tags":
        return "tags"
    if method == "resiliparse":
        try:
            import resiliparse
        except ImportError as error:
            raise missing_extra("resiliparse", "html", "html: resiliparse", error) from error
        return f"resiliparse {version(resiliparse.__name__)}"
    try:
        import trafilatura
    except ImportError as error:
        if method == "auto":
            return "tags"
        raise missing_extra("trafilatura", "html", "html: trafilatura", error) from error
    return f"trafilatura {trafilatura.__version__}"


def html_text(page: str, method: str) -> str:
    """Return the text of a page, paragraphs separated by blank lines; ``method`` is that of ``html_method``.

    Where it finds no main text (short pages), tags are removed.
    """
    if method.startswith(("trafilatura", "resiliparse")):
        text = _by_trafilatura(page) if method.startswith("trafilatura") else _by_resiliparse(page)
        if text:
            return text
    elif method != "tags":
        raise UserError(f"'{method}' is no method for HTML", allowed="trafilatura, resiliparse, tags")
    return without_tags(page)


def without_tags(page: str) -> str:
    """Remove tags, comments, scripts, styles, navigation, headers, footers and forms."""
    parser = _TextParser()
    parser.feed(page)
    parser.close()
    return parser.text()


def _by_trafilatura(page: str) -> str | None:
    import logging

    import trafilatura

    logging.getLogger("trafilatura").setLevel(logging.CRITICAL)
    # Anything may be raised for a hostile page; the simple method then reads it.
    try:
        text: Any = trafilatura.extract(page, include_comments=False, include_tables=True, deduplicate=False)
    except Exception:
        return None
    return text or None


def _by_resiliparse(page: str) -> str | None:
    from resiliparse.extract.html2text import extract_plain_text

    try:
        text: Any = extract_plain_text(page, main_content=True, alt_texts=False, comments=False)
    except Exception:
        return None
    return text or None


class _TextParser(HTMLParser):
    """Collects the text outside of skipped elements. Never recursive: nesting may have any depth."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self._inside: list[str] = []
        self._parts: list[str] = []
        self._pre = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "body":
            self._inside.clear()  # a head that was never closed
        if tag in _VOID:
            self._break(tag)
        elif self._inside:
            if tag == self._inside[-1]:
                self._inside.append(tag)
        elif tag not in _SKIPPED:
            self._pre += tag == "pre"
            self._break(tag)
        else:
            self._inside.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._break(tag)

    def handle_endtag(self, tag: str) -> None:
        if self._inside:
            if tag == self._inside[-1]:
                self._inside.pop()
            elif tag in ("body", "html"):
                self._inside.clear()  # an element that was never closed
            return
        self._pre -= tag == "pre" and self._pre > 0
        self._break(tag)

    def handle_data(self, data: str) -> None:
        if not self._inside:
            self._parts.append(data if self._pre else _BLANKS.sub(" ", data))

    def text(self) -> str:
        """Return the text."""
        lines = (line.rstrip() if line[:1] in " \t" and line.strip() else line.strip()
                 for line in "".join(self._parts).split("\n"))  # fmt: skip
        return _GAPS.sub("\n\n", "\n".join(line if line.startswith("    ") else line.strip() for line in lines)).strip()

    def _break(self, tag: str) -> None:
        if self._inside:
            return
        if tag in _PARAGRAPHS:
            self._parts.append("\n\n")
        elif tag in _BLOCKS:
            self._parts.append("\n")
