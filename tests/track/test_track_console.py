"""The console sink: its lines, how often they are printed, and that a pipe gets plain text only."""

import io
import re

import pytest

from smalti.base import clock
from smalti.track.sinks.console import ConsoleSink, format_heldout, format_step, format_tasks, wants_live

METRICS = {
    "loss/train/total": 3.2144,
    "lr-AdamW/group0": 3e-3,
    "throughput/tokens_per_sec": 16_100.0,
    "throughput/device/mfu": 0.152,
    "time/remaining_estimate": 130 / 3600,
}


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def ticking(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [0.0]
    monkeypatch.setattr(clock, "now_s", lambda: now[0])
    return now


def test_line_holds_the_watched_figures() -> None:
    assert format_step(120, 600, METRICS) == (
        "step 120/600  loss 3.214  lr 3.00e-03  16.1k tok/s  MFU 15.2%  ETA 2m10s"
    )


def test_unknown_figures_are_left_out_not_zero() -> None:
    assert format_step(1, 9, {"loss/train/total": float("nan")}) == "step 1/9  loss nan"


def test_plain_lines_are_spaced_and_carry_no_control_characters(ticking: list[float]) -> None:
    stream = io.StringIO()
    sink = ConsoleSink(100, stream=stream, every_s=10)
    for step in range(1, 101):
        ticking[0] += 1.0
        sink.update(step, METRICS)
    sink.close()
    lines = stream.getvalue().splitlines()
    steps = [int(re.search(r"step (\d+)/100", line)[1]) for line in lines]  # type: ignore[index]
    assert steps == [1, 11, 21, 31, 41, 51, 61, 71, 81, 91, 100]
    assert not re.search(r"[\r\x1b]", stream.getvalue())
    assert all(re.match(r"\d\d:\d\d:\d\d step ", line) for line in lines)


def test_a_line_held_back_is_printed_on_close(ticking: list[float]) -> None:
    stream = io.StringIO()
    sink = ConsoleSink(100, stream=stream, every_s=10)
    sink.update(1, METRICS)
    sink.update(2, METRICS)
    sink.close()
    sink.close()
    assert [line.split()[2] for line in stream.getvalue().splitlines()] == ["1/100", "2/100"]


def test_heldout_results_are_lines_of_their_own(ticking: list[float]) -> None:
    metrics = {"metrics/eval/code/LanguageCrossEntropy": 2.1, "metrics/eval/code/bits_per_byte": 1.583}
    assert format_heldout(60, metrics) == "held-out at step 60  code: loss 2.100, 1.583 bits/byte"
    of_average = {"metrics/eval_ema/code/LanguageCrossEntropy": 2.05, "metrics/eval_ema/code/LanguagePerplexity": 7.8}
    assert str(format_heldout(60, metrics | of_average)).endswith("1.583 bits/byte, EMA loss 2.050")
    stream = io.StringIO()
    sink = ConsoleSink(100, stream=stream, every_s=1000)
    sink.update(1, METRICS)
    sink.update(60, {**METRICS, **metrics})
    sink.update(60, metrics)
    assert stream.getvalue().count("held-out at step 60") == 2


def test_live_only_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CI", raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    assert wants_live(Terminal())
    assert not wants_live(io.StringIO())
    monkeypatch.setenv("CI", "1")
    assert not wants_live(Terminal())


def test_live_line_is_rewritten_and_messages_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "80")
    stream = Terminal()
    sink = ConsoleSink(600, stream=stream, live=True)
    sink.update(120, METRICS)
    sink.message("checkpoint [bold]saved[/bold]")
    sink.close()
    text = stream.getvalue()
    assert "step 120/600" in text
    assert "ETA 2m10s" in text, "80 columns hold every figure"
    assert " 20%  " in text
    assert "checkpoint [bold]saved[/bold]" in text, "text is not markup"
    assert not re.search(r"\x1b\[[0-9;]*3[0-7][;m]", text), "NO_COLOR"


def test_tasks_are_shown_with_their_errors() -> None:
    scores = {f"icl/metrics/demo/t{number}": number / 10 for number in range(7)}
    errors = {f"{name}/{key}": value for name in scores for key, value in (("stderr", 0.01), ("low", 0), ("high", 1))}
    text = format_tasks(9, {**scores, **errors, "icl/metrics/demo/t1/bits_per_byte": 2.0})
    assert text is not None
    assert text.startswith("tasks at step 9  t1: 10.0% [0.0%, 100.0%]  t2: 20.0%")
    assert text.endswith("(1 more in metrics.jsonl)")
    assert format_tasks(9, {"loss/train/total": 2.0}) is None
