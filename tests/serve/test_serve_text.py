"""Text in pieces: whole characters, stop texts never shown, all pieces joined are the decoded whole."""

import random

from tiny_models import ByteTokenizer

from smalti.serve.engine.text import StopText, TextDecoder


def _pieces(data: bytes, context: bytes = b"") -> list[str]:
    decoder = TextDecoder(ByteTokenizer(), list(context))
    return [decoder.add(byte) for byte in data] + [decoder.flush()]


def test_characters_come_whole() -> None:
    assert _pieces("aé€😀z".encode()) == ["a", "", "é", "", "", "€", "", "", "", "😀", "z", ""]


def test_unfinished_and_broken_bytes_become_replacement_characters() -> None:
    assert "".join(_pieces(b"a\xe2\x82")) == "a\ufffd"
    assert "".join(_pieces(b"\x80\x80b\xff")) == "\ufffd\ufffdb\ufffd"


def test_pieces_joined_are_the_whole_on_random_bytes(proof) -> None:
    draw = random.Random(5)
    alphabet = [*"aé€😀\ufffd".encode(), 0x80, 0xFF, 0xE2, 0xF0, 0x41]
    for _ in range(proof(300, 20_000)):
        data = bytes(draw.choice(alphabet) for _ in range(draw.randrange(14)))
        context = "aé€😀"[: draw.randrange(5)].encode()
        pieces = _pieces(data, context)
        assert "".join(pieces) == data.decode("utf-8", "replace"), data


def test_a_space_that_only_context_keeps() -> None:
    class Words:
        def decode(self, ids: list[int]) -> str:
            return "".join([" a", " b", " c"][token] for token in ids).lstrip()

    decoder = TextDecoder(Words(), [0])
    assert [decoder.add(1), decoder.add(2)] == [" b", " c"]


def test_stop_text_is_held_back_and_cut() -> None:
    stop = StopText(("\n\n", "END"))
    assert [stop.add(text) for text in ("a", "\n", "b", "E", "N", "x", "EN", "D rest")] == [
        "a",
        "",
        "\nb",
        "",
        "",
        "ENx",
        "",
        "",
    ]
    assert stop.found
    assert stop.add("more") == ""


def test_what_was_held_back_is_given_at_the_end() -> None:
    stop = StopText(("END",))
    assert stop.add("xEN") == "x"
    assert stop.flush() == "EN"
    assert not stop.found


def test_the_first_of_several_stops_counts() -> None:
    stop = StopText(("cd", "bc"))
    assert stop.add("abcd") == "a"
