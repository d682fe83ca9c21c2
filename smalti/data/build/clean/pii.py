"""Finds personal data and secrets in a text, by patterns, check digits and entropy, and replaces them.

Names and addresses of people are not searched: they need a model. Every pattern has bounded or possessive repetitions,
so that the time is linear in the text.
"""

import ipaddress
import re
from bisect import bisect_left
from collections.abc import Callable, Iterator
from typing import NamedTuple

from smalti.data.build.clean.credentials import find_credentials
from smalti.data.build.clean.numbers import find_cards, find_ibans, find_phones


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

_TLD = r"(?:[^\W\d_]{2,24}|(?i:xn--)[A-Za-z0-9-]{1,59})(?![\w-])"
_EMAIL = re.compile(
    rf"(?<![\w.+%-])[\w.+%-]{{1,64}}@(?:[\w-]{{1,63}}\.){{1,8}}{_TLD}(?!\()"
    r"|(?<![\w.+%-])[\w.+%-]{1,64} ?[\[(](?:at|AT)[\])] ?"
    rf"(?:[\w-]{{1,63}}(?:\.| ?[\[(](?:dot|DOT)[\])] ?)){{1,8}}{_TLD}"
)
_WRITTEN_AT = re.compile(r"[\[(](?:at|AT)[\])]")
_NO_EMAIL = re.compile(r"(?:git|hg|svn)@.*|.*\.(?:png|jpe?g|gif|svg|webp|js|css|html|py)", re.IGNORECASE)
"""Accounts of repositories, and files such as ``icon@2x.png``."""
_IN_URL = re.compile(r"://[^\s/@]{0,64}$")
_IPV4 = re.compile(r"(?<![\w.])(?:\d{1,3}\.){3}\d{1,3}(?![\w]|\.\d)")
_IPV6 = re.compile(r"(?<![\w:.])(?:[0-9A-Fa-f]{0,4}:){2,7}[0-9A-Fa-f]{0,4}(?![\w:])")
_SOME_IPV4 = re.compile(r"\d\.\d{1,3}\.\d{1,3}\.\d")
_SOME_IPV6 = re.compile(r":[0-9A-Fa-f]{0,4}:")
"""In every address: a search for these is several times as fast, and most texts have none."""
_VERSION = re.compile(
    r"(?:version:\s*|(?<![^\W\d_])(?:version|release|section|chapter|clause|build|oid|sec\.|v\.?|§|abschnitt|kapitel|chapitre|"
    r"sección|capítulo|apartado|sezione|capitolo|seção|hoofdstuk|standard)\s*|[a-z][-_]|(?-i:[A-Z][A-Za-z]+/)|[<>=~]=\s?|\^)$",
    re.IGNORECASE,
)
"""What is before four numbers that are no address: ``foo-1.2.3.4.tar.gz``, ``foo==1.2.3.4``, ``section 1.2.3.4``."""


def find(text: str) -> list[Span]:
    """Return the personal data in ``text``, in order and without overlaps."""
    taken: list[Span] = []  # sorted, without overlaps
    for kind in PLACEHOLDERS:
        for start, end in _FINDERS[kind](text):
            place = bisect_left(taken, (start, end))
            is_free_before = place == 0 or taken[place - 1].end <= start
            if is_free_before and (place == len(taken) or end <= taken[place].start):
                taken.insert(place, Span(start, end, kind))
    return taken


def replace(text: str, spans: list[Span]) -> str:
    """Replace each span by the placeholder of its kind."""
    parts: list[str] = []
    at = 0
    for span in spans:
        parts += [text[at : span.start], PLACEHOLDERS[span.kind]]
        at = span.end
    return "".join([*parts, text[at:]])


def _emails(text: str) -> Iterator[tuple[int, int]]:
    is_possible = "@" in text or _WRITTEN_AT.search(text)
    for match in _EMAIL.finditer(text) if is_possible else ():
        if not _NO_EMAIL.fullmatch(match[0]) and not _IN_URL.search(text[max(0, match.start() - 80) : match.start()]):
            yield match.span()


def _ips(text: str) -> Iterator[tuple[int, int]]:
    for match in _IPV4.finditer(text) if _SOME_IPV4.search(text) else ():
        if _is_address(match[0]) and not _VERSION.search(text[max(0, match.start() - 12) : match.start()]):
            yield match.span()
    for match in _IPV6.finditer(text) if _SOME_IPV6.search(text) else ():
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


_FINDERS: dict[str, Callable[[str], Iterator[tuple[int, int]]]] = {
    "secret": find_credentials,
    "email": _emails,
    "iban": find_ibans,
    "card": find_cards,
    "ip": _ips,
    "phone": find_phones,
}
