"""Personal data: found where check digits and patterns say so, and not in what only looks similar."""

import random
import string
import time

import pytest
from planted_pii import ASIDE, SEEN, planted, scores

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
        "Standards-Version: 4.6.0.1",
        "(näheres in Abschnitt\u00a06.3.1.1, hier nicht)",
        "la sección 6.3.1.2 y el C standard 6.5.2.2",
        "4111 1111 1111 1112",
        "DE88 3704 0044 0532 0130 00",
        "localhost 127.0.0.1",
        "std::vector and a ratio of 4:3:2",
        "commit 9f86d081884c7d659a2feaa0c55ad015a3bf4f1b",
        "the token is the unit of the secret language",
        "write @name or follow @someone",
        "5 + 12345678 = 12345683",
        "https://user:password@example.org/",
        "git@github.com:a/b.git",
        "see icon@2x.png",
        "foo==1.2.3.4",
    ],
)
def test_what_is_no_personal_data_stays(text):
    assert kinds(f"It says {text} there.") == []


def test_a_named_key_needs_entropy():
    assert kinds("api_key = 'x8Kq29vLmZ0pTr41BnWs77'") == ["secret"]
    assert kinds("password: correct-horse-battery") == []
    key = "-----BEGIN RSA PRIVATE KEY-----\nMIIEow\n-----END RSA PRIVATE KEY-----"
    assert pii.replace(f"a {key} b", pii.find(f"a {key} b")) == "a [SECRET] b"


@pytest.mark.parametrize("contexts", [SEEN, ASIDE], ids=["seen", "aside"])
def test_planted_recall_and_precision_of_each_kind(contexts, proof):
    by_kind = scores(planted(contexts, 1, proof(short=250, full=3000)), pii.find)
    assert set(by_kind) == set(pii.PLACEHOLDERS)
    for kind, score in by_kind.items():
        assert score.recall >= 0.98, (kind, score)
        assert score.precision >= 0.98, (kind, score)


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("4111 1111 1111 1111 123", "[CARD] 123"),
        ("4111111111111111 12/27 123", "[CARD] 12/27 123"),
        ("7 3782-822463-10005 12", "7 [CARD] 12"),
        ("4111111111111111,12/27,123", "[CARD],12/27,123"),
        ("https://jane:s3cr%2Fet@git.example.org/x", "https://[SECRET]@git.example.org/x"),
        ("https://jane:mytoken=Zk83nQ1pLw92XbT7@example.org", "https://[SECRET]@example.org"),
        ("amqp://:pa55word@queue", "amqp://[SECRET]@queue"),
        ("a@xn--e1afmkfd.xn--p1ai", "[EMAIL]"),
        ("212 555 0123", "[PHONE]"),
        ("1 212 555 0123", "[PHONE]"),
        ("sid=q7Xz2LmPa9Rt4BvKc8Wn3HsE", "sid=[SECRET]"),
    ],
)
def test_values_beside_other_text(text, left):
    assert pii.replace(text, pii.find(text)) == left


@pytest.mark.parametrize("newline", ["\n", "\r\n", "\\n", "\n> "])
@pytest.mark.parametrize("ends", [True, False])
def test_a_private_key_of_any_length_goes_whole_and_what_follows_stays(newline, ends):
    rng = random.Random(2)
    lines = ["".join(rng.choices(string.ascii_letters + string.digits + "+/", k=64)) for _ in range(400)]
    key = newline.join(["-----BEGIN PRIVATE KEY-----", *lines, *(["-----END PRIVATE KEY-----"] if ends else [])])
    text = f"Here:\n{key}\nThen we went home."
    assert pii.replace(text, pii.find(text)) == "Here:\n[SECRET]\nThen we went home."


def test_a_mention_of_a_private_key_is_none():
    assert kinds("A file begins with -----BEGIN PRIVATE KEY----- and we read on.") == []


@pytest.mark.parametrize(
    "text",
    [
        "a" * 200_000,
        "1" * 200_000,
        "1 " * 100_000,
        "a." * 100_000,
        "a@" * 100_000,
        ":" * 200_000,
        "4111 " * 40_000,
        "-----BEGIN PRIVATE KEY-----\nx" * 6000,
    ],
)
def test_time_is_linear(text):
    started = time.process_time()
    pii.find(text)
    assert time.process_time() - started < 20
