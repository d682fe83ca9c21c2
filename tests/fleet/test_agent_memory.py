"""The folder of shared memory that an agent owns: private, empty, locked, and removed however the agent ends."""

from pathlib import Path

import pytest
import toy_run

from smalti.base.errors import ExitCode, UserError
from smalti.config.restart import RestartConfig
from smalti.config.run import RunConfig
from smalti.cost.memory.per_rank import memory_per_rank
from smalti.fleet.agent import memory
from smalti.fleet.agent.outcome import Outcome
from smalti.fleet.agent.restarts import Restarts
from smalti.track.run import RunFolder


@pytest.fixture(autouse=True)
def shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "shm"
    folder.mkdir()
    monkeypatch.setattr(memory, "SHARED", folder)
    return folder


def _config(root: Path, peer_copies: str | None = "2step") -> RunConfig:
    return toy_run.config(root, checkpoint={"peer_copies": peer_copies})


def test_the_folder_is_private_and_ends_with_the_agent(tmp_path: Path, shared: Path) -> None:
    with memory.peer_memory(_config(tmp_path)) as folder:
        assert folder is not None
        assert folder.parent == shared
        assert folder.stat().st_mode & 0o777 == 0o700
        (folder / "step-00000001").mkdir()
    assert not list(shared.iterdir())


def test_without_the_option_there_is_none(tmp_path: Path, shared: Path) -> None:
    with memory.peer_memory(_config(tmp_path, None)) as folder:
        assert folder is None
        assert not list(shared.iterdir())


def test_leftovers_are_removed_and_the_folders_of_running_agents_stay(tmp_path: Path, shared: Path) -> None:
    config = _config(tmp_path)
    with memory.peer_memory(config) as running:
        assert running is not None
        leftover = Path(f"{running}left")
        (leftover / "step-00000001").mkdir(parents=True)
        other = shared / "smalti-x"
        other.mkdir()
        memory.remove_leftovers()
        with memory.peer_memory(config) as folder:
            assert set(shared.iterdir()) == {running, folder, other}


def test_too_little_memory_is_refused_with_what_is_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "peer_copies", lambda config: 1 << 40)
    with pytest.raises(UserError, match=r"peer_copies needs .* of shared memory.* free"):
        memory.require_room(_config(tmp_path))
    memory.require_room(_config(tmp_path, None))


def test_a_machine_without_shared_memory_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "SHARED", tmp_path / "absent")
    with pytest.raises(UserError, match="this machine has no /dev/shm"):
        memory.require_room(_config(tmp_path))


def test_the_planner_counts_two_copies(tmp_path: Path) -> None:
    with_copies, without = (memory_per_rank(_config(tmp_path, copies)) for copies in ("2step", None))
    assert with_copies.peer_copies_bytes == 2 * without.staging_bytes
    assert with_copies.total_bytes == without.total_bytes + with_copies.peer_copies_bytes, "host memory, on a CPU"


def test_a_newer_copy_is_progress_between_attempts(tmp_path: Path, shared: Path) -> None:
    folder = RunFolder.join(tmp_path, 0)
    restarts = Restarts(RestartConfig(no_progress=2), folder, 2, memory=shared)
    fault = Outcome(ExitCode.RETRY, "a rank was killed", cause="killed", rank=1)
    for step in range(1, 6):
        (shared / f"step-{step:08d}").mkdir()
        (shared / f"step-{step:08d}" / "COMPLETE").touch()
        outcome = restarts.decide(fault, folder, ranks=2)
        assert outcome.restarts
        assert f"from the checkpoint of step {step}" in (outcome.hint or "")
    assert restarts.decide(fault, folder, ranks=2).restarts
    assert restarts.decide(fault, folder, ranks=2).code == ExitCode.NO_PROGRESS
