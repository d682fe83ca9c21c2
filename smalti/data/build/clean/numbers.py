"""Finds IBANs, card numbers and phone numbers in a text, by patterns and check digits."""

import re
from collections.abc import Iterator
from functools import lru_cache

_IBAN = re.compile(r"(?<![A-Za-z0-9])[A-Z]{2}\d{2}(?:[ -]?[A-Z0-9]{4}){2,7}(?:[ -]?[A-Z0-9]{1,4})?(?![A-Za-z0-9])")
_IBAN_LENGTHS = {
    "AD": 24, "AE": 23, "AT": 20, "BE": 16, "BG": 22, "CH": 21, "CY": 28, "CZ": 24, "DE": 22, "DK": 18, "EE": 20,
    "ES": 24, "FI": 18, "FR": 27, "GB": 22, "GR": 27, "HR": 21, "HU": 28, "IE": 22, "IL": 23, "IS": 26, "IT": 27,
    "LI": 21, "LT": 20, "LU": 20, "LV": 21, "MC": 27, "MT": 31, "NL": 18, "NO": 15, "PL": 28, "PT": 25, "RO": 24,
    "RS": 22, "SA": 24, "SE": 24, "SI": 19, "SK": 24, "SM": 27, "TR": 26, "UA": 29,
}  # fmt: skip

_DIGIT_GROUPS = re.compile(r"(?<!\w)\d++(?:[ \xa0.\u2013-]\d++)*+")
_GROUP = re.compile(r"\d+")
_CARD_LAYOUTS = {(4, 4, 4, 4), (4, 4, 4, 4, 3), (4, 6, 5), (4, 6, 4), (6, 13), *((n,) for n in range(13, 20))}
_ODD_GROUPS = 3
"""From so many groups on, other layouts are cards too, if no digits are beside them."""
_MOST_GROUPS = 7
_ISSUERS = re.compile(
    r"4(?:\d{12}|\d{15}|\d{18})"  # Visa
    r"|(?:5[1-5]\d\d|222[1-9]|22[3-9]\d|2[3-6]\d\d|27[01]\d|2720)\d{12}"  # Mastercard
    r"|3[47]\d{13}"  # American Express
    r"|3(?:0[0-5]\d|[689]\d\d)\d{10,15}"  # Diners Club
    r"|35(?:2[89]|[3-8]\d)\d{12,15}"  # JCB
    r"|(?:6011|64[4-9]\d|65\d\d|62\d\d)\d{12,15}"  # Discover, UnionPay
    r"|(?:50|5[6-9]|6[0-9])\d{11,17}"  # Maestro
)

_PHONES = re.compile(
    r"(?<![\w+.,)-])(?<!\d )(?:"
    r"(?:\+|00)[1-9]\d{0,2}(?:[ .()/-]{0,2}\d){6,13}"  # international
    r"|(?:1[-. ])?(?:\(\d{3}\) ?|\d{3}[-.])\d{3}[-. ]\d{4}"  # North America
    r"|(?:1 )?[2-9]\d\d \d{3} \d{4}"
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


_SOME_IBAN = re.compile(r"[A-Z][A-Z]\d\d")
_SOME_DIGITS = re.compile(r"\d(?:[ .()/\xa0\u2013-]{0,2}\d){5}")
"""In every number that is found: a search for these is several times as fast, and most texts have none."""


@lru_cache(maxsize=1)
def _has_digits(text: str) -> bool:
    return _SOME_DIGITS.search(text) is not None


def find_ibans(text: str) -> Iterator[tuple[int, int]]:
    """Yield the spans of IBANs of a known country, with its length and right check digits."""
    for match in _IBAN.finditer(text) if _SOME_IBAN.search(text) else ():
        compact = re.sub("[ -]", "", match[0])
        length = _IBAN_LENGTHS.get(compact[:2])
        if length is None or len(compact) < length or not is_iban(compact[:length]):
            continue
        yield match.start(), _end_of(match[0], length) + match.start()


def find_cards(text: str) -> Iterator[tuple[int, int]]:
    """Yield the spans of card numbers: of an issuer, with its length, a right check digit, and in usual groups.

    Other digits may be beside it, such as an expiry date and the code of the back.
    """
    for run in _DIGIT_GROUPS.finditer(text) if _has_digits(text) else ():
        groups = [(match.start() + run.start(), match.end() + run.start()) for match in _GROUP.finditer(run[0])]
        if re.match(r"\w", text[run.end() : run.end() + 1]):
            groups.pop()  # digits of a word
        first = 0
        while first < len(groups):
            last = _card_from(text, groups, first)
            if last is None:
                first += 1
            else:
                yield groups[first][0], groups[last][1]
                first = last + 1


def _card_from(text: str, groups: list[tuple[int, int]], first: int) -> int | None:
    """Return the last group of the card number that begins with group ``first``; of several the shortest."""
    if text[groups[first][0] - 1 : groups[first][0]] == ".":
        return None  # of a number with a fraction
    for last in range(first, min(len(groups), first + _MOST_GROUPS)):
        end = groups[last][1]
        widths = tuple(stop - start for start, stop in groups[first : last + 1])
        is_alone = first == 0 and last == len(groups) - 1 and last >= _ODD_GROUPS - 1
        if not 13 <= sum(widths) <= 19 or not (is_alone or widths in _CARD_LAYOUTS):
            continue
        if len(widths) == 1 and re.match(r"\.\d", text[end : end + 2]):
            continue
        if is_card(re.sub(r"\D", "", text[groups[first][0] : end])):
            return last
    return None


def find_phones(text: str) -> Iterator[tuple[int, int]]:
    """Yield the spans of phone numbers as several countries write them, and of any after a word such as phone."""
    if not _has_digits(text):
        return
    for match in _PHONES.finditer(text):
        if 7 <= sum(map(str.isdigit, match[0])) <= 15:
            yield match.span()
    for match in _CUED_PHONE.finditer(text):
        yield match.span("number")


def is_card(digits: str) -> bool:
    """Whether an issuer of cards has numbers like this, and its check digit is right."""
    return _ISSUERS.fullmatch(digits) is not None and is_luhn(digits) and len(set(digits)) > 1


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


def _end_of(text: str, n: int) -> int:
    """Return the end of the first ``n`` characters that are not separators."""
    places = [place for place, character in enumerate(text) if character not in " -"]
    return places[n - 1] + 1
