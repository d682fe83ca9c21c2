"""The budget solver: figures done by hand, whatever subset is given, and what it refuses."""

import json
import math
from contextlib import suppress
from itertools import combinations

import optima
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from smalti.base.errors import UserError
from smalti.config.hardware import hardware
from smalti.plan.budget.problem import KEYS, LIMITS, Problem
from smalti.plan.budget.solver import NAMES, Budget, solve
from smalti.plan.laws import law as laws
from smalti.plan.laws.fits import FITS
from smalti.plan.quantities import format_number, parse_quantity

REFIT = FITS["besiroglu-2024"]
LINKED = ("params", "active_params", "tokens", "tokens_per_param", "flops", "gpus", "mfu", "days", "gpu_hours")
MONEY = ("price_usd_per_gpu_hour", "cost_usd")


def plan(text: str) -> Budget:
    return solve(dict(word.split("=", 1) for word in text.split()))


def value(budget: Budget, name: str) -> float:
    found = budget.number(name)
    assert found is not None, f"{name} does not follow"
    return found


# --------------------------------------------------------------------------------------------------------- by hand


def test_a_size_and_tokens() -> None:
    budget = plan("params=7b tokens=1.4e11")
    assert value(budget, "flops") == pytest.approx(5.88e21)
    assert value(budget, "tokens_per_param") == pytest.approx(20)
    assert value(budget, "loss") == pytest.approx(laws.loss(REFIT, 7e9, 1.4e11))
    assert [budget.values[name] for name in ("gpus", "gpu", "mfu", "days", "gpu_hours", "cost_usd")] == [None] * 6
    assert budget.choice is None, "nothing is chosen where all is given"
    assert budget.origins["flops"] == "flops = 6 x active_params x tokens"


def test_time_and_money_of_a_run() -> None:
    # MPT-7B: 1T tokens on 440 A100 in 9.5 days, $200,640 at $2 (MosaicML 2023)
    budget = plan("model=mpt-7b tokens=1T gpu=a100-40gb gpus=440 days=9.5 price_usd_per_gpu_hour=2")
    assert value(budget, "gpu_hours") == pytest.approx(100_320)
    assert value(budget, "cost_usd") == pytest.approx(200_640)
    assert value(budget, "mfu") == pytest.approx(0.354, abs=5e-4)
    assert value(budget, "params") == 6_649_286_656 or value(budget, "params") == pytest.approx(6.65e9, rel=1e-3)
    assert budget.origins["params"] == "counted from mpt-7b"
    assert "mfu" not in {one.name for one in budget.assumptions}, "what follows is not assumed"


def test_a_mixture_of_experts() -> None:
    budget = plan("params=132e9 active_params=36e9 tokens=12T gpu=h100-sxm gpus=3072 days=90")
    assert value(budget, "flops") == pytest.approx(2.592e24)
    assert value(budget, "tokens_per_param") == pytest.approx(90.9, abs=0.05), "of all parameters, as DBRX's is told"
    assert value(budget, "tokens_per_active_param") == pytest.approx(333.3, abs=0.05)
    assert value(budget, "mfu") == pytest.approx(0.11, abs=0.005)
    assert value(budget, "loss") == pytest.approx(laws.loss(REFIT, 36e9, 12e12)), "never of all parameters"
    assert any("active parameters alone" in note for note in budget.notes)
    asked = plan("params=132e9 active_params=36e9 tokens=12T experts=4")
    assert value(asked, "loss") == pytest.approx(laws.loss(REFIT, laws.clark_params(36e9, 4), 12e12))
    assert any("Clark" in note and "1.3B" in note for note in asked.notes)


@pytest.mark.parametrize("given_text", ["flops=5.88e21", "gpu_hours=41275 gpu=h100-sxm mfu=0.04"])
def test_a_budget_alone_gets_the_compute_optimal_model(given_text: str) -> None:
    budget = plan(given_text)
    best = laws.compute_optimal(REFIT, value(budget, "flops"))
    assert value(budget, "params") == pytest.approx(best.params, rel=1e-9)
    assert value(budget, "tokens") == pytest.approx(best.tokens, rel=1e-9)
    assert "compute-optimal by besiroglu-2024" in (budget.choice or "")
    assert budget.origins["params"] == budget.origins["tokens"] == "chosen"
    assert budget.intervals["params"] == pytest.approx(best.intervals["params"])
    assert set(budget.other_fits) == {"hoffmann-2022"}


