"""Real ranks: the slow one is named, and none of a run without faults."""

import json
from pathlib import Path
from typing import Any

import pytest
import toy_run
from forked_command import start

from smalti.cli.runs.show import about, about_text
from smalti.config.load import dump
from smalti.track.report.page import page
from smalti.track.report.read import read_run
from smalti.track.run import RunFolder
from smalti.train import stragglers

pytestmark = pytest.mark.slow


def _short_windows() -> None:
    stragglers._WINDOW_S, stragglers._WINDOW_STEPS = 0.5, 10


def _run(root: Path, *planned: dict[str, Any], ranks: int, steps: int) -> Path:
    config = toy_run.config(root, parallel={"ranks": ranks, "threads": 1}, duration=f"{steps}step", eval_every="40step")
    (root / "r.yaml").write_text(dump(config))
    faults = [f"chaos.faults={json.dumps(planned)}"] if planned else []
    code, output = start("train", str(root / "r.yaml"), *faults, in_rank=_short_windows).finish(180)
    assert code == 0, output
    return Path(config.run_folder)


def _stragglers(folder: Path) -> list[dict[str, Any]]:
    return [event for event in RunFolder.read(folder).events() if event["event"] == "straggler"]


def test_a_slow_rank_is_named_with_its_phase(tmp_path: Path) -> None:
    folder = _run(tmp_path, {"kind": "slow_rank", "rank": 1, "step": 5, "slowdown": 3.0}, ranks=3, steps=60)
    events = _stragglers(folder)
    assert {(event["rank"], event["phase"]) for event in events} == {(1, "forward")}
    assert events[0]["factor"] > 1.25
    assert events[0]["node"]
    assert "note: rank 1 of" in about_text(about(folder, n_events=0))
    assert "is slow: its own work" in page(read_run(folder), None)


@pytest.mark.exhaustive  # tests/track/test_stragglers.py has the rule; here are real ranks that share two cores
@pytest.mark.parametrize("ranks", [3, 4])
def test_a_run_without_faults_names_nobody(ranks: int, tmp_path: Path) -> None:
    folder = _run(tmp_path, ranks=ranks, steps=100)
    assert not _stragglers(folder)
