"""Finds personal data and secrets in a text, by patterns, check digits and entropy, and replaces them.

Names and addresses of people are not searched: they need a model. Every pattern has bounded repetitions, so that the
time is linear in the text.
"""

import ipaddress
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator
from typing import NamedTuple


class Span(NamedTuple):
    """Characters [start, end) of a text that are personal data of this kind."""

    start: int
    end: int
    kind: str


PLACEHOLDERS = {
    "secret": "[SECRET]",
    "email": "[EMAIL]",
    "iban": "[IBAN]",
    "card": "[CARD]",
    "ip": "[IP]",
    "phone": "[PHONE]",
}
"""Kind -> what replaces it; where two overlap, the kind that is first here is taken."""

_EMAIL = re.compile(
    r"(?<![\w.+%-])[\w.+%-]{1,64}@(?:[\w-]{1,63}\.){1,8}[^\W\d_]{2,24}(?![\w-])"
    r"|(?<![\w.+%-])[\w.+%-]{1,64} ?[\[(](?:at|AT)[\])] ?"
    r"(?:[\w-]{1,63}(?:\.| ?[\[(](?:dot|DOT)[\])] ?)){1,8}[^\W\d_]{2,24}"
)
_IBAN = re.compile(r"(?<![A-Za-z0-9])[A-Z]{2}\d{2}(?:[ -]?[A-Z0-9]{4}){2,7}(?:[ -]?[A-Z0-9]{1,4})?(?![A-Za-z0-9])")
_CARD = re.compile(r"(?<![\w.-])\d(?:[ -]?\d){12,18}(?![\w-]|\.\d)")
_IPV4 = re.compile(r"(?<![\w.])(?:\d{1,3}\.){3}\d{1,3}(?![\w]|\.\d)")
_IPV6 = re.compile(r"(?<![\w:.])(?:[0-9A-Fa-f]{0,4}:){2,7}[0-9A-Fa-f]{0,4}(?![\w:])")
_VERSION = re.compile(r"(?:version|release|v\.?)\s*$", re.IGNORECASE)
_PHONES = re.compile(
    r"(?<![\w+.,)-])(?<!\d )(?:"
    r"(?:\+|00)[1-9]\d{0,2}(?:[ .()/-]{0,2}\d){6,13}"  # international
    r"|(?:1[-. ])?(?:\(\d{3}\) ?|\d{3}[-.])\d{3}[-. ]\d{4}"  # North America
    r"|\(0\d{1,4}\) ?\d{2,4}[ -]?\d{2,5}(?:[ -]?\d{2,4})?"
    r"|0\d(?:[ .]\d{2}){4}"  # France
    r"|0\d{2,4}[ /-]\d{5,9}"  # Germany
    r"|0\d{2,4}[ -]\d{3,4}[ -]\d{3,4}"  # United Kingdom, Japan
    r"|0\d{1}-\d{4}-\d{4}"
    r"|8[ -]?\(\d{3}\)[ -]?\d{3}[ -]?\d{2}[ -]?\d{2}"  # Russia
    r")(?![\w]|[. -]\d)"
)
_CUED_PHONE = re.compile(
    r"(?i:\b(?:tel|telephone|phone|fax|mobile|cell|call(?: us| me)?(?: at| on)?|telefon|teléfono|téléphone|tél|móvil|"
    r"handy|тел|телефон|電話)(?:番号)?)\W{0,4}(?P<number>\+?\(?\d(?:[ .()/-]{0,2}\d){5,14})(?!\w)"
)
_KEYS = re.compile(
    r"-----BEGIN (?:[A-Z]{2,12} ){0,3}PRIVATE KEY-----.{0,8192}?(?:-----END (?:[A-Z]{2,12} ){0,3}PRIVATE KEY-----|\Z)"
    r"|(?<![\w-])(?:(?:AKIA|ASIA)[A-Z0-9]{16}|gh[pousr]_[A-Za-z0-9]{36,255}|github_pat_\w{22,255}|glpat-[\w-]{20,64}"
    r"|sk-(?:[a-z]{2,10}-){0,3}[\w-]{20,200}|[sr]k_live_[A-Za-z0-9]{16,99}|xox[abeoprs]-[A-Za-z0-9-]{10,250}"
    r"|AIza[\w-]{35}|hf_[A-Za-z0-9]{30,64}|npm_[A-Za-z0-9]{36}|pypi-[\w-]{50,250}|SG\.[\w-]{16,64}\.[\w-]{16,64}"
    r"|eyJ[\w-]{8,2000}\.eyJ[\w-]{8,4000}\.[\w-]{8,2000})(?![\w])",
    re.DOTALL,
)
_NAMED_KEY = re.compile(
    r"(?i:(?:api|access|secret|private|auth|client|encryption|signing)[ _-]?(?:key|token|secret)|token|secret|"
    r"passw(?:or)?d|bearer|authorization)[\"']?\s{0,3}(?:[:=]|=>|\bis\b)?\s{0,3}(?:(?i:bearer|basic)\s{1,3})?[\"'`]?"
    r"(?P<value>[A-Za-z0-9+/_=.~!@#$%^&*-]{16,512})"
)
_MIN_ENTROPY = 3.5
"""Bits for each character: random hexadecimal digits have 3.7 or more from 24 characters on, words less than 3.5."""

