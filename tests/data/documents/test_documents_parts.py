"""Parts of a long document: joined they are the document, none is too long, and cuts follow the rule."""

import io
import random

import pytest

from smalti.data.documents.parts import parts_of_stream, parts_of_text

PARAGRAPH = "A line of words.\nAnother line.\n\n"


@pytest.mark.parametrize(
    ("text", "end"),
    [
        (PARAGRAPH * 300, "\n\n"),
        (PARAGRAPH.replace("\n", "\r\n") * 300, "\r\n\r\n"),
        ("A line of words.\n" * 600, "\n"),
        ("word " * 3000, " "),
        ("x" * 9000, "x"),
        ("ä🙂文" * 1500, ""),
    ],
)
def test_cuts_are_at_the_best_place_of_the_second_half(text: str, end: str) -> None:
    parts = list(parts_of_text(text, 1000))
    assert "".join(parts) == text
    assert all(part.endswith(end) for part in parts[:-1])
    assert all(500 < len(part.encode()) <= 1000 for part in parts[:-1])


def test_random_texts_are_joined_again() -> None:
    chance = random.Random(1)
    for _ in range(200):
        text = "".join(chance.choices("ab \n\t🙂ä", k=chance.randrange(4000)))
        parts = list(parts_of_text(text, 1000))
        assert "".join(parts) == text
        assert all(len(part.encode()) <= 1000 for part in parts)
        assert list(parts_of_stream(io.BytesIO(text.encode()), 1000)) == [part.encode() for part in parts]


def test_a_document_that_is_not_too_long_is_one_part() -> None:
    assert list(parts_of_text("x" * 1000, 1000)) == ["x" * 1000]
    assert [len(part) for part in parts_of_text("x" * 1001, 1000)] == [1000, 1]
    assert list(parts_of_text("", 1000)) == [""]


def test_bytes_that_are_not_utf8_are_cut_too() -> None:
    data = b"\x80" * 5000
    assert b"".join(parts_of_stream(io.BytesIO(data), 1000)) == data
