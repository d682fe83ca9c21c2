"""The ledger in ``smalti runs show``: shares, money, interruptions, and what would have helped."""

import json
from pathlib import Path
from typing import Any

import pytest

from smalti.cli.runs.app import show

_EVENTS: list[dict[str, Any]] = [
    {"time": "2026-01-01T00:00:00.000Z", "attempt": 0, "event": "attempt_started", "ranks": 2},
    {"time": "2026-01-01T00:10:00.000Z", "attempt": 0, "event": "rank_hung", "rank": 1, "phase": "data",
     "detected_s": 12.0},
    {"time": "2026-01-01T00:10:02.000Z", "attempt": 0, "event": "attempt_ended", "code": 75, "seconds": 602.0},
    {"time": "2026-01-01T00:20:02.000Z", "attempt": 1, "event": "attempt_started", "ranks": 2},
    {"time": "2026-01-01T00:20:32.000Z", "attempt": 1, "event": "attempt_ended", "code": 0, "seconds": 30.0},
]  # fmt: skip


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "config.yaml").write_text("name: run\n")
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in _EVENTS))
    return tmp_path


def test_json_has_every_bucket_and_the_interruptions(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    show(str(run), usd_per_hour=6.0, as_json=True)
    goodput = json.loads(capsys.readouterr().out)["goodput"]
    assert goodput["total_s"] == pytest.approx(2 * 1232)
    assert sum(bucket["frac"] for bucket in goodput["buckets"].values()) == pytest.approx(1)
    assert goodput["buckets"]["idle"] == pytest.approx({"seconds": 1200, "frac": 1200 / 2464, "usd": 2.0})
    (fault,) = goodput["interruptions"]
    assert (fault["what"], fault["detect_s"], fault["idle_s"]) == ("rank 1 hung in data", 12.0, 600.0)


def test_text_has_shares_and_money_only_with_a_price(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    show(str(run))
    text = capsys.readouterr().out
    assert "rank 1 hung in data" in text
    assert "48.7%" in text
    assert "USD" not in text
    show(str(run), usd_per_hour=6.0)
    assert "at 6 USD for an hour of a rank (as given)" in capsys.readouterr().out
