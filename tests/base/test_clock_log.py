"""Clock and log."""

import io
import logging
import re
import sys
from pathlib import Path

import pytest

from smalti.base import clock, log


def test_clock_text_sorts_as_time() -> None:
    texts = [clock.utc_text() for _ in range(50)]
    assert texts == sorted(texts)
    assert all(re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", text) for text in texts)
    assert clock.now_s() <= clock.now_s()
    assert clock.wall_s() > 1.7e9


@pytest.fixture
def restored() -> object:
    root = logging.getLogger("smalti")
    before = (list(root.handlers), root.level, root.propagate)
    yield root
    for handler in root.handlers:
        if handler not in before[0]:
            handler.close()
    root.handlers[:], root.propagate = before[0], before[2]
    root.setLevel(before[1])


def test_rank_0_alone_writes_to_stderr(tmp_path: Path, capsys: pytest.CaptureFixture[str], restored: object) -> None:
    for rank in (0, 1):
        log.setup("INFO", file=str(tmp_path / f"rank-{rank}.log"), rank=rank)
        log.get("train").info("hello from %d", rank)
        log.get("train").debug("not shown")
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "hello from 0" in captured.err
    assert "hello from 1" not in captured.err
    assert "hello from 1" in (tmp_path / "rank-1.log").read_text()
    assert "not shown" not in (tmp_path / "rank-0.log").read_text()


def test_setup_twice_prints_once(capsys: pytest.CaptureFixture[str], restored: object) -> None:
    log.setup()
    log.setup()
    log.get("data").warning("once")
    assert capsys.readouterr().err.count("once") == 1


def test_lines_follow_stderr_when_it_is_replaced(monkeypatch: pytest.MonkeyPatch, restored: object) -> None:
    log.setup()
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    log.get("train").warning("above the live line")
    assert "above the live line" in stream.getvalue()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
def test_a_full_disk_costs_the_line_and_no_traceback(capsys: pytest.CaptureFixture[str], restored: object) -> None:
    log.setup("INFO", file="/dev/full", rank=1)
    log.get("t").info("a line that does not fit")
    log.setup("INFO", rank=1)
    assert capsys.readouterr().err == ""
