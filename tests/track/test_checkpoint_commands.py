"""Commands on checkpoints: facts from folders, events and metrics; verified copies; which may be deleted."""

import errno
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from synthetic_checkpoint import steps_in, write_checkpoint
from synthetic_run import write_lines
from test_track_run import open_run

from smalti.base.errors import DataError, RetryableError, UserError
from smalti.base.objects import Requests
from smalti.track import checkpoint_commands as commands
from smalti.track.checkpoints import manifest
from smalti.track.checkpoints.copies import Copies
from smalti.track.checkpoints.copying import copy_to
from smalti.track.checkpoints.facts import checkpoints
from smalti.track.checkpoints.marks import BLESSED, PROTECTED, mark, registered_in
from smalti.track.checkpoints.names import BEST
from smalti.track.events import EventLog
from smalti.track.run import RunFolder


def silent(name: str, done: int, total: int) -> None:
    """Progress of which nothing is shown."""


@pytest.fixture
def run(tmp_path: Path) -> Iterator[RunFolder]:
    """A run that saved steps 10 to 40, resumed from 20 after that, saved 30 and 40 again, and is training."""
    run = open_run(tmp_path)
    events, rows = run.event_log(), []
    for attempt, steps in ((0, (10, 20, 30, 40)), (1, (30, 40))):
        events.attempt = attempt
        if attempt:
            events.write("resumed", step=20, path=str(run.checkpoint(20)))
        for step in steps:
            if not run.checkpoint(step).exists():
                write_checkpoint(run.checkpoints, step)
            rows.append({"step": step, "ckpt/save_s": 0.5, **({"ckpt/block_s": 0.25} if step == 40 else {})})
            events.write("checkpoint_saved", step=step, path=str(run.checkpoint(step)), seconds=0.5)
    events.close()
    write_lines(run.path / "metrics.jsonl", rows)
    yield run
    run.close()


def test_facts_of_folders_events_and_metrics(run: RunFolder) -> None:
    mark(run.checkpoint(10), BLESSED)
    mark(run.checkpoint(30), PROTECTED)
    (run.checkpoints / BEST).write_text("step-00000020\n")
    (run.checkpoint(10) / "manifest.json").write_text("{")
    facts = {each.step: each for each in checkpoints(run.path)}
    assert list(facts) == [10, 20, 30, 40]
    assert {step: each.parent for step, each in facts.items()} == {10: None, 20: 10, 30: 20, 40: 30}
    assert {step: each.attempt for step, each in facts.items()} == {10: 0, 20: 0, 30: 1, 40: 1}
    assert {step: each.block_s for step, each in facts.items()} == {10: 0.5, 20: 0.5, 30: 0.5, 40: 0.25}
    assert [each.tokens for each in facts.values()] == [80, 160, 240, 320]
    assert facts[10].bytes is None, "its manifest is damaged"
    assert facts[20].bytes == sum(entry["bytes"] for entry in manifest.listed(run.checkpoint(20))[0])
    assert [step for step, each in facts.items() if each.verified] == [20], "a resume verifies"
    assert [step for step, each in facts.items() if each.blessed] == [10]
    assert [(each.best, each.protected, each.newest) for each in facts.values()] == [
        (False, False, False), (True, False, False), (False, True, False), (False, False, True)
    ]  # fmt: skip


def test_a_checkpoint_without_history_is_listed(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "checkpoints", 5)
    (facts,) = checkpoints(tmp_path)
    assert (facts.step, facts.tokens, facts.saved, facts.parent, facts.block_s) == (5, 40, None, None, None)
    assert facts.locations == (str(tmp_path / "checkpoints/step-00000005"),)
    assert checkpoints(tmp_path / "nothing") == []


def test_steps_are_named(run: RunFolder) -> None:
    (run.checkpoints / BEST).write_text("step-00000020\n")
    mark(run.checkpoint(10), BLESSED)
    names = commands.named(run.path, ["newest", "best", "blessed", "30", "step-00000030"])
    assert [path.name[-2:] for path in names] == ["40", "20", "10", "30"]
    assert [path.name[-2:] for path in commands.named(run.path, [])] == ["10", "20", "30", "40"]
    for wrong in ("15", "-1", "first", "²"):
        with pytest.raises(UserError, match=f"no complete checkpoint '{wrong}'") as caught:
            commands.named(run.path, [wrong])
        assert caught.value.allowed == "10, 20, 30, 40, newest, best, blessed"


def test_verification_is_recorded_and_damage_takes_the_record_back(run: RunFolder) -> None:
    seen: list[int] = []
    assert commands.verify(run.checkpoint(40), lambda name, done, total: seen.append(total - done)) is None
    assert len(seen) == 3
    assert seen[-1] == 0
    assert {each.step: each.verified is not None for each in checkpoints(run.path)}[40]
    file = run.checkpoint(40) / "shards/__1_0.distcp"
    file.write_bytes(b"\1" + file.read_bytes()[1:])
    assert commands.verify(run.checkpoint(40), silent) == "shards/__1_0.distcp does not match its digest"
    assert not {each.step: each.verified for each in checkpoints(run.path)}[40]


