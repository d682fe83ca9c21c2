"""Cuts a long document into parts, so that memory is bounded by the size of a part.

A document of more than ``limit_bytes`` of UTF-8 is cut at the last blank line in the second half of its next
``limit_bytes``; if there is none at the last line end there, else at the last blank, else between two characters. The
joined parts are the document, and no part is longer than ``limit_bytes``.
"""

import io
from collections.abc import Iterator
from typing import IO

_CUTS = (b"\n\n", b"\r\n\r\n", b"\n", b" ", b"\t")


def parts_of_stream(stream: IO[bytes], limit_bytes: int) -> Iterator[bytes]:
    """Yield the parts of a stream: one part if it is short enough."""
    rest = b""
    while True:
        window = rest + stream.read(limit_bytes + 1 - len(rest))
        if len(window) <= limit_bytes:
            break
        end = _end(window, limit_bytes)
        yield window[:end]
        rest = window[end:]
    yield window


def parts_of_text(text: str, limit_bytes: int) -> Iterator[str]:
    """Yield the parts of a text in memory."""
    if 4 * len(text) <= limit_bytes:  # no character has more than four bytes
        yield text
        return
    for part in parts_of_stream(io.BytesIO(text.encode()), limit_bytes):
        yield part.decode()


def _end(window: bytes, limit_bytes: int) -> int:
    """Return the end of the first part of ``window``, which is longer than ``limit_bytes``."""
    for cut in _CUTS:
        place = window.rfind(cut, limit_bytes // 2, limit_bytes)
        if place >= 0:
            return place + len(cut)
    for end in range(limit_bytes, max(limit_bytes - 4, 0), -1):
        if window[end] & 0xC0 != 0x80:  # the first byte of a character
            return end
    return limit_bytes
