"""One form for texts that a reader cannot tell apart, so that equal texts are equal bytes.

Promises: idempotent; never touches what stands inside a line except control characters, composition (NFC) and blanks
at its end. Does not promise to keep bytes: a text that must stay as it is needs ``normalize: false``.
"""

import re
import unicodedata

# C0 without tab and line feed, DEL, C1; and the byte-order mark, which stands for nothing inside a text. Form feeds go
# this way too (old sources use them as page breaks).
_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ufeff]")
_TRAILING_BLANKS = re.compile(r"[ \t]+$", re.MULTILINE)


def normalize(text: str) -> str:
    """Line ends to ``\\n``, no control characters, NFC, no blanks at line ends, no blank lines at both ends.

    The result ends without a line end. Indentation of the first line stays.
    """
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    text = _CONTROLS.sub("", text)
    # After the controls are gone: taking one out can bring a base and a combining mark together.
    text = unicodedata.normalize("NFC", text)
    return _TRAILING_BLANKS.sub("", text).strip("\n")