def test_dollars_alone() -> None:
    budget = plan("cost_usd=1e6")
    assumed = {one.name: one for one in budget.assumptions}
    assert set(assumed) == {"gpu", "precision", "mfu", "price_usd_per_gpu_hour", "active_params", "fit"}
    price = hardware("h100-sxm").price
    assert price is not None
    assert assumed["price_usd_per_gpu_hour"].value == price.usd_per_hour
    assert price.date in assumed["price_usd_per_gpu_hour"].why
    assert (assumed["mfu"].value, assumed["mfu"].interval) == (0.40, (0.30, 0.50))
    flops = 1e6 / price.usd_per_hour * 3600 * 989.4e12 * 0.4
    assert value(budget, "flops") == pytest.approx(flops, rel=1e-3)
    low, high = budget.intervals["flops"]
    assert (low / flops, high / flops) == pytest.approx((0.75, 1.25), rel=1e-3), "the interval of the MFU"
    assert budget.values["gpus"] is budget.values["days"] is None, "how hours are split does not follow"


def test_a_size_alone_and_tokens_alone() -> None:
    assert value(plan("params=70b"), "tokens") == pytest.approx(laws.tokens_for_params(REFIT, 70e9), rel=1e-9)
    assert value(plan("tokens=1.4T"), "params") == pytest.approx(laws.params_for_tokens(REFIT, 1.4e12), rel=1e-9)
    assert value(plan("params=70b fit=hoffmann-2022"), "tokens") == pytest.approx(
        laws.tokens_for_params(FITS["hoffmann-2022"], 70e9), rel=1e-9
    )


def test_a_loss() -> None:
    assert value(plan("loss=2.1"), "flops") == pytest.approx(optima.optimal_for_loss(REFIT, 2.1).flops, rel=1e-9)
    assert value(plan("loss=2.1 params=7b"), "tokens") == pytest.approx(laws.tokens_for_loss(REFIT, 7e9, 2.1), rel=1e-9)
    assert value(plan("loss=2.1 tokens=1T"), "params") == pytest.approx(
        optima.params_for_loss(REFIT, 1e12, 2.1), rel=1e-9
    )
    twenty = plan("loss=2.3 tokens_per_param=20")
    assert laws.loss(REFIT, value(twenty, "params"), 20 * value(twenty, "params")) == pytest.approx(2.3, rel=1e-12)
    spent = plan("loss=2.3 flops=1e22")
    assert value(spent, "params") < laws.compute_optimal(REFIT, 1e22).params
    assert laws.loss(REFIT, value(spent, "params"), value(spent, "tokens")) == pytest.approx(2.3, rel=1e-12)
    assert "of the two models" in (spent.choice or "")


def test_inference_aware() -> None:
    fit = FITS["sardana-2024"]
    target = laws.loss(fit, 13e9, laws.tokens_for_params(fit, 13e9))
    budget = solve({"loss": target, "inference_tokens": "2T", "fit": "sardana-2024"})
    assert value(budget, "params") == pytest.approx(6.97e9, rel=1e-3)
    assert value(budget, "tokens") == pytest.approx(1.25e12, rel=2e-3)
    assert budget.lifetime is not None
    assert budget.lifetime["saving_frac"] == pytest.approx(0.17, abs=0.005)
    assert budget.lifetime["chinchilla_params"] == pytest.approx(13e9, rel=1e-6)
    # at a given budget: the same balance of parameters and tokens, so that the model is on the same line of optima
    spent = solve({"flops": value(budget, "flops"), "inference_tokens": "2T", "fit": "sardana-2024"})
    assert value(spent, "params") == pytest.approx(value(budget, "params"), rel=1e-6)
    # in money: reading and writing at half the utilisation counts twice
    money = plan("loss=2.0 inference_tokens=1e13 inference_mfu=0.2 mfu=0.4 gpu=h100-sxm price_usd_per_gpu_hour=2")
    assert money.lifetime is not None
    assert money.lifetime["inference_weight"] == pytest.approx(2)
    assert value(money, "params") == pytest.approx(
        optima.inference_optimal(REFIT, 2.0, 1e13, weight=2.0).optimum.params, rel=1e-9
    )
    usd = 2 * value(money, "params") * 1e13 / (989.4e12 * 0.2 * 3600) * 2
    assert money.lifetime["inference_cost_usd"] == pytest.approx(usd, rel=1e-3)


