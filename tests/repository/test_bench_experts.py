"""The study of experts compares what it says it does: equal FLOPs, equal active parameters, the same data."""

import importlib.util
import math
import sys
from pathlib import Path
from types import ModuleType

import pytest
from bench_script import ROOT, bench

from smalti.cost.flops import train_flops_per_token
from smalti.cost.params import count


@pytest.fixture(scope="module")
def experts() -> ModuleType:
    spec = importlib.util.spec_from_file_location("bench_experts", ROOT / "bench" / "experts.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_equal_flops_and_equal_active_parameters(experts: ModuleType, tmp_path: Path) -> None:
    size = experts.Size()
    configs = {arm: experts.config_of(tmp_path, size, arm, 1) for arm in experts.ARMS}
    step = {arm: train_flops_per_token(config.model, size.seq_len) for arm, config in configs.items()}
    whole = size.steps * step["dense"]
    dense = count(configs["dense"].model)
    for arm, config in configs.items():
        params, steps = count(config.model), config.length.total_steps
        assert 0 <= whole - steps * step[arm] < step[arm], "as many whole steps as the dense model's FLOPs allow"
        assert steps == pytest.approx(size.steps, rel=0.01)
        assert params.active - params.router == dense.active
        assert params.mlp_active == dense.mlp
        assert (config.seed, config.data) == (1, configs["dense"].data)
        assert config.train.optimizer == configs["dense"].train.optimizer


def test_interval_of_three_by_hand(experts: ModuleType) -> None:
    mean, half = experts.interval([1.0, 2.0, 3.0])
    assert mean == 2.0
    assert half == pytest.approx(4.303 / math.sqrt(3))


@pytest.mark.exhaustive
def test_quick_run_prints_a_row_for_each(tmp_path: Path) -> None:
    table = bench("experts.py", "--quick", "--folder", str(tmp_path))
    rows = [line.split(" | ") for line in table.splitlines() if line.startswith("| ")]
    assert [row[0].removeprefix("| ") for row in rows[2:]] == ["dense", "1 of 8", "2 of 8", "4 of 16"]
    assert all(0 < float(row[5].split(" ± ")[0]) < 9 for row in rows[2:])
