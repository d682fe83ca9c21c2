"""Faults that a run injects into itself: each happens to the right rank at the right step and phase, and once."""

import itertools
import json
import os
import re
import resource
import signal
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import toy_run
from forked_command import start
from gloo_ranks import exit_code, run_ranks

from smalti.base import clock
from smalti.base.errors import InjectedError, RetryableError, UserError
from smalti.base.objects import Requests
from smalti.config import chaos_needs
from smalti.config.chaos import FaultConfig
from smalti.config.load import dump, from_dict
from smalti.config.run import RunConfig
from smalti.track.progress import Phase, read_slots, slot_file
from smalti.track.run import RunFolder
from smalti.train import build, faults, fit

pytestmark = pytest.mark.slow  # ranks that die or hang


def _config(root: Path, *planned: dict[str, Any], ranks: int = 1, **train: Any) -> RunConfig:
    tree = toy_run.config(root, parallel={"ranks": ranks, "threads": 1}, **train).model_dump(mode="json")
    return from_dict(RunConfig, tree | {"chaos": {"faults": list(planned)}}).config


def _fit(config: RunConfig) -> None:
    fit(build(config, evaluate=None))


def _injected(folder: RunFolder) -> list[tuple[str, int, int, str]]:
    events = [event for event in folder.events() if event["event"] == "fault_injected"]
    return [(event["fault"], event["rank"], event["step"], event["phase"]) for event in events]


@pytest.mark.parametrize(
    ("kind", "phase", "number"),
    [("sigkill", "backward", signal.SIGKILL), ("segfault", "optimizer", signal.SIGSEGV)],
)
def test_a_rank_dies_by_the_signal_in_the_step_and_phase_that_were_asked_for(kind, phase, number, tmp_path) -> None:
    config = _config(tmp_path, {"kind": kind, "step": 3, "phase": phase})
    assert exit_code(_fit, config) == -number
    folder = RunFolder.read(config.run_folder)
    assert _injected(folder) == [(kind, 0, 3, phase)]
    (slot,) = read_slots(slot_file(folder.log_folder(0), 0))
    assert (slot.step, slot.phase) == (2, Phase[phase.upper()])
    assert exit_code(_fit, config) == 0, "it does not happen to the attempt that repeats the step"
    assert len(_injected(folder)) == 1


@pytest.mark.parametrize("phase", ["init", "data", "checkpoint"])
def test_an_exception_is_raised_in_its_phase(phase, tmp_path) -> None:
    config = _config(tmp_path, {"kind": "exception", "phase": phase} | ({} if phase == "init" else {"step": 2}))
    with pytest.raises(InjectedError, match="injected by chaos: exception of rank 0"):
        _fit(config)
    folder = RunFolder.read(config.run_folder)
    (slot,) = read_slots(slot_file(folder.log_folder(0), 0))
    assert (slot.phase.name.lower(), slot.step) == (phase, {"init": 0, "data": 1, "checkpoint": 5}[phase])
    assert [fault[3] for fault in _injected(folder)] == [phase]


def test_a_fault_of_a_later_attempt_waits_for_it(tmp_path) -> None:
    config = _config(tmp_path, {"kind": "exception", "phase": "init", "attempt": 1}, duration="6step")
    _fit(config)
    with pytest.raises(InjectedError):
        _fit(config)
    _fit(config)


def _wait(condition: Any, timeout_s: float = 60) -> None:
    end_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end_s, "waited in vain"
        time.sleep(0.02)


HANGS = {"sigstop": "backward", "held_gil": "forward", "deadlock": "optimizer", "stuck_data": "data"}


@pytest.mark.parametrize("kind", list(HANGS))
def test_a_rank_that_hangs_shows_where_in_its_slot(kind, tmp_path) -> None:
    """A rank that waits for it is further in the same step, or in the collective before it."""
    planned = {"kind": kind, "rank": 1, "step": 4, "phase": HANGS[kind]}
    config = _config(tmp_path, planned, ranks=2)
    (tmp_path / "r.yaml").write_text(dump(config))
    agent = start("train", str(tmp_path / "r.yaml"), "train.parallel.timeout=40s")
    try:
        folder = RunFolder(config.run_folder)
        _wait(lambda: (folder.path / "events.jsonl").exists() and _injected(folder))
        assert _injected(folder) == [(kind, 1, 4, HANGS[kind])]
        time.sleep(0.5)
        first, second = read_slots(slot_file(folder.log_folder(0), 0))
        assert (second.step, second.phase.name.lower()) == (3, HANGS[kind])
        assert first.phase_count >= second.phase_count
        state = Path(f"/proc/{second.pid}/stat").read_text().rpartition(")")[2].split()[0]
        assert (state == "T") == (kind == "sigstop")
    finally:
        for pid in [*agent.ranks(), agent.pid]:
            os.kill(pid, signal.SIGKILL)