_IBAN_LENGTHS = {
    "AD": 24, "AE": 23, "AT": 20, "BE": 16, "BG": 22, "CH": 21, "CY": 28, "CZ": 24, "DE": 22, "DK": 18, "EE": 20,
    "ES": 24, "FI": 18, "FR": 27, "GB": 22, "GR": 27, "HR": 21, "HU": 28, "IE": 22, "IL": 23, "IS": 26, "IT": 27,
    "LI": 21, "LT": 20, "LU": 20, "LV": 21, "MC": 27, "MT": 31, "NL": 18, "NO": 15, "PL": 28, "PT": 25, "RO": 24,
    "RS": 22, "SA": 24, "SE": 24, "SI": 19, "SK": 24, "SM": 27, "TR": 26, "UA": 29,
}  # fmt: skip


def find(text: str) -> list[Span]:
    """Return the personal data in ``text``, in order and without overlaps."""
    taken: list[Span] = []
    for kind in PLACEHOLDERS:
        for start, end in _FINDERS[kind](text):
            if not any(start < other.end and other.start < end for other in taken):
                taken.append(Span(start, end, kind))
    return sorted(taken)


def replace(text: str, spans: list[Span]) -> str:
    """Replace each span by the placeholder of its kind."""
    parts: list[str] = []
    at = 0
    for span in spans:
        parts += [text[at : span.start], PLACEHOLDERS[span.kind]]
        at = span.end
    return "".join([*parts, text[at:]])


def _emails(text: str) -> Iterator[tuple[int, int]]:
    return (match.span() for match in _EMAIL.finditer(text)) if "@" in text or "at" in text.lower() else iter(())


def _ibans(text: str) -> Iterator[tuple[int, int]]:
    for match in _IBAN.finditer(text):
        compact = re.sub("[ -]", "", match[0])
        length = _IBAN_LENGTHS.get(compact[:2])
        if length is None or len(compact) < length or not is_iban(compact[:length]):
            continue
        yield match.start(), _end_of(match[0], length) + match.start()


def _cards(text: str) -> Iterator[tuple[int, int]]:
    for match in _CARD.finditer(text):
        digits = re.sub(r"\D", "", match[0])
        is_issued = digits[0] in "3456" or 2221 <= int(digits[:4]) <= 2720
        if is_issued and is_luhn(digits) and len(set(digits)) > 1:
            yield match.span()


def _ips(text: str) -> Iterator[tuple[int, int]]:
    for match in _IPV4.finditer(text):
        if _is_address(match[0]) and not _VERSION.search(text[max(0, match.start() - 12) : match.start()]):
            yield match.span()
    for match in _IPV6.finditer(text):
        # A clock and a C++ scope (std::a) are valid too: an address has more than one group with a digit.
        groups = [group for group in match[0].split(":") if group]
        if len(groups) > 2 and any(map(str.isdigit, "".join(groups))) and _is_address(match[0]):
            yield match.span()


def _is_address(text: str) -> bool:
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return False
    return not (address.is_loopback or address.is_unspecified or text.startswith("255.") or text.startswith("0."))


def _phones(text: str) -> Iterator[tuple[int, int]]:
    for match in _PHONES.finditer(text):
        if 7 <= sum(map(str.isdigit, match[0])) <= 15:
            yield match.span()
    for match in _CUED_PHONE.finditer(text):
        yield match.span("number")


def _secrets(text: str) -> Iterator[tuple[int, int]]:
    for match in _KEYS.finditer(text):
        yield match.span()
    for match in _NAMED_KEY.finditer(text):
        value = match["value"].rstrip(".")
        varied = sum(bool(re.search(kind, value)) for kind in ("[a-z]", "[A-Z]", r"\d", r"[^A-Za-z0-9]"))
        if entropy(value) >= _MIN_ENTROPY and varied >= 2 and re.search(r"\d", value):
            yield match.start("value"), match.start("value") + len(value)


_FINDERS: dict[str, Callable[[str], Iterator[tuple[int, int]]]] = {
    "secret": _secrets,
    "email": _emails,
    "iban": _ibans,
    "card": _cards,
    "ip": _ips,
    "phone": _phones,
}


def is_luhn(digits: str) -> bool:
    """Whether the last digit is the check digit of the others (ISO/IEC 7812-1)."""
    total = 0
    for place, digit in enumerate(reversed(digits)):
        value = int(digit) * (1 + place % 2)
        total += value - 9 if value > 9 else value
    return total % 10 == 0


def is_iban(compact: str) -> bool:
    """Whether the check digits are right (ISO 13616: modulo 97)."""
    return int("".join(str(int(character, 36)) for character in compact[4:] + compact[:4])) % 97 == 1


def entropy(value: str) -> float:
    """Return the Shannon entropy of the characters, in bits for each."""
    n = len(value)
    return -sum(count / n * math.log2(count / n) for count in Counter(value).values())


def _end_of(text: str, n: int) -> int:
    """Return the end of the first ``n`` characters that are not separators."""
    places = [place for place, character in enumerate(text) if character not in " -"]
    return places[n - 1] + 1
