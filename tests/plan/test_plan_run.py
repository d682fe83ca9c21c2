"""The budget: steps and tokens, times that follow the rate, mixture shares, tables that rise."""

import json
import math
from typing import Any

import pytest
from example_config import example_config
from synthetic_machine import machine

from smalti.base.errors import DataError, UserError
from smalti.config.hardware import hardware
from smalti.cost.params import count
from smalti.cost.step_time.step import step_time
from smalti.plan.run_plan import plan_run, steps_by_kind
from smalti.plan.verify import Comparison, verify


def test_small_run() -> None:
    plan = plan_run(example_config(), rate_flops_per_s=5e11)
    assert (plan.steps, plan.tokens) == (100, 819_200)
    assert plan.total_flops == plan.flops_per_token * 819_200
    assert plan.step_s == pytest.approx(plan.flops_per_token * 8192 / 5e11)
    assert plan.total_s == pytest.approx(100 * (plan.step_s or 0))
    assert plan.tokens_per_s == pytest.approx(8192 / (plan.step_s or 1))
    assert plan.tokens_per_param == plan.tokens / plan.params.total
    assert plan.step_s_low is None, "a rate that is given has no interval"


def test_a_duration_in_tokens_is_rounded_up() -> None:
    assert plan_run(example_config("train.duration=819201tok")).steps == 101


def test_without_a_rate_no_time_is_made_up() -> None:
    plan = plan_run(example_config())
    assert (plan.step_s, plan.total_s, plan.tokens_per_s, plan.mfu_frac) == (None, None, None, None)


def test_json_is_flat_and_names_the_formula() -> None:
    value = json.loads(json.dumps(plan_run(example_config(), machine=machine()).to_json()))
    assert value["flops_formula"] == "6N+12LHQS"
    assert all(not isinstance(one, dict | list) for one in value.values())


@pytest.mark.parametrize("bad", [{"rate_flops_per_s": 0.0}, {"rate_flops_per_s": math.inf}])
def test_impossible_rates(bad: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="is out of range"):
        plan_run(example_config(), **bad)


def test_a_device_gives_times_with_an_interval() -> None:
    config = example_config()
    plan, step = plan_run(config, machine=machine()), step_time(config, machine())
    assert plan.step_s == pytest.approx(step.total_s)
    assert (plan.step_s_low or 0) < (plan.step_s or 0) < (plan.step_s_high or 0)
    assert plan.total_s == pytest.approx(100 * step.total_s)
    assert plan.mfu_frac == pytest.approx(step.model_flops / step.total_s / 4e11), "the CPU's peak is of all ranks"
    gpus = plan_run(example_config("train.parallel.ranks=4"), machine=hardware("h100-sxm"))
    assert gpus.peak_flops_per_s == pytest.approx(4 * 989.4e12)
    with pytest.raises(UserError, match="exclude each other"):
        plan_run(config, machine=machine(), rate_flops_per_s=1e12)


def test_steps_of_several_kinds_are_added_up() -> None:
    ramp = "train.batch_ramp=[{until: 40step, global_batch_tokens: 4096}]"
    config = example_config(ramp, "data.stages.1.seq_len=512")
    kinds = steps_by_kind(config)
    assert kinds == {(4096, 256): 40, (8192, 256): 40, (8192, 512): 20}
    expected = sum(
        number * step_time(config, machine(), batch_tokens=batch, seq_len=seq_len).total_s
        for (batch, seq_len), number in kinds.items()
    )
    assert plan_run(config, machine=machine()).total_s == pytest.approx(expected)


def verified(**more: Any) -> dict[str, Comparison]:
    values: dict[str, Any] = {"machine": machine(), "peak_flops_per_s": 4e11, **more}
    return {one.name: one for one in verify(example_config(), **values)}


def test_verify_compares_medians_after_the_start() -> None:
    plan = plan_run(example_config(), machine=machine())
    speed = (plan.tokens_per_s or 0) / 2
    found = verified(tokens_per_s=[1.0] + 9 * [speed], tokens_learned=819_200)
    assert found["step_s"].ratio == pytest.approx(2)
    assert found["tokens_per_s"].ratio == pytest.approx(0.5)
    assert found["mfu_frac"].predicted == pytest.approx(plan.mfu_frac)
    assert found["tokens"].ratio == 1
    assert verified(tokens_per_s=[speed], peak_flops_per_s=None)["mfu_frac"].predicted is None


def test_verify_compares_checkpoints() -> None:
    config = example_config()
    found = verified(
        tokens_per_s=[10.0], checkpoint_bytes=20e6, checkpoint_blocked_s=0.01, checkpoint_staging_bytes=1e6
    )
    assert found["checkpoint_bytes"].predicted == 3 * 4 * count(config.model).total
    assert found["checkpoint_bytes"].measured == 20e6
    assert found["checkpoint_staging_bytes"].predicted == found["checkpoint_bytes"].predicted, "one rank writes all"
    assert found["checkpoint_staging_bytes"].measured == 1e6
    assert found["checkpoint_blocked_s"].predicted == 0, "the copy of 20 MB is hidden behind the passes"
    slow = machine().model_copy(update={"memory_bytes_per_s": 1e6})
    assert (verified(tokens_per_s=[10.0], machine=slow)["checkpoint_blocked_s"].predicted or 0) > 0


def test_verify_without_a_device_predicts_no_time() -> None:
    found = verified(machine=None, tokens_per_s=[10.0])
    assert {
        name: one.predicted
        for name, one in found.items()
        if name not in ("tokens", "checkpoint_bytes", "checkpoint_staging_bytes")
    } == dict.fromkeys(("step_s", "tokens_per_s", "mfu_frac", "train_s", "checkpoint_blocked_s"))


def test_verify_a_run_that_logged_nothing() -> None:
    with pytest.raises(DataError, match="has not logged its throughput"):
        verified(tokens_per_s=[])