def test_a_held_gil_lets_no_thread_run(tmp_path) -> None:
    beats: list[float] = []
    done = threading.Event()

    def beat() -> None:
        while not done.wait(0.01):
            beats.append(time.monotonic())

    thread = threading.Thread(target=beat)
    thread.start()
    time.sleep(0.1)
    faults.inject(FaultConfig(kind="held_gil", step=1, duration="0.5s"), tmp_path, None)
    time.sleep(0.1)
    done.set()
    thread.join()
    assert max(b - a for a, b in itertools.pairwise(beats)) > 0.4


def test_a_stopped_rank_continues_after_the_duration(tmp_path) -> None:
    config = _config(tmp_path, {"kind": "sigstop", "step": 2, "duration": "1s"}, duration="4step")
    began_s = time.monotonic()
    assert exit_code(_fit, config) == 0
    assert time.monotonic() - began_s > 0.9


def test_a_slow_rank_takes_longer_in_its_forward_passes_alone(tmp_path) -> None:
    planned = {"kind": "slow_rank", "step": 1, "slowdown": 20.0}
    config = _config(tmp_path, planned, duration="20step")
    _fit(config)
    (slot,) = read_slots(slot_file(RunFolder.read(config.run_folder).log_folder(0), 0))
    assert slot.spent_s(Phase.FORWARD) > 3 * slot.spent_s(Phase.BACKWARD)
    assert slot.work_s(Phase.FORWARD) > 0.15 * slot.spent_s(Phase.FORWARD), "of the processor, which others use too"


def test_a_full_disk_refuses_the_checkpoints_of_the_rank(tmp_path) -> None:
    config = _config(tmp_path, {"kind": "full_disk", "rank": 1, "step": 7, "duration": "600s"}, ranks=2)
    run_ranks(2, _fit_until_the_disk_matters, config)
    failed = [event for event in RunFolder.read(config.run_folder).events() if event["event"] == "checkpoint_failed"]
    assert failed
    assert all("File too large" in event["reason"] for event in failed)
    assert failed[0]["step"] == 10


def _fit_until_the_disk_matters(rank: int, config: RunConfig) -> None:
    with pytest.raises(RetryableError, match="could not be saved"):
        fit(build(config))
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)  # the result is written to a file


def test_a_corrupt_shard_is_rejected_by_the_next_attempt(tmp_path) -> None:
    planned = ({"kind": "corrupt_shard", "step": 11}, {"kind": "exception", "step": 17})
    config = _config(tmp_path, *planned)
    with pytest.raises(InjectedError):
        _fit(config)
    _fit(config)
    events = RunFolder.read(config.run_folder).events()
    assert [Path(event["path"]).name for event in events if event["event"] == "checkpoint_rejected"] == [
        "step-00000015"
    ]
    assert [event["step"] for event in events if event["event"] == "resumed"] == [10]


def test_a_clock_that_jumps_changes_the_time_of_day_alone(tmp_path) -> None:
    before = clock.seconds_of(clock.utc_text())
    monotonic = time.monotonic()
    faults.inject(FaultConfig(kind="clock_jump", step=1, duration="0.3s"), tmp_path, None)
    assert before is not None
    assert 3590 < clock.seconds_of(clock.utc_text()) - before < 3660
    assert 3590 < clock.wall_s() - before < 3660
    assert time.monotonic() - monotonic < 60
    time.sleep(0.6)
    assert abs(clock.wall_s() - before) < 60
    assert abs(clock.seconds_of(clock.utc_text()) - before) < 60


def test_a_store_that_refuses_is_asked_again(tmp_path) -> None:
    faults.inject(FaultConfig(kind="store_503", step=1, duration="0.5s"), tmp_path, None)
    requests = Requests()
    assert requests.send("s3://bucket", "read", lambda: 17) == 17
    assert requests.slowed >= 1


