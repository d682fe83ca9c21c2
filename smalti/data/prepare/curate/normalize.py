"""Normalises texts, so that texts that look equal are equal bytes.

Idempotent. Inside a line only control characters, composition (NFC) and trailing blanks are changed. A text that must
keep its bytes needs ``normalize: false``.
"""

import re
import unicodedata

# C0 without tab and line feed, DEL, C1, and the byte-order mark; also form feeds, the page breaks of old sources.
_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ufeff]")
_TRAILING_BLANKS = re.compile(r"[ \t]+$", re.MULTILINE)


def normalize(text: str) -> str:
    """Use ``\\n`` and NFC; remove control characters, trailing blanks, and line ends at both ends of the text.

    The indentation of the first line is kept.
    """
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    text = _CONTROLS.sub("", text)
    # After the control characters: removing one can bring a base and a combining mark together.
    text = unicodedata.normalize("NFC", text)
    if " \n" in text or "\t\n" in text or text.endswith((" ", "\t")):
        text = _TRAILING_BLANKS.sub("", text)
    return text.strip("\n")
