"""Personal data in contexts of its own and of tests/data/build/planted_pii.py, and what only looks like it.

The rules were written looking at ``SEEN`` of the tests, ``ASIDE`` was tried once; no rule had seen ``FRESH``, of
which a version number in the control file of a package led to a change.
"""
# ruff: noqa: E402, E501  (the path of the tests comes first; a context is a line)

import random
import string
import sys
from typing import Any

from record import ROOT

sys.path[:0] = [str(ROOT / "tests" / "data"), str(ROOT / "tests" / "data" / "build")]

from planted_pii import (
    ASIDE,
    SEEN,
    Contexts,
    Maker,
    _card,
    _credentials,
    _email,
    _iban,
    _ipv4,
    _ipv6,
    _phone,
    _prefixed,
    _private_key,
    _random_token,
)

FRESH = Contexts(
    {
        "email": [
            ("Maintainer: Jean Dupont <{}>", _email),
            ("Kontakt über {} oder per Post", _email),
            ("Escriba a {}; gracias.", _email),
            ("連絡先は {} です。", _email),
            ("git config user.email {}", _email),
            ("* 2019-03-04 J. Roe <{}>: new upstream release", _email),
        ],
        "phone": [
            ("Notfall: {} (Tag und Nacht)", _phone("+49 171 #######")),
            ("Appelez le {} avant midi.", _phone("02 ## ## ## ##")),
            ("Llame al {}.", _phone("+34 6## ### ###")),
            ("Desk phone {}, ext. 12", _phone("(###) ###-####")),
            ("電話: {}", _phone("06-####-####")),
            ("WhatsApp {}", _phone("+55 11 9####-####")),
        ],
        "ip": [
            ("Connection refused by {}", _ipv4),
            ("nameserver {}", _ipv4),
            ("inet {}/24 brd", _ipv4),
            ("Der Rechner {} antwortet nicht", _ipv4),
            ("AAAA {}", _ipv6),
        ],
        "iban": [
            ("Überweisung auf {} bis Freitag", _iban("DE", 22, " ")),
            ("Compte : {}", _iban("FR", 27)),
            ("IBAN {}, BIC unknown", _iban("ES", 24, " ")),
            ("<iban>{}</iban>", _iban("AT", 20)),
        ],
        "card": [
            ("Kreditkarte {}, gültig bis 09/28", _card("4", 16, (4, 4, 4, 4))),
            ("carte : {}", _card("51", 16, (4, 4, 4, 4), "-")),
            ('{{"card_number": "{}"}}', _card("4", 16)),
            ("amex {}, thanks", _card("34", 15, (4, 6, 5))),
            ("カード番号 {}", _card("3540", 16)),
        ],
        "secret": [
            ("export AWS_ACCESS_KEY_ID={}", lambda rng: "AKIA" + "".join(rng.choices(string.ascii_uppercase + string.digits, k=16))),
            ("curl -H 'Authorization: token {}' https://api.example.com", _prefixed("ghp_", 36)),
            ("api-key: {}", _random_token(32)),
            ("mongodb://{}@mongo.example.org/admin", _credentials),
            ("SECRET_KEY = \"{}\"", _random_token(40)),
            ("{}", _private_key(20, "RSA PRIVATE KEY")),
        ],
    },
    [
        lambda rng: f"Standards-Version: 4.{rng.randint(1, 6)}.{rng.randint(0, 2)}.{rng.randint(0, 2)}",
        lambda rng: f"libfoo{rng.randint(1, 9)} (>= 1:{rng.randint(1, 9)}.{rng.randint(0, 20)}.{rng.randint(0, 9)}-{rng.randint(1, 9)})",
        lambda rng: f"Closes: #{rng.randint(100000, 999999)}, #{rng.randint(100000, 999999)}",
        lambda rng: f"-rw-r--r-- 1 root root {rng.randint(10**6, 10**8)} Mar  {rng.randint(1, 9)} 12:{rng.randint(10, 59)} a.iso",
        lambda rng: f"[{rng.randint(1, 99)}.{rng.randint(100000, 999999)}] usb 1-1: new device number {rng.randint(2, 9)}",
        lambda rng: f"#define MASK 0x{rng.getrandbits(64):016X}ULL",
        lambda rng: f"MAC {':'.join(f'{rng.randrange(256):02x}' for _ in range(6))}",
        lambda rng: f"{rng.randint(1, 9)} {rng.randint(100, 999)} {rng.randint(100, 999)} {rng.randint(100, 999)} octets",
        lambda rng: f"UTF-8 bytes e2 82 ac, UUID 8{rng.getrandbits(28):07x}-12ab-4cde-9abc-{rng.getrandbits(48):012x}",
        lambda rng: "printf(\"%s@%s\\n\", user, host);",
        lambda rng: f"p_{rng.randint(10, 99)} = a@b where @ is the product of matrices",
        lambda rng: f"du {rng.randint(1, 28)}.{rng.randint(1, 12)}.20{rng.randint(10, 25)} au {rng.randint(1, 28)}.{rng.randint(1, 12)}.20{rng.randint(26, 30)}",
        lambda rng: f"Build {rng.randint(2015, 2025)}.{rng.randint(1, 12)}.{rng.randint(1, 28)}.{rng.randint(100, 999)}",
        lambda rng: f"sha1 {rng.getrandbits(160):040x} is no secret",
        lambda rng: "password: ask the administrator of the network, who has it",
    ],
)  # fmt: skip
PLACEHOLDERS = {"secret": "[SECRET]", "email": "[EMAIL]", "iban": "[IBAN]", "card": "[CARD]", "ip": "[IP]",
                "phone": "[PHONE]"}  # fmt: skip
_SETS = {"seen": SEEN, "aside": ASIDE, "fresh": FRESH}


def mark(number: int) -> str:
    """Return a line without digits that is in no other document."""
    letters = ""
    for _ in range(6):
        number, place = divmod(number, 20)
        letters += "bcdfghjklmnpqrstvwxz"[place] + "aeiou"[place % 5]
    return letters


def pieces(rng: random.Random, number: int) -> list[dict[str, Any]]:
    """Return three lines with personal data and two with what looks like it, for one document."""
    name = ("seen", "aside", "fresh")[number % 3]
    contexts = _SETS[name]
    kinds = list(contexts.of)
    listed: list[dict[str, Any]] = []
    for place in range(3):
        kind = kinds[(number // 3 * 3 + place) % len(kinds)]
        context, make = rng.choice(contexts.of[kind])
        value = make(rng)
        piece = context.format(value)
        listed.append({"kind": kind, "text": piece, "expected": piece.replace(value, PLACEHOLDERS[kind], 1)})
    for maker in rng.sample(contexts.negatives, 2):
        piece = maker(rng)
        listed.append({"kind": None, "text": piece, "expected": piece})
    rng.shuffle(listed)
    for place, item in enumerate(listed):
        item |= {"set": name, "mark": mark(10 * number + place)}
    return listed


__all__ = ["FRESH", "PLACEHOLDERS", "Maker", "mark", "pieces"]
