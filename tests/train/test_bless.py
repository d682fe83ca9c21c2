"""Blessing in the loop: at saves, by the steps since the last fault, on rank 0."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from synthetic_checkpoint import write_checkpoint

from smalti.config.durations import LengthConfig, RunLength
from smalti.track.checkpoints.marks import BLESSED, is_marked
from smalti.train.bless import Bless

LENGTH = RunLength.of(LengthConfig(duration="1000step", global_batch_tokens=10))


class Run:
    """A run folder, its events and the calls of the loop."""

    def __init__(self, folder: Path, *events: dict[str, Any]) -> None:
        self.written: list[tuple[str, int]] = []
        self.job: Any = SimpleNamespace(
            folder=SimpleNamespace(checkpoints=folder, events=lambda: events),
            is_first=True,
            length=LENGTH,
            events=SimpleNamespace(write=lambda kind, *, step: self.written.append((kind, step))),
        )
        self.hook = Bless("100step")
        self.hook.on_start(self.job)

    def save(self, *steps: int) -> list[int]:
        """Save at these steps; returns the steps that were blessed."""
        for step in steps:
            self.hook.on_checkpoint(self.job, str(write_checkpoint(self.job.folder.checkpoints, step)))
        assert all(kind == "checkpoint_blessed" for kind, _ in self.written)
        return [step for _, step in self.written]


def test_a_checkpoint_is_blessed_at_a_save_far_enough_beyond_it(tmp_path: Path) -> None:
    assert Run(tmp_path).save(50, 100, 149) == []
    assert Run(tmp_path).save(150, 210) == [50, 100]
    assert is_marked(tmp_path / "step-00000100", BLESSED)


def test_after_a_fault_steps_are_counted_from_the_resume(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, 50)
    events = ({"event": "not_finite", "step": 140}, {"event": "resumed", "step": 139})
    assert Run(tmp_path, *events).save(200) == []
    assert Run(tmp_path, *events).save(239) == [50]


def test_other_ranks_and_a_failing_disk_bless_nothing(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.job.is_first = False
    assert run.save(50, 200) == []
    run = Run(tmp_path)
    (tmp_path / "step-00000050" / BLESSED).mkdir()  # a mark that can be neither read nor written
    run.hook.on_checkpoint(run.job, str(tmp_path / "step-00000200"))
    assert run.written == []
