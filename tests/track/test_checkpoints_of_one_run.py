"""A folder and a store take the checkpoints of one run, from before and after a fork, whichever is copied first."""

from pathlib import Path

import pytest
from example_config import example_config
from made_checkpoints import checkpoint

from smalti.base.errors import DataError
from smalti.base.objects import Requests
from smalti.config.fork import fork
from smalti.config.load import dump
from smalti.track.checkpoint_places import OfStore
from smalti.track.checkpoints.copies import Copies
from smalti.track.checkpoints.copying import copy_to
from smalti.track.checkpoints.names import complete

BEFORE = example_config()
FORKED = fork(BEFORE, example_config("train.duration=200step"), 5, "d").after
OTHER = example_config("seed=18")


def silent(name: str, done: int, total: int) -> None:
    """Show nothing."""


@pytest.fixture
def saved(tmp_path: Path) -> dict[str, Path]:
    """Checkpoints of the steps 1 (before the fork), 2 (after it) and 3 (of another run)."""
    configs = {"before": BEFORE, "after": FORKED, "other": OTHER}
    return {
        run: checkpoint(tmp_path / run / "checkpoints", step, shards=1, shard_bytes=100, config=dump(config))
        for step, (run, config) in enumerate(configs.items(), 1)
    }


def _copy_of_other(saved: dict[str, Path], store: str) -> OfStore:
    """Copy the checkpoint of the other run to a store of its own."""
    copy_to(saved["other"], store)
    return OfStore(store)


@pytest.mark.parametrize("order", [("before", "after"), ("after", "before")])
@pytest.mark.parametrize("kind", ["folder", "store"])
def test_a_fork_is_the_same_run(kind: str, order: tuple[str, str], saved: dict[str, Path], tmp_path: Path) -> None:
    target = str(tmp_path / "copies") if kind == "folder" else f"memory://{tmp_path.name}/copies"
    for run in order:
        copy_to(saved[run], target)
    with pytest.raises(DataError, match="has checkpoints of another run"):
        copy_to(saved["other"], target)
    assert len(complete(target) if kind == "folder" else OfStore(target).named([])) == 2


def test_a_store_takes_no_copy_of_another_run_from_a_store(saved: dict[str, Path], tmp_path: Path) -> None:
    target, other = (f"memory://{tmp_path.name}/{name}" for name in ("copies", "others"))
    copy_to(saved["before"], target)
    with pytest.raises(DataError, match="has checkpoints of another run"):
        _copy_of_other(saved, other).copy("step-00000003", target, silent)
    assert OfStore(target).named([]) == ["step-00000001"]


@pytest.mark.parametrize("has", ["a checkpoint", "config.yaml"])
def test_the_folder_of_a_run_takes_no_copy_of_another(has: str, saved: dict[str, Path], tmp_path: Path) -> None:
    place = _copy_of_other(saved, f"memory://{tmp_path.name}/others")
    target = tmp_path / "run" / "checkpoints"
    target.mkdir(parents=True)
    if has == "a checkpoint":
        copy_to(saved["before"], str(target))
    else:
        (tmp_path / "run" / "config.yaml").write_text(dump(BEFORE))
    with pytest.raises(DataError, match="has checkpoints of another run"):
        place.copy("step-00000003", str(target), silent)
    assert not list(target.glob("*3*"))


def test_a_copy_whose_checkpoint_is_of_another_run_or_step_is_not_verified(
    saved: dict[str, Path], tmp_path: Path
) -> None:
    copies = Copies(f"memory://{tmp_path.name}/copies", Requests())
    copies.upload(saved["before"], config=dump(BEFORE))
    copies.upload(saved["other"], config=dump(BEFORE))
    copies.upload(saved["after"], config=dump(FORKED), named="step-00000004")
    place = OfStore(copies.url)
    assert place.verify("step-00000001", silent) is None
    assert "it is of another run; what differs (there -> here): seed: 18 -> 17" in str(
        place.verify("step-00000003", silent)
    )
    assert "it is the checkpoint of step 2" in str(place.verify("step-00000004", silent))
