"""Cuts a long document into parts, so that memory is bounded by a part and not by a document.

The rule: a document of more than ``most`` bytes of UTF-8 is cut at the last blank line in the second half of its next
``most`` bytes; without one at the last line end there, else at the last blank, else between two characters. Promises:
the parts joined are the document; none is longer than ``most`` bytes.
"""

import io
from collections.abc import Iterator
from typing import IO

_CUTS = (b"\n\n", b"\r\n\r\n", b"\n", b" ", b"\t")


def parts_of_stream(stream: IO[bytes], most: int) -> Iterator[bytes]:
    """The parts, each of at most ``most`` bytes; one where all that the stream holds is no longer."""
    rest = b""
    while True:
        window = rest + stream.read(most + 1 - len(rest))
        if len(window) <= most:
            break
        end = _end(window, most)
        yield window[:end]
        rest = window[end:]
    yield window


def parts_of_text(text: str, most: int) -> Iterator[str]:
    """The parts of a text in memory."""
    if 4 * len(text) <= most:  # no character has more than four bytes
        yield text
        return
    for part in parts_of_stream(io.BytesIO(text.encode()), most):
        yield part.decode()


def _end(window: bytes, most: int) -> int:
    """Where the part ends that ``window`` (longer than ``most``) begins with."""
    for cut in _CUTS:
        at = window.rfind(cut, most // 2, most)
        if at >= 0:
            return at + len(cut)
    for end in range(most, max(most - 4, 0), -1):
        if window[end] & 0xC0 != 0x80:  # the first byte of a character
            return end
    return most
