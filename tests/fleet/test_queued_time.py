"""The time that a run has waited in the queue is in its ledger, once for a command."""

import sys
import time
from pathlib import Path

import pytest

from smalti.base.errors import UserError
from smalti.config.restart import RestartConfig
from smalti.fleet import agent
from smalti.track.goodput import ledger, read_history
from smalti.track.run import RunFolder


def test_the_ledger_has_the_time_in_the_queue_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SMALTI_FLEET_QUEUED_S", "12.5")
    fails_once = f"import os, sys; sys.exit(0 if os.path.exists('{tmp_path}/logs/attempt-1') else 1)"

    def again(ranks: int) -> tuple[list[str], RunFolder]:
        return command, RunFolder.join(tmp_path, 1)

    command = [sys.executable, "-c", fails_once]
    outcome = agent.run(
        command, ranks=2, folder=RunFolder.join(tmp_path, 0), threads=1, again=again, restart=RestartConfig()
    )
    assert outcome.code == 0
    result = ledger(read_history(tmp_path, time.time()))
    assert result is not None
    assert result.seconds["queue"] == pytest.approx(2 * 12.5)
    assert sum(result.seconds.values()) == pytest.approx(result.total_s)


def test_a_time_that_is_no_number_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SMALTI_FLEET_QUEUED_S", "long")
    with pytest.raises(UserError, match="no number of seconds"):
        agent.run([sys.executable, "-c", ""], ranks=1, folder=RunFolder.join(tmp_path, 0), threads=1)