def test_limited_data() -> None:
    budget = plan("flops=1e22 unique_tokens=1e10")
    best = laws.compute_optimal(REFIT, 1e22, unique_tokens=1e10)
    assert value(budget, "params") == pytest.approx(best.params, rel=1e-9)
    assert value(budget, "loss") == pytest.approx(best.loss, rel=1e-9)
    assert budget.repetition is not None
    assert budget.repetition["epochs"] == pytest.approx(best.tokens / 1e10)
    assert budget.repetition["effective_tokens"] < best.tokens
    assert any("repeated for 29.8 epochs" in note for note in budget.notes)


def test_fp8() -> None:
    budget = plan("gpu=h100-sxm precision=fp8 gpu_hours=1e6 params=671b active_params=37b")
    assert {one.name: one.value for one in budget.assumptions}["mfu"] == 0.20
    assert value(budget, "flops") == pytest.approx(1e6 * 3600 * 1978.9e12 * 0.2, rel=1e-3)


# ------------------------------------------------------------------------------------------------------ any subset


runs = st.fixed_dictionaries(
    {
        "params": st.floats(math.log(1e8), math.log(1e12)).map(math.exp),
        "active_frac": st.sampled_from([1.0, 0.3]),
        "tokens": st.floats(math.log(1e10), math.log(1e14)).map(math.exp),
        "gpus": st.floats(1, 1e5),
        "mfu": st.floats(0.05, 0.9),
        "price_usd_per_gpu_hour": st.floats(0.5, 10),
    }
)


def whole(run: dict[str, float]) -> dict[str, float]:
    """A run with all its values, by hand."""
    full = {name: run[name] for name in ("params", "tokens", "gpus", "mfu", "price_usd_per_gpu_hour")}
    full["active_params"] = run["params"] * run["active_frac"]
    full["tokens_per_param"] = full["tokens"] / full["params"]
    full["flops"] = 6 * full["active_params"] * full["tokens"]
    full["gpu_hours"] = full["flops"] / (989.4e12 * full["mfu"]) / 3600
    full["days"] = full["gpu_hours"] / 24 / full["gpus"]
    full["cost_usd"] = full["gpu_hours"] * full["price_usd_per_gpu_hour"]
    return full


@pytest.mark.slow
@given(runs, st.sets(st.sampled_from((*LINKED, *MONEY)), min_size=1))
@settings(max_examples=120)
def test_what_follows_from_a_subset_is_what_it_was(run: dict[str, float], names: set[str]) -> None:
    full = whole(run)
    if not 1e-6 < full["days"] < 36_500 or full["gpu_hours"] < 1e-6:
        return
    asked: dict[str, str | float] = {name: full[name] for name in sorted(names)}
    if run["active_frac"] < 1 and not {"params", "active_params"} <= names:
        return  # a dense model is assumed
    asked["gpu"] = "h100-sxm"
    refused, found = "", {}
    try:
        solution = Problem(asked).solve(check_it=True)
    except UserError as error:
        refused = str(error)
    else:
        found = solution.values
    # an assumed MFU, or what it leads to, can be impossible; what was given cannot
    assert not refused or "assumed" in refused
    free = {one.name for one in solution.assumptions} if found else set()
    free |= {*solution.choice.names} if found and solution.choice else set()
    for name, number_found in found.items():
        if name in names:
            assert number_found == full[name]
        elif name in full and not free & {"mfu", "price_usd_per_gpu_hour", "params", "tokens"}:
            assert number_found == pytest.approx(full[name], rel=1e-9), name


