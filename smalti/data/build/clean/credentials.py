"""Finds private keys, tokens and passwords in a text: by pattern, by a name before them, and by how random they are."""

import math
import re
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise

_BEGIN_KEY = re.compile(r"-----BEGIN (?:[A-Z0-9]{2,12} ){0,3}PRIVATE KEY(?: BLOCK)?-----")
_END_KEY = re.compile(r"-----END (?:[A-Z0-9]{2,12} ){0,3}PRIVATE KEY(?: BLOCK)?-----")
_BETWEEN = r"(?:\\[nrt]|[\s\"'|#*>,])*+"
_KEY_BODY = re.compile(
    rf"(?:{_BETWEEN}[A-Z][A-Za-z-]{{2,20}}:[^\n\\]{{0,200}})*+"  # Proc-Type: 4,ENCRYPTED
    rf"(?:{_BETWEEN}[A-Za-z0-9+/=]{{16}}[A-Za-z0-9+/=]*+)*+"
    rf"(?:{_BETWEEN}=?[A-Za-z0-9+/]{{1,15}}={{1,2}}(?![\w=]))?"  # a last line that is short
)
_MOST_KEY_CHARACTERS = 8192
"""Of a text between BEGIN and END that is not base64."""

_TOKENS = re.compile(
    r"(?<![\w-])(?:(?:AKIA|ASIA)[A-Z0-9]{16}|gh[pousr]_[A-Za-z0-9]{36,255}|github_pat_\w{22,255}|glpat-[\w-]{20,64}"
    r"|sk-(?:[a-z]{2,10}-){0,3}[\w-]{20,200}|[sr]k_live_[A-Za-z0-9]{16,99}|xox[abeoprs]-[A-Za-z0-9-]{10,250}"
    r"|AIza[\w-]{35}|hf_[A-Za-z0-9]{30,64}|npm_[A-Za-z0-9]{36}|pypi-[\w-]{50,250}|SG\.[\w-]{16,64}\.[\w-]{16,64}"
    r"|eyJ[\w-]{8,2000}\.eyJ[\w-]{8,4000}\.[\w-]{8,2000})(?![\w])"
)
_TOKEN_BEGINS = (
    "AKIA", "ASIA", "ghp_", "gho_", "ghu_", "ghs_", "ghr_", "github_pat_", "glpat-", "sk-", "k_live_", "xox", "AIza",
    "hf_", "npm_", "pypi-", "SG.", "eyJ",
)  # fmt: skip
"""Of which one is in every such token: searched for first, since most texts have none."""
_URL_CREDENTIALS = re.compile(
    r"(?<![A-Za-z0-9])[A-Za-z][A-Za-z0-9+.-]{1,20}://(?P<value>[^\s/?#\"'<>:@]{0,64}:[^\s/\"'<>]{1,256})@(?=[\w\[])"
)
_NO_PASSWORD = re.compile(
    r"(?i:password|passwd|pass|pwd|secret|token)|[xX*.]+|\$\{.*\}|\$[A-Z_]+|\$\(.*|\{+.*\}+|<.*>|%.*%|\[.*\]"
)
"""What examples write in its place."""
_NAMED = re.compile(
    r"(?:(?<![A-Za-z0-9])|(?<=[a-z0-9])(?=[A-Z]))"
    r"(?i:(?:api|access|secret|private|auth|client|encryption|signing)[ _-]?(?:key|token|secret)|token|secret|"
    r"passw(?:or)?d|bearer|authorization)(?![A-Za-z])"
    r"[\"']?\s{0,3}(?:[:=]|=>|\bis\b)?\s{0,3}(?:(?i:bearer|basic)\s{1,3})?[\"'`]?"
    r"(?P<value>[A-Za-z0-9+/_=.~!@#$%^&*-]{16,512})"
)
_ATTRIBUTE = re.compile(r"[A-Za-z_$][A-Za-z_]*\d{0,3}(?:\.[A-Za-z_]\w*)+")
"""``settings.SECRET_KEY_2``: code, not a secret."""
_UNKNOWN = re.compile(r"(?<![\w/+.%-])[A-Za-z0-9_+/-]{24,128}={0,2}(?![\w/+%]|\.\w)")
_AFTER_WHAT_IS_PUBLIC = re.compile(
    r"(?i:base64|ssh-[a-z0-9]{2,10}|ecdsa-\S{1,40}|sha\d{1,3}|fingerprint|commit|digest|checksum|integrity)\W{0,3}$"
)
_PUBLIC = re.compile(r"AAAA|_Z|sha\d{1,3}-")
"""How public keys, names of C++ functions and checksums begin."""
_NAMES = ("key", "token", "secret", "passw", "bearer", "authoriz")
_TOKEN_CHARACTERS, _NAMED_CHARACTERS, _UNKNOWN_CHARACTERS = 15, 16, 24
"""The shortest that the patterns find. They have no blanks, so a text whose words are shorter is not searched."""
_MIN_ENTROPY = 3.5
"""Bits for each character: random hexadecimal digits have 3.7 or more from 24 characters on, words less than 3.5."""
_MIN_UNKNOWN_ENTROPY = 3.9
_MIN_CHANGES = 0.35
"""Share of neighbours of different kinds (lower, upper, digit): 0.62 in random tokens, 0.3 in identifiers."""
_LINE_CHARACTERS = 60
_MAX_WORDS = 0.3
"""Share of characters in four or more small letters in a row: 0.08 in random ones, 0.5 and more in identifiers."""
_LETTERS = re.compile(r"[a-z]{4,}")
_DIGIT = re.compile(r"\d")


