"""Checkpoints beside a store: time for lists and reads, failures beside a usable checkpoint, nodes that lack a copy."""

from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from example_config import example_config
from made_checkpoints import checkpoint

from smalti.base.errors import RetryableError
from smalti.base.objects import Requests
from smalti.track.checkpoints.copies import Copies
from smalti.track.events import NoEventLog
from smalti.track.run import RunFolder
from smalti.train import checkpoint_copies
from smalti.train.checkpoint_copies import StoredCheckpoints
from smalti.train.resume import Checkpoints


@pytest.fixture(autouse=True)
def alone(tmp_path: Path) -> Iterator[None]:
    """A process group of one rank."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def stored(tmp_path: Path) -> StoredCheckpoints:
    """The copies of the steps 1 and 2 of a run whose folder has none."""
    config = example_config("train.checkpoint.save_to=" + str(tmp_path / "store"))
    config = config.model_copy(update={"folder": str(tmp_path / "runs" / "small")})
    (tmp_path / "store").mkdir()
    copies = Copies(str(tmp_path / "store" / config.name), Requests())
    for step in (1, 2):
        copies.upload(checkpoint(tmp_path / "saved", step, shards=1, shard_bytes=100))
    folder = RunFolder(config.run_folder)
    folder.checkpoints.mkdir(parents=True)
    return StoredCheckpoints(config, folder, NoEventLog())


def test_a_read_that_fails_is_passed_over_where_there_is_a_checkpoint_and_tried_again_where_there_is_none(
    stored: StoredCheckpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any) -> bytes:
        raise RetryableError("the store does not respond correctly")

    with monkeypatch.context() as patch:
        patch.setattr(Copies, "part", fails)
        assert stored.fetch_newer(1) is None
        with pytest.raises(RetryableError, match="does not respond"):
            stored.fetch_newer(None)
    fetched = stored.fetch_newer(None)
    assert fetched is not None
    assert Path(fetched).name == "step-00000002"


def test_a_killed_restore_leaves_nothing(stored: StoredCheckpoints) -> None:
    checkpoints = stored._folder.checkpoints
    (checkpoints / ".step-00000007.fetching/shards").mkdir(parents=True)
    assert stored.fetch_newer(None) is not None
    assert [path.name for path in checkpoints.iterdir()] == ["step-00000002"]


def test_only_the_listing_has_less_time(stored: StoredCheckpoints, monkeypatch: pytest.MonkeyPatch) -> None:
    times = []
    of = checkpoint_copies._copies

    def noted(config: Any, give_up_s: float = checkpoint_copies.GIVE_UP_S) -> Copies:
        times.append(give_up_s)
        return of(config, give_up_s)

    monkeypatch.setattr(checkpoint_copies, "_copies", noted)
    assert stored.fetch_newer(1) is not None
    assert times == [checkpoint_copies._LOOK_S, checkpoint_copies.GIVE_UP_S]


def test_a_result_that_comes_at_the_time_limit_is_returned() -> None:
    class Late(Future[int]):
        def result(self, timeout: float | None = None) -> int:
            if not self.done():
                self.set_result(3)
                raise TimeoutError
            return super().result(timeout)

    assert checkpoint_copies._result(Late()) == (3,)
    assert checkpoint_copies._result(Future[int]()) is None


def test_a_node_that_lacks_a_rejected_copy_in_memory_does_not_fail(tmp_path: Path) -> None:
    memory = tmp_path / "memory"
    Checkpoints(RunFolder(tmp_path), NoEventLog(), memory)._reject(str(memory / "step-00000001"), "it is damaged")
    assert not memory.exists()
