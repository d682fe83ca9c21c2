"""The timeline says of every interruption what happened and what was done; its labels do not overlap."""

import json
import re
from pathlib import Path

from smalti.base.chart import Arrow, Panel, Series, timeline
from smalti.track.goodput import Interruption
from smalti.track.report import write_report
from smalti.track.report.interruptions import how_detected, what_happened, what_was_done


def _fault(**event: object) -> Interruption:
    return Interruption(0, 0.0, 7, event, 12.0, 30.0, 45.0, 0.0, 5, by_itself=True)


def test_an_interruption_in_words() -> None:
    assert what_happened(_fault(event="rank_died", rank=1, signal="SIGKILL", phase="forward")) == (
        "rank 1 was killed by SIGKILL in forward"
    )
    assert what_happened(_fault(event="rank_died", rank=0, code=1)) == "rank 0 exited with code 1"
    assert what_happened(_fault(event="rank_hung", rank=2, phase="data")) == "rank 2 hung in data"
    assert what_happened(_fault(event="oom", rank=2)) == "rank 2 ran out of memory"
    assert what_happened(_fault(event="not_finite", cause="loss", value="nan")) == "the loss was nan"
    assert what_happened(_fault()) == "the command was killed"
    assert how_detected(_fault(event="rank_hung")) == "detected in 12.0s"
    assert what_was_done(_fault()) == "restarted by itself, from step 5, ready in 45.0s; 30.0s of work lost"


def test_labels_of_arrows_that_are_near_do_not_overlap() -> None:
    lines = [Series("a", [0.0, 100.0], [1.0, 2.0])]
    arrows = [Arrow(50 + number / 10, (f"event {number}",)) for number in range(12)]
    svg = timeline([Panel("a", lines)], arrows, title="t", x_label="s", x_range=(0.0, 100.0), width=700)
    labels = re.findall(r'<text class="v e" x="([\d.]+)" y="([\d.]+)" text-anchor="middle">(\d+)<', svg)
    places = [(float(x), float(y), 7.0 * len(text)) for x, y, text in labels]
    assert len(places) >= 3
    for index, (x, y, wide) in enumerate(places):
        for other_x, other_y, other_wide in places[:index]:
            assert abs(y - other_y) >= 12 or abs(x - other_x) >= (wide + other_wide) / 2
    assert all(f">event {number}<" in svg for number in range(12))


def test_the_report_has_the_section_and_escapes_events(tmp_path: Path) -> None:
    events = [
        {"time": "2026-01-01T00:00:00.000Z", "attempt": 0, "event": "attempt_started", "ranks": 1},
        {"time": "2026-01-01T00:01:00.000Z", "attempt": 0, "event": "rank_died", "rank": 0, "signal": "<b>"},
    ]
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    text = Path(write_report(tmp_path)).read_text()
    assert "<h2>Goodput</h2>" in text
    assert "rank 0 was killed by &lt;b&gt;" in text
    assert "<b>" not in text