def find_credentials(text: str) -> Iterator[tuple[int, int]]:
    """Yield the spans of secrets; they may overlap."""
    yield from _private_keys(text)
    for match in _URL_CREDENTIALS.finditer(text) if "://" in text and "@" in text else ():
        if not _NO_PASSWORD.fullmatch(match["value"].partition(":")[2]):
            yield match.span("value")
    words = [word for word in text.split() if len(word) >= _TOKEN_CHARACTERS]
    if not words:
        return
    joined = " ".join(words)
    for match in _TOKENS.finditer(text) if any(begin in joined for begin in _TOKEN_BEGINS) else ():
        yield match.span()
    for match in _NAMED.finditer(text) if _has_named(text, words) else ():
        value = match["value"].rstrip(".")
        varied = sum(bool(re.search(kind, value)) for kind in ("[a-z]", "[A-Z]", r"\d", r"[^A-Za-z0-9]"))
        if entropy(value) < _MIN_ENTROPY or varied < 2 or not _DIGIT.search(value) or _ATTRIBUTE.fullmatch(value):
            continue
        yield match.start("value"), match.start("value") + len(value)
    for match in _unknown(text, words):
        before = text[max(0, match.start() - 200) : match.start()]
        is_public = _AFTER_WHAT_IS_PUBLIC.search(before[-60:]) or "://" in before.split(" ")[-1]
        if not is_public and not _is_line_of_data(text, match) and _is_random(match[0]):
            yield match.span()


def _has_named(text: str, words: list[str]) -> bool:
    """Whether there may be a secret after its name: a long word with a digit, and a name."""
    if not any(len(word) >= _NAMED_CHARACTERS and _DIGIT.search(word) for word in words):
        return False
    lower = text.lower()
    return any(name in lower for name in _NAMES)


def _unknown(text: str, words: list[str]) -> Iterator[re.Match[str]]:
    """Yield what may be a secret without a name, from words that are long enough."""
    end = 0
    for word in words:
        if len(word) >= _UNKNOWN_CHARACTERS:  # shorter ones before it cannot have it inside
            start = text.index(word, end)
            end = start + len(word)
            yield from _UNKNOWN.finditer(text, start, end)


def entropy(value: str) -> float:
    """Return the Shannon entropy of the characters, in bits for each."""
    n = len(value)
    return -sum(count / n * math.log2(count / n) for count in Counter(value).values())


def _private_keys(text: str) -> Iterator[tuple[int, int]]:
    """Yield private keys, also those whose end is missing: then as far as there is base64."""
    for begin in _BEGIN_KEY.finditer(text):
        body = _KEY_BODY.match(text, begin.end())
        assert body is not None
        next_key = text.find("-----BEGIN ", begin.end(), body.end() + _MOST_KEY_CHARACTERS)
        limit = body.end() + _MOST_KEY_CHARACTERS if next_key < 0 else next_key
        end = _END_KEY.search(text, body.end(), limit)
        if end is not None:
            yield begin.start(), end.end()
        elif body[0].strip():
            yield begin.start(), body.end()


def _is_line_of_data(text: str, match: re.Match[str]) -> bool:
    """Whether it is a line of a file in base64, such as a certificate or an attachment."""
    is_line = text[match.start() - 1 : match.start()] in ("", "\n") and text[match.end() : match.end() + 1] in (
        "",
        "\n",
    )
    return is_line and len(match[0]) >= _LINE_CHARACTERS


def _is_random(token: str) -> bool:
    """Whether a token without a name is a secret: letters of both cases and digits that change as dice would."""
    kinds = [0 if char.islower() else 1 if char.isupper() else 2 if char.isdigit() else 3 for char in token]
    if not {0, 1, 2} <= set(kinds) or _PUBLIC.match(token):
        return False
    kinds = [kind for kind in kinds if kind != 3]
    changes = sum(a != b for a, b in pairwise(kinds)) / (len(kinds) - 1)
    words = sum(map(len, _LETTERS.findall(token))) / len(token)
    is_mixed = changes >= _MIN_CHANGES and words <= _MAX_WORDS and kinds.count(2) >= 2
    return is_mixed and entropy(token) >= _MIN_UNKNOWN_ENTROPY
