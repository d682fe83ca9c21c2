"""Removes the remains of web pages from texts: tags, scripts, and lines of boilerplate.

Markdown keeps its fenced code blocks as they are. Source code must not be cleaned (``files.is_code``).
"""

import html
import re

from smalti.data.build.extract.html import without_tags

_PAGE = re.compile(r"<(?:!doctype\s+html|html|body|head)\b", re.IGNORECASE)
_TAG = re.compile(
    r"</?(?:a|abbr|article|aside|b|blockquote|br|button|center|code|dd|details|div|dl|dt|em|figure|font|footer|form|"
    r"h[1-6]|header|hr|i|iframe|img|input|label|li|link|main|meta|nav|noscript|ol|option|p|pre|script|section|select|"
    r"small|span|strong|style|sub|summary|sup|svg|table|tbody|td|textarea|tfoot|th|thead|title|tr|u|ul|video)"
    r"(?:\s[^<>]{0,2000})?/?>",
    re.IGNORECASE,
)
_PROGRAM = re.compile(
    r"<(script|style|noscript)\b[^>]{0,2000}>.*?(?:</\1\s*>|\Z)|<!--.*?-->", re.IGNORECASE | re.DOTALL
)
_FENCE = re.compile(r"^(```|~~~).*?^\1\s*$", re.MULTILINE | re.DOTALL)
_ENTITY = re.compile(r"&(?:[a-zA-Z]{2,8}|#\d{1,7}|#x[0-9a-fA-F]{1,6});")
_GAPS = re.compile(r"\n{3,}")

_LINE_CHARACTERS = 250
"""Longer lines are prose that may mention anything."""
_BOILERPLATE = re.compile(
    r"(?:enable|turn on|requires?|without|disabled?|support)\W+(?:\w+\W+){0,3}javascript|javascript\W+(?:\w+\W+){0,3}"
    r"(?:disabled|required|enabled)|(?:we|site) use[s]? cookies|cookie (?:policy|settings|preferences|consent)|"
    r"accept (?:all )?cookies|privacy policy|terms (?:of (?:use|service)|and conditions)|all rights reserved|"
    r"^\s*(?:skip to (?:main )?content|share (?:this|on)\b.*|follow us\b.*|"
    r"subscribe to our newsletter.*|sign in|log in|read more(?:\.\.\.|…)?|back to top|"
    r"items? in cart.*|add to cart|advertisement)\s*$",
    re.IGNORECASE,
)
_CUES = (
    "javascript", "cookie", "privacy policy", "terms ", "all rights reserved", "skip to", "share ", "follow us",
    "subscribe to", "sign in", "log in", "read more", "back to top", "in cart", "add to cart", "advertisement",
)  # fmt: skip
"""Of which one is in every line of boilerplate: most texts have none."""
_CODE_LINE = re.compile(
    r"^\s*(?:(?:var|let|const)\s+[\w$.]+\s*=.*;|(?:window|document|\$)[.(\[].*;|\}?\s*function\s*\w*\s*\([^)]*\)\s*\{.*|"
    r"gtag\(.*|[.#][\w-]++(?:[\s,>.#]++[\w-]++)*+\s*+\{[^}]*\}?|[\w-]{2,30}\s*:\s*[^;{}]{1,80};)\s*$"
)
_MIN_CODE_LINES = 2


def clean_text(text: str) -> str:
    """Return ``text`` without markup and lines of boilerplate; text without them is returned unchanged."""
    text = _without_markup(text)
    return _without_boilerplate(text)


def _without_markup(text: str) -> str:
    if "<" not in text:
        return text
    if _PAGE.search(text):
        return without_tags(text)
    pieces: list[str] = []
    start = 0
    for fence in _FENCE.finditer(text):
        pieces += [_without_tags(text[start : fence.start()]), fence[0]]
        start = fence.end()
    return "".join([*pieces, _without_tags(text[start:])])


def _without_tags(text: str) -> str:
    markup = _PROGRAM.search(text) or _TAG.search(text)
    if markup is None:
        return text
    text = _PROGRAM.sub(" ", text)
    # Block elements end lines; Markdown keeps its own lines, so this is no parse of a page.
    text = re.sub(r"</?(?:p|div|br|li|tr|h[1-6]|ul|ol|table|section|article)\b[^<>]{0,2000}>", "\n", text, flags=re.I)
    text = _TAG.sub("", text)
    return _GAPS.sub("\n\n", html.unescape(text) if _ENTITY.search(text) else text)


def _without_boilerplate(text: str) -> str:
    lower = text.lower()
    cues = [cue for cue in _CUES if cue in lower]
    if not (cues or ";" in text or "{" in text or "gtag(" in text):
        return text
    lines = text.split("\n")
    is_code = [
        len(line) < _LINE_CHARACTERS
        and (";" in line or "{" in line or "gtag(" in line)
        and _CODE_LINE.match(line) is not None
        for line in lines
    ]
    drops_code = sum(is_code) >= _MIN_CODE_LINES and not _FENCE.search(text) and sum(is_code) * 4 < len(lines) * 3
    kept = [
        line
        for line, code, small in zip(lines, is_code, lower.split("\n"), strict=True)
        if not (code and drops_code)
        and not (
            len(line) < _LINE_CHARACTERS and any(cue in small for cue in cues) and _BOILERPLATE.search(line) is not None
        )
    ]
    return text if len(kept) == len(lines) else _GAPS.sub("\n\n", "\n".join(kept)).strip("\n")