@given(runs, st.sets(st.sampled_from((*LINKED, *MONEY)), min_size=1))
@settings(max_examples=50)
def test_all_that_was_derived_can_be_given_back(run: dict[str, float], names: set[str]) -> None:
    full = whole(run)
    try:
        first = Problem({name: full[name] for name in sorted(names)})
        back = first.solve(check_it=True).values
    except UserError:
        return
    gpu = {"gpu": first.device.name} if first.device else {}
    again = Problem({**back, **gpu}).solve(check_it=True).values
    assert again == back
    typed = {name: format_number(value) for name, value in back.items()}  # to four digits; nobody types a part of a GPU
    Problem(typed | {name: back[name] for name in ("gpus",) if name in back} | gpu).solve(check_it=True)


def test_every_pair_of_names_has_an_answer_or_a_reason() -> None:
    usual = {
        "params": "7b", "active_params": "7b", "tokens": "140b", "tokens_per_param": "20", "flops": "5.88e21",
        "gpus": "64", "mfu": "0.4", "days": "7", "gpu_hours": "10752", "price_usd_per_gpu_hour": "3",
        "cost_usd": "32256", "inference_tokens": "1T", "loss": "2.2", "unique_tokens": "100b", "experts": "8",
    }  # fmt: skip
    for first, second in combinations(usual, 2):
        with suppress(UserError):
            Problem({first: usual[first], second: usual[second]}).solve(check_it=True)
    for text in ("flops=1e22 inference_tokens=1T", "tokens_per_param=20", "gpus=64 days=7 unique_tokens=1b", "loss=2"):
        assert list(json.loads(json.dumps(plan(text).to_json())))[: len(NAMES)] == list(NAMES)


# --------------------------------------------------------------------------------------------------------- refusals


def test_active_parameters_that_follow_say_what_to_give() -> None:
    with pytest.raises(UserError, match=r"active_params=4\.318e10 are more than params=7e9") as raised:
        plan("params=7b tokens=1T experts=3")
    assert raised.value.hint == "they follow from the rest; give active_params too"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("params=7e9 tokens=1.4e11 flops=1e21", "flops=1e21 but 6 x 7e9 x 1.4e11 = 5.88e21"),
        ("gpus=8 days=10 gpu_hours=5000", "gpu_hours=5000 but 24 x 8 x 10 = 1920"),
        ("gpu_hours=4e5 price_usd_per_gpu_hour=2 cost_usd=1e6", "cost_usd=1e6 but 4e5 x 2 = 8e5"),
        ("params=7b tokens=1.4e11 tokens_per_param=30", "tokens_per_param=30 but 1.4e11 / 7b = 20"),
        ("active_params=36e9 tokens=12T tokens_per_param=91", "tokens_per_param=91 but 12T / 3.6e10 = 333.3"),
        ("params=7e9 active_params=8e9", "active_params=8e9 are more than params=7e9"),
        ("model=mpt-7b params=3e9", "params=3e9 but mpt-7b has 6.649e9"),
        ("params=7b tokens=1T gpu=a100-40gb gpus=440 days=0.5", "mfu=7.082 is more than 1"),
        ("loss=2.5 params=7b tokens=1.4e11", "loss=2.5 but besiroglu-2024 gives 2.173 (2.166 to 2.181)"),
        ("loss=2.0 flops=1e22", "loss=2 is out of reach of flops=1e22: the least by besiroglu-2024 is 2.141"),
        ("loss=2.1 params=1b", "loss=2.1 is out of reach of 1e9 parameters"),
        ("loss=1.5", "a loss of 1.5 is out of reach of any model"),
        ("params=0", "params=0 is not a positive number"),
        ("params=-7b", "params=-7b is not a positive number"),
        ("params=nan", "params=nan is not a positive number"),
        ("cost_usd=inf", "cost_usd=inf is not a positive number"),
        ("gpus=1e30", "gpus=1e30 is out of range"),
        ("gpus=1e400", "gpus=1e400 is out of range"),
        ("days=1e9", "days=1e9 is out of range"),
        ("mfu=40", "mfu=40 is more than 1"),
        ("mfu=40%", "mfu=40% is in percent"),
        ("days=3d", "days=3d is not a number"),
        ("params=", "params= is not a number"),
        ("params=7,000,000", "params=7,000,000 is not a number"),
        ("parms=7b", "'parms' is not a quantity of this plan"),
        ("gpu=h1000 gpus=8", "the device 'h1000' is not known"),
        ("fit=hoffman flops=1e22", "'hoffman' is not a fit of the loss law"),
        ("precision=fp4 flops=1e22", "precision=fp4 cannot be planned with"),
        ("precision=fp8 gpus=8 days=1 gpu=a100-40gb", "no fp8 peak is known for"),
        ("model=mpt-8b", "is not a preset"),
        ("inference_mfu=0.3 loss=2.1", "inference_mfu has no effect without inference_tokens"),
        ("inference_mfu=0.3 loss=2.1 inference_tokens=1T", "inference_mfu has no effect without a GPU"),
        ("precision=bf16 params=7b", "precision has no effect without a GPU"),
        ("fit=hoffmann-2022 tokens_per_param=20", "fit=hoffmann-2022 has no effect"),
        ("unique_tokens=1T tokens_per_param=20", "unique_tokens has no effect: parameters and tokens do not follow"),
        ("experts=1000 params=7b active_params=1b tokens=1T", "experts=1000 is out of range"),
    ],
)
def test_refused(text: str, message: str) -> None:
    with pytest.raises(UserError) as raised:
        plan(text)
    assert message in raised.value.message
    assert raised.value.allowed
    assert "e+" not in raised.value.message


