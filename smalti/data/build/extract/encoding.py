"""Decodes the bytes of a file: by a byte-order mark, by what HTML declares, as UTF-8, or by a guess."""

import codecs
import re

from smalti.data.build.extract.unreadable import Unreadable

_MARKS = (
    (codecs.BOM_UTF8, "utf-8"),
    (codecs.BOM_UTF32_LE, "utf-32-le"),
    (codecs.BOM_UTF32_BE, "utf-32-be"),
    (codecs.BOM_UTF16_LE, "utf-16-le"),
    (codecs.BOM_UTF16_BE, "utf-16-be"),
)
_DECLARED = re.compile(rb"""<meta[^>]{0,200}charset\s*=\s*["']?\s*([A-Za-z0-9_:.-]{2,40})""", re.IGNORECASE)
_DECLARED_XML = re.compile(rb"""^\s*<\?xml[^>]{0,200}encoding\s*=\s*["']([A-Za-z0-9_:.-]{2,40})""", re.IGNORECASE)
_HEAD_BYTES = 4096
_SAMPLE_BYTES = 64 << 10
_LIKELY = (
    "cp1252", "cp1250", "cp1251", "cp1253", "cp1254", "cp1255", "cp1256", "koi8_r", "koi8_u", "iso8859_2", "iso8859_5",
    "cp932", "euc_jp", "iso2022_jp", "gb18030", "big5", "euc_kr", "cp874",
)  # fmt: skip
"""Encodings that pages and files are still in."""
_MAX_CHAOS = 0.2
_WEB_NAMES = {"iso-8859-1": "cp1252", "latin-1": "cp1252", "latin1": "cp1252", "ascii": "cp1252", "us-ascii": "cp1252"}
"""What browsers read under these names (WHATWG): pages that declare them mostly have typographic quotes."""


class UnknownEncoding(Unreadable):
    """The bytes are not text in the given encoding, or in any that is recognised."""

    def __init__(self, reason: str) -> None:
        super().__init__("extract/encoding", reason)


def decode(
    data: bytes, encoding: str = "auto", *, is_html: bool = False, declared: str | None = None
) -> tuple[str, str]:
    """Return the text of ``data`` and the name of its encoding. Raises UnknownEncoding with the reason.

    ``declared``: what a header says; without it that of a page is looked for in it.
    """
    for mark, name in _MARKS:
        if data.startswith(mark) and encoding == "auto":
            return _strict(data[len(mark) :], name), name
    if encoding != "auto":
        return _strict(data, encoding), encoding
    declared = _WEB_NAMES.get(declared, declared) if declared else _declared(data) if is_html else None
    for name in dict.fromkeys(name for name in ("utf-8", declared) if name):
        try:
            return _strict(data, name), name
        except UnknownEncoding:
            continue
    if b"\0" in data[:_SAMPLE_BYTES]:
        raise UnknownEncoding("it has null bytes: not text")
    return _guess(data)


def _strict(data: bytes, encoding: str) -> str:
    try:
        return data.decode(encoding)
    except (UnicodeDecodeError, LookupError) as error:
        raise UnknownEncoding(f"it is not {encoding}: {error}") from error


def _declared(data: bytes) -> str | None:
    head = data[:_HEAD_BYTES]
    match = _DECLARED.search(head) or _DECLARED_XML.search(head)
    if match is None:
        return None
    name = match[1].decode().lower()
    return _WEB_NAMES.get(name, name)


def _guess(data: bytes) -> tuple[str, str]:
    from charset_normalizer import from_bytes

    # A sample may end inside a character, which would exclude the right encoding: cut at a line end.
    sample = data[:_SAMPLE_BYTES]
    end = sample.rfind(b"\n") + 1
    sample = sample[:end] if end and len(data) > _SAMPLE_BYTES else sample
    matches = from_bytes(sample, cp_isolation=list(_LIKELY))
    best = matches.best()
    if best is None or best.chaos > _MAX_CHAOS:
        raise UnknownEncoding("it is text in no encoding that is recognised")
    # The code pages of Windows differ in few characters: of equally likely ones the most common is right most often.
    usual = [match for match in matches if match.encoding == "cp1252" and match.chaos <= best.chaos]
    name = usual[0].encoding if usual else best.encoding
    return _strict(data, name), name
