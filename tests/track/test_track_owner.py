"""A run whose process was killed is shown as killed at once on its machine; elsewhere only its heartbeat is known."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from smalti.track import owner
from smalti.track.listing import summary
from smalti.track.report.read import read_run


@pytest.fixture
def killed(tmp_path: Path) -> Path:
    """A run folder that a process killed with -9 has left."""
    (tmp_path / "config.yaml").write_text("name: a\n")
    with subprocess.Popen(["sleep", "600"]) as process:
        (tmp_path / owner.FILE_NAME).write_text(owner.note(process.pid))
        process.kill()
    return tmp_path


@pytest.mark.parametrize("state", ["starting", "running"])
def test_a_killed_run_is_shown_at_once(killed: Path, state: str) -> None:
    (killed / "status.json").write_text(json.dumps({"state": state, "step": 3}))
    shown, record = summary(killed), read_run(killed)
    assert shown.state == record.state == "killed"
    assert shown.reason == record.status["reason"]
    assert "ended without recording why; the same command resumes" in str(shown.reason)
    assert shown.step == 3


def test_a_recorded_end_stays(killed: Path) -> None:
    (killed / "status.json").write_text(json.dumps({"state": "failed", "reason": "disk full"}))
    assert (summary(killed).state, summary(killed).reason) == ("failed", "disk full")


@pytest.mark.parametrize(
    "line", ["{note}", "{pid} {process} another-boot/pid:[1]", "4000000", ""],
    ids=["it runs", "another machine", "an earlier version", "being written"],
)  # fmt: skip
def test_what_may_still_run_keeps_its_state(tmp_path: Path, line: str) -> None:
    (tmp_path / "config.yaml").write_text("name: a\n")
    (tmp_path / "status.json").write_text(json.dumps({"state": "running"}))
    (tmp_path / owner.FILE_NAME).write_text(line.format(note=owner.note(os.getpid()), pid=1, process="gone"))
    assert summary(tmp_path).state == "running"
    assert read_run(tmp_path).state == "running"
