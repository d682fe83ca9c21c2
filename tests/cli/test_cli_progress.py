"""The progress line: one at a time, none for short work, bytes and tokens in their own words."""

import pytest

from smalti.cli import progress


@pytest.fixture
def now_s(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [0.0]
    monkeypatch.setattr(progress, "now_s", lambda: now[0])
    return now


def lines(now_s: list[float], capsys: pytest.CaptureFixture[str], unit: str) -> list[str]:
    """Of work of 200 seconds."""
    with progress.ProgressLine(unit) as tell:
        for done in range(1, 201):
            now_s[0] += 1.0
            tell("reading", done, 200)
    return capsys.readouterr().err.splitlines()


def test_plain_lines_come_ever_more_seldom(now_s: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    found = [int(line.split()[1]) for line in lines(now_s, capsys, "bytes")]
    assert found == [5, 15, 35, 75, 135, 195]


def test_other_units(now_s: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    assert lines(now_s, capsys, "tokens")[0] == "reading: 5 of 200 tokens, 2.5%"


def test_large_pieces_are_counted(now_s: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    with progress.ProgressLine() as tell:
        now_s[0] += 6.0
        tell("comparing", 0, 3, "part")
    assert capsys.readouterr().err == "comparing: part 1 of 3\n"


def test_a_terminal_is_left_clean(
    now_s: list[float], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    monkeypatch.setattr(progress, "plain_output", lambda: False)
    with progress.ProgressLine() as tell:
        now_s[0] += 1.0
        tell("reading", 150, 100)
    assert capsys.readouterr().err == "\r\x1b[Kreading: 150 B of 100 B, 100.0%\r\x1b[K"


def test_short_work_shows_nothing(now_s: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    with progress.ProgressLine() as tell:
        tell("reading", 0, 100)
        tell("reading", 100, 100)
    assert capsys.readouterr().err == ""