def _mounted_read_only(folder: Path) -> None:
    faults.inject(FaultConfig(kind="read_only_disk", step=1), folder, None)
    with pytest.raises(OSError, match="Read-only file system"):
        (folder / "new").write_text("x")


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_a_read_only_disk_is_one_for_this_rank_alone(tmp_path) -> None:
    if subprocess.run(["unshare", "-m", "true"], capture_output=True, check=False).returncode != 0:
        pytest.skip("no mount namespace can be made here")
    assert exit_code(_mounted_read_only, tmp_path / "checkpoints") == 0
    (tmp_path / "checkpoints" / "new").write_text("x")


def test_what_cannot_be_injected_here_is_refused_before_the_first_step(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    for kind, reason in {
        "agent_death": "not started by Smalti's agent",
        "store_death": "not started by Smalti's agent",
        "read_only_disk": "needs root",
        "half_open_tcp": "needs root",
        "cut_line": "needs root",
        "store_503": "copies no checkpoint",
    }.items():
        with pytest.raises(UserError, match=f"chaos: {kind} cannot be injected: .*{re.escape(reason)}"):
            build(_config(tmp_path / kind, {"kind": kind, "step": 3}))
    monkeypatch.undo()
    if os.geteuid() == 0:
        with pytest.raises(UserError, match="in no network namespace"):
            build(_config(tmp_path / "root", {"kind": "cut_line", "step": 3}))


def test_faults_without_an_effect_are_refused_before_a_process_starts(tmp_path) -> None:
    for fault, reason, *overrides in (
        ({"kind": "store_503"}, "copies no checkpoint", f"train.checkpoint.save_to={tmp_path}/copies"),
        ({"kind": "store_503", "rank": 1}, "rank 0 alone copies", "train.checkpoint.save_to=s3://bucket/x"),
    ):
        config = _config(tmp_path, {**fault, "step": 3}, ranks=2)
        (tmp_path / "r.yaml").write_text(dump(config))
        code, output = start("train", str(tmp_path / "r.yaml"), *overrides).finish()
        assert (code, "hint: " in output) == (2, True), output
        assert f"chaos: store_503 cannot be injected: {reason}" in output or reason in output
        assert not Path(config.run_folder).exists(), "no attempt was opened"


def test_a_line_between_ranks_of_one_machine_cannot_be_cut(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(chaos_needs, "_in_named_network", lambda: True)
    config = _config(tmp_path, {"kind": "cut_line", "step": 3}, ranks=2)
    with pytest.raises(UserError, match="no line to cut"):
        chaos_needs.require_possible(config, by_agent=True, one_machine=True)
    chaos_needs.require_possible(config, by_agent=False, one_machine=False)


def test_an_injected_error_is_named_as_such_and_not_as_a_bug(tmp_path) -> None:
    config = _config(tmp_path, {"kind": "exception", "step": 3}, ranks=1)
    (tmp_path / "r.yaml").write_text(dump(config))
    code, output = start("train", str(tmp_path / "r.yaml"), "train.restart.attempts=0").finish()
    assert code == 1
    assert "injected by chaos: exception of rank 0 at step 3 in forward" in output
    assert "bug in Smalti" not in output
    assert "Traceback" in (Path(config.run_folder) / "logs/attempt-0/rank-000.log").read_text()


def test_the_agent_can_be_killed_and_the_same_command_continues(tmp_path) -> None:
    config = _config(tmp_path, {"kind": "agent_death", "rank": 1, "step": 13}, ranks=2)
    (tmp_path / "r.yaml").write_text(dump(config))
    agent = start("train", str(tmp_path / "r.yaml"))
    assert agent.finish()[0] == -signal.SIGKILL
    complete = Path(config.run_folder).glob("checkpoints/step-*/COMPLETE")
    newest = max(int(path.parent.name.removeprefix("step-")) for path in complete)
    assert newest in (5, 10)  # on a busy machine step 10 is not written completely before the kill
    code, output = start("train", str(tmp_path / "r.yaml")).finish()
    assert code == 0, output
    events = [json.loads(line) for line in (Path(config.run_folder) / "events.jsonl").read_text().splitlines()]
    assert [event["step"] for event in events if event["event"] == "resumed"] == [newest]
