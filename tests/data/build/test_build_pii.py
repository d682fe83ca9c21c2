"""Personal data: found where check digits and patterns say so, and not in what only looks similar."""

import random
import string
import time

import pytest
from planted_documents import prose

from smalti.data.build.clean import pii


def kinds(text):
    return [span.kind for span in pii.find(text)]


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("email", "jane.doe+news@mail.example.co.uk"),
        ("email", "jane [at] example [dot] org"),
        ("phone", "+49 30 1234567"),
        ("phone", "+1 (555) 123-4567"),
        ("phone", "(555) 123-4567"),
        ("phone", "555-123-4567"),
        ("phone", "01 23 45 67 89"),
        ("phone", "020 7946 0958"),
        ("phone", "03-1234-5678"),
        ("phone", "8 (495) 123-45-67"),
        ("ip", "192.168.17.4"),
        ("ip", "2001:db8:85a3::8a2e:370:7334"),
        ("iban", "DE89 3704 0044 0532 0130 00"),
        ("iban", "GB82WEST12345698765432"),
        ("card", "4111 1111 1111 1111"),
        ("card", "5500-0000-0000-0004"),
        ("secret", "AKIAIOSFODNN7EXAMPLE"),
        ("secret", "ghp_" + "aB3dE6gH9jK2mN5pQ8sT1vW4yZ7bC0eF3hJ6"),
    ],
)
def test_each_kind_is_found_alone(kind, text):
    line = f"Please use {text}, as always."
    assert kinds(line) == [kind]
    assert pii.replace(line, pii.find(line)) == f"Please use {pii.PLACEHOLDERS[kind]}, as always."


@pytest.mark.parametrize(
    "text",
    [
        "on 2024-01-02 at 12:30:45, or 01-02-2024",
        "3.14159265358979 and 1,000,000.50",
        "ISBN 978-3-16-148410-0",
        "version 1.2.3.4 of the program",
        "4111 1111 1111 1112",
        "DE88 3704 0044 0532 0130 00",
        "localhost 127.0.0.1",
        "std::vector and a ratio of 4:3:2",
        "commit 9f86d081884c7d659a2feaa0c55ad015a3bf4f1b",
        "the token is the unit of the secret language",
        "write @name or follow @someone",
        "5 + 12345678 = 12345683",
    ],
)
def test_what_is_no_personal_data_stays(text):
    assert kinds(f"It says {text} there.") == []


def test_a_named_key_needs_entropy():
    assert kinds("api_key = 'x8Kq29vLmZ0pTr41BnWs77'") == ["secret"]
    assert kinds("password: correct-horse-battery") == []
    key = "-----BEGIN RSA PRIVATE KEY-----\nMIIEow\n-----END RSA PRIVATE KEY-----"
    assert pii.replace(f"a {key} b", pii.find(f"a {key} b")) == "a [SECRET] b"


def test_planted_in_prose_recall_and_precision():
    rng = random.Random(3)
    found = planted = right = 0
    for _ in range(300):
        name = "".join(rng.choices(string.ascii_lowercase, k=7))
        digits = [str(rng.randrange(10)) for _ in range(14)]
        card = "4" + "".join(digits)
        card += next(digit for digit in string.digits if pii.is_luhn(card + digit))
        secrets = {
            "email": f"{name}@{name[:4]}.example.com",
            "phone": f"+44 20 {''.join(digits[:4])} {''.join(digits[4:8])}",
            "ip": ".".join(str(rng.randrange(1, 255)) for _ in range(4)),
            "card": card,
        }
        text = prose(rng, n_sentences=3)
        for value in secrets.values():
            text += f" Then {value} was written down. {prose(rng, n_sentences=1)}"
        spans = pii.find(text)
        planted += len(secrets)
        found += len(spans)
        right += sum(text[span.start : span.end] == secrets.get(span.kind) for span in spans)
    assert right / planted >= 0.98
    assert right / found >= 0.98


@pytest.mark.parametrize(
    "text", ["a" * 200_000, "1" * 200_000, "1 " * 100_000, "a." * 100_000, "a@" * 100_000, ":" * 200_000]
)
def test_time_is_linear(text):
    started = time.process_time()
    pii.find(text)
    assert time.process_time() - started < 20
