"""Stop texts: never shown, not even in part; everything else is."""

from smalti.serve.engine.text import StopText


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
    assert stop.stopped
    assert stop.add("more") == ""


def test_what_was_held_back_is_given_at_the_end() -> None:
    stop = StopText(("END",))
    assert stop.add("xEN") == "x"
    assert stop.flush() == "EN"
    assert not stop.stopped


def test_the_first_of_several_stops_counts() -> None:
    stop = StopText(("cd", "bc"))
    assert stop.add("abcd") == "a"
