"""The budget: steps and tokens, times that follow the rate, mixture shares, tables that rise."""

import json
import math

import pytest
from made_config import made_config

from smalti.base.errors import DataError, UserError
from smalti.plan.efficiency import CPU_FRAC, CUDA_FRAC, efficiency_frac
from smalti.plan.run import plan_run
from smalti.plan.verify import verify


def test_small_run() -> None:
    plan = plan_run(made_config(), rate_flops_per_s=1e12, efficiency_frac=0.5)
    assert (plan.steps, plan.tokens) == (100, 819_200)
    assert plan.total_flops == plan.flops_per_token * 819_200
    assert plan.step_s == pytest.approx(plan.flops_per_token * 8192 / 5e11)
    assert plan.total_s == pytest.approx(100 * (plan.step_s or 0))
    assert plan.tokens_per_s == pytest.approx(8192 / (plan.step_s or 1))
    assert plan.tokens_per_param == plan.tokens / plan.params.total


def test_a_duration_in_tokens_is_rounded_up() -> None:
    assert plan_run(made_config("train.duration=819201tok")).steps == 101


def test_without_a_rate_no_time_is_made_up() -> None:
    plan = plan_run(made_config())
    assert (plan.step_s, plan.total_s, plan.tokens_per_s, plan.efficiency_frac) == (None, None, None, None)


def test_json_is_flat_and_names_the_formula() -> None:
    value = json.loads(json.dumps(plan_run(made_config(), rate_flops_per_s=1e12).to_json()))
    assert value["flops_formula"] == "6N+12LHQS"
    assert all(not isinstance(one, dict | list) for one in value.values())


@pytest.mark.parametrize("bad", [{"rate_flops_per_s": 0.0}, {"rate_flops_per_s": math.inf}])
def test_impossible_rates(bad: dict[str, float]) -> None:
    with pytest.raises(UserError, match="cannot be"):
        plan_run(made_config(), **bad)


@pytest.mark.parametrize("frac", [0.0, -0.1, 1.01])
def test_impossible_efficiency(frac: float) -> None:
    with pytest.raises(UserError, match="efficiency"):
        plan_run(made_config(), rate_flops_per_s=1e12, efficiency_frac=frac)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_efficiency_rises_with_the_width_and_stays_a_share(device: str) -> None:
    fracs = []
    for heads in range(1, 200, 3):
        model = made_config(f"model.num_attention_heads={heads}", f"model.hidden_size={32 * heads}").model
        fracs.append(efficiency_frac(model, device=device))  # type: ignore[arg-type]
    assert fracs == sorted(fracs)
    assert all(0 < frac < 1 for frac in fracs)


def test_efficiency_at_the_calibrated_points() -> None:
    for table, device in ((CPU_FRAC, "cpu"), (CUDA_FRAC, "cuda")):
        for width, frac in table:
            model = made_config("model.num_attention_heads=1", f"model.hidden_size={width}").model
            assert efficiency_frac(model, device=device) == pytest.approx(frac)  # type: ignore[arg-type]
    model = made_config("model.num_attention_heads=1", "model.hidden_size=384").model
    assert efficiency_frac(model, compute="fp32") == pytest.approx(0.76, abs=0.01)


def test_verify_compares_medians_after_the_start() -> None:
    config = made_config()
    plan = plan_run(config, rate_flops_per_s=1e11)
    speed = (plan.tokens_per_s or 0) / 2
    found = {
        one.name: one
        for one in verify(
            config,
            peak_flops_per_s=1e11,
            matmul_frac=1.0,
            device="cpu",
            tokens_per_s=[1.0] + 9 * [speed],
            tokens_learned=819_200,
        )
    }
    assert found["step_s"].ratio == pytest.approx(2)
    assert found["tokens_per_s"].ratio == pytest.approx(0.5)
    assert found["mfu_frac"].predicted == pytest.approx(plan.efficiency_frac)
    assert found["tokens"].ratio == 1


def test_verify_without_a_peak_predicts_no_time() -> None:
    found = verify(made_config(), peak_flops_per_s=None, matmul_frac=1.0, device="cpu", tokens_per_s=[10.0])
    assert {one.name: one.predicted for one in found if one.name != "tokens"} == dict.fromkeys(
        ("step_s", "tokens_per_s", "mfu_frac", "train_s")
    )


def test_verify_on_cuda_plans_with_what_a_matmul_reaches() -> None:
    plan = plan_run(made_config(), rate_flops_per_s=0.8 * 989e12, device="cuda")
    speed = [plan.tokens_per_s or 0]
    found = verify(made_config(), peak_flops_per_s=989e12, matmul_frac=0.8, device="cuda", tokens_per_s=speed)
    assert found[0].ratio == pytest.approx(1)
    found = verify(made_config(), peak_flops_per_s=989e12, matmul_frac=None, device="cuda", tokens_per_s=speed)
    assert found[0].predicted is None


def test_verify_a_run_that_logged_nothing() -> None:
    with pytest.raises(DataError, match="logged no throughput"):
        verify(made_config(), peak_flops_per_s=1e11, matmul_frac=1.0, device="cpu", tokens_per_s=[])
