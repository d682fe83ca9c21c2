"""The number of ranks is one word: in the recipe, or the launcher's; nothing else of the run changes with it."""

from pathlib import Path

import pytest
from train_process import losses, one_rank, train, write_recipe

from smalti.config.identity import difference, placement_difference
from smalti.config.load import load
from smalti.config.run import RunConfig

pytestmark = pytest.mark.slow


@pytest.mark.exhaustive
def test_one_two_and_four_ranks_change_one_word_and_learn_the_same(tmp_path: Path):
    write_recipe(tmp_path, one_rank())
    curves, configs = {}, {}
    for ranks in (1, 2, 4):
        changes = [f"train.parallel.ranks={ranks}", f"name=of-{ranks}", "train.precision.compute=fp32"]
        assert (done := train(tmp_path, "r.yaml", *changes)).returncode == 0, done.stderr
        folder = tmp_path / f"runs/of-{ranks}"
        curves[ranks] = losses(folder)
        configs[ranks] = load(RunConfig, str(folder / "config.yaml"), ["name=same"]).config
    assert len(curves[1]) == 30
    for ranks in (2, 4):
        for (step, ours), (same_step, alone) in zip(curves[ranks], curves[1], strict=True):
            assert step == same_step
            assert ours == pytest.approx(alone, rel=1e-5)
        assert difference(configs[1], configs[ranks]) == []
        assert placement_difference(configs[1], configs[ranks]) == [f"train.parallel.ranks: 1 -> {ranks}"]


@pytest.mark.exhaustive
def test_a_launchers_number_of_ranks_counts_with_a_warning(tmp_path: Path):
    write_recipe(tmp_path, one_rank())
    world = {"WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    done = train(tmp_path, "r.yaml", "train.parallel.ranks=4", **world)
    assert done.returncode == 0, done.stderr
    assert (
        "a launcher has started 1 rank, the recipe says train.parallel.ranks=4; the launcher's number is used"
        in done.stderr
    )
    assert load(RunConfig, str(tmp_path / "runs/t/config.yaml")).config.train.parallel.ranks == 1