def test_deletion_spares_what_is_kept_and_what_a_training_run_needs(run: RunFolder) -> None:
    (run.checkpoints / BEST).write_text("step-00000020\n")
    with pytest.raises(UserError, match="the run is training and may have to resume"):
        commands.check_deletable(run.path, [run.checkpoint(30)], force=True)
    commands.remove(run.path, [run.checkpoint(10)], force=False)
    with pytest.raises(UserError, match="is kept as best"):
        commands.remove(run.path, [run.checkpoint(20)], force=False)
    run.close()  # the run has ended
    with pytest.raises(UserError, match="is kept as newest"):
        commands.remove(run.path, [run.checkpoint(30), run.checkpoint(40)], force=False)
    assert steps_in(run.checkpoints) == [20, 30, 40], "all or none"
    commands.remove(run.path, [run.checkpoint(30), run.checkpoint(20)], force=True)
    assert steps_in(run.checkpoints) == [40]
    deleted = [(event["step"], event["reason"]) for event in run.events() if event["event"] == "checkpoint_deleted"]
    assert deleted == [(10, "by command"), (30, "by command"), (20, "by command")]


def test_a_registered_checkpoint_is_removed_from_the_registry_first(run: RunFolder) -> None:
    mark(run.checkpoint(10), registered_in(Path("smalti.db")))
    assert checkpoints(run.path)[0].registered
    with pytest.raises(UserError, match="is kept as registered") as caught:
        commands.remove(run.path, [run.checkpoint(10)], force=False)
    assert "smalti models rm" in str(caught.value.hint)
    commands.remove(run.path, [run.checkpoint(10)], force=True)
    assert steps_in(run.checkpoints) == [20, 30, 40]


def test_a_copy_is_verified_whole_and_named_in_the_list(run: RunFolder, tmp_path: Path) -> None:
    mark(run.checkpoint(40), PROTECTED)
    place = commands.copy(run.path, run.checkpoint(40), str(tmp_path / "copies"), silent)
    assert manifest.fault(place) is None
    assert not (Path(place) / PROTECTED).exists()
    assert sorted(path.name for path in (tmp_path / "copies").iterdir()) == ["step-00000040"]
    assert checkpoints(run.path)[-1].locations == (str(run.checkpoint(40)), place)
    before = Path(place).stat().st_mtime_ns
    assert commands.copy(run.path, run.checkpoint(40), str(tmp_path / "copies"), silent) == place
    assert Path(place).stat().st_mtime_ns == before
    (Path(place) / "train_state.json").unlink()
    with pytest.raises(DataError, match=r"train_state\.json is missing"):
        commands.copy(run.path, run.checkpoint(40), str(tmp_path / "copies"), silent)


def test_a_copy_of_a_run_whose_folder_takes_no_event_is_a_copy(
    run: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise RetryableError("events.jsonl could not be written: Read-only file system")

    monkeypatch.setattr(EventLog, "write", refuse)
    place = commands.copy(run.path, run.checkpoint(40), str(tmp_path / "copies"), silent)
    assert manifest.fault(Path(place)) is None


def test_an_interrupted_copy_is_no_checkpoint_and_continues(
    run: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "copies"
    fsync, calls = os.fsync, []

    def fills(file: int) -> None:
        calls.append(file)
        if len(calls) == 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        fsync(file)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fills)
        with pytest.raises(RetryableError, match="the disk is full"):
            copy_to(run.checkpoint(40), str(target))
    (first,) = (path for path in target.rglob("*") if path.is_file())
    assert not list(target.rglob("COMPLETE"))
    before = first.stat().st_mtime_ns
    place = Path(copy_to(run.checkpoint(40), str(target)))
    assert manifest.fault(place) is None
    assert (place / "shards" / first.name).stat().st_mtime_ns == before
    assert [path.name for path in target.iterdir()] == [place.name]


def test_damage_is_not_copied_and_another_checkpoint_not_replaced(run: RunFolder, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "other", 40, n_bytes=10)
    with pytest.raises(DataError, match="is not this checkpoint: it is another checkpoint"):
        copy_to(run.checkpoint(40), str(tmp_path / "other"))
    file = run.checkpoint(30) / "shards/__0_0.distcp"
    file.write_bytes(b"\1" + file.read_bytes()[1:])
    with pytest.raises(DataError, match="does not match its digest"):
        copy_to(run.checkpoint(30), str(tmp_path / "copies"))
    file.unlink()
    with pytest.raises(DataError, match="is missing"):
        copy_to(run.checkpoint(30), str(tmp_path / "copies"))
    shutil.rmtree(run.checkpoint(20) / "shards")
    (run.checkpoint(20) / "COMPLETE").write_text("0")
    with pytest.raises(DataError, match="does not match its digest in COMPLETE"):
        copy_to(run.checkpoint(20), str(tmp_path / "copies"))
    assert steps_in(tmp_path / "copies") == []


def test_a_copy_in_a_store_has_the_config_of_the_run(run: RunFolder, tmp_path: Path) -> None:
    url = f"memory://{tmp_path.name}/a"
    place = commands.copy(run.path, run.checkpoint(40), url, silent)
    assert place == f"{url}/step-00000040"
    assert checkpoints(run.path)[-1].locations == (str(run.checkpoint(40)), place)
    configs: list[str | None] = []
    fetched = Copies(url, Requests()).newest(tmp_path / "fetched", check=configs.append)
    assert configs == [(run.path / "config.yaml").read_text()]
    assert fetched is not None
    assert manifest.fault(fetched) is None
