"""A folder takes the checkpoints of one run, from before and after a fork, whichever is copied first."""

from pathlib import Path

import pytest
from example_config import example_config
from made_checkpoints import checkpoint

from smalti.base.errors import DataError
from smalti.config.fork import fork
from smalti.config.load import dump
from smalti.track.checkpoints.copying import copy_to
from smalti.track.checkpoints.names import complete

BEFORE = example_config()
FORKED = fork(BEFORE, example_config("train.duration=200step"), 5, "d").after
OTHER = example_config("seed=18")


@pytest.fixture
def saved(tmp_path: Path) -> dict[str, Path]:
    """Checkpoints of the steps 1 (before the fork), 2 (after it) and 3 (of another run)."""
    configs = {"before": BEFORE, "after": FORKED, "other": OTHER}
    return {
        run: checkpoint(tmp_path / run / "checkpoints", step, shards=1, shard_bytes=100, config=dump(config))
        for step, (run, config) in enumerate(configs.items(), 1)
    }


@pytest.mark.parametrize("order", [("before", "after"), ("after", "before")])
def test_a_fork_is_the_same_run(order: tuple[str, str], saved: dict[str, Path], tmp_path: Path) -> None:
    target = str(tmp_path / "copies")
    for run in order:
        copy_to(saved[run], target)
    with pytest.raises(DataError, match="has checkpoints of another run"):
        copy_to(saved["other"], target)
    assert len(complete(target)) == 2