def test_hints() -> None:
    for text, hint in (
        ("mfu=40", "write mfu=0.4"),
        ("mfu=40%", "write mfu=0.4"),
        ("parms=7b", "did you mean params=...?"),
    ):
        with pytest.raises(UserError) as raised:
            plan(text)
        assert raised.value.hint == hint


@pytest.mark.parametrize(
    ("text", "found", "rounding"),
    [
        ("7b", 7e9, 0.5 / 7), ("7B", 7e9, 0.5 / 7), ("1.4T", 1.4e12, 0.05 / 1.4), ("30k", 3e4, 0.5 / 30),
        ("5.88e21", 5.88e21, 0.005 / 5.88), ("512", 512, 0.5 / 512), ("0.40", 0.4, 0.005 / 0.4), (".5", 0.5, 0.1),
        ("1e21", 1e21, 0.1), ("1_000_000", 1e6, 0.1), ("30.", 30, 0.5 / 30), ("100320", 100_320, 5 / 100_320),
    ],
)  # fmt: skip
def test_numbers_as_people_type_them(text: str, found: float, rounding: float) -> None:
    one = parse_quantity("tokens", text, (1e-6, 1e30))
    assert one.value == pytest.approx(found, rel=1e-15)
    assert one.rounding == pytest.approx(rounding)


@given(st.floats(1e-6, 1e30))
def test_four_digits_are_read_back(value: float) -> None:
    assert parse_quantity("tokens", format_number(value), (1e-7, 1e31)).value == pytest.approx(value, rel=5.1e-4)
    assert "e+" not in format_number(value)


def test_values_that_agree_to_the_digits_given_are_kept() -> None:
    budget = plan("params=7e9 tokens=1.4e11 flops=6e21")
    assert (value(budget, "flops"), value(budget, "params")) == (6e21, 7e9)
    assert budget.notes[0].startswith("flops=6e21 but 6 x 7e9 x 1.4e11 = 5.88e21: equal to the digits given")


def test_names() -> None:
    assert set(NAMES) - {"gpu"} <= set(LIMITS)
    assert len(KEYS) == len(set(KEYS))
