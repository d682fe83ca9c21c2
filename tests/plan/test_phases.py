"""Four phases and four rungs: the talks' labelling bills, sums by hand, and what is refused."""

import json

import pytest

from smalti.base.errors import UserError
from smalti.cli.main import run
from smalti.config.hardware import hardware
from smalti.plan.budget.phases import RUNGS, Estimate, Phases, solve, total
from smalti.plan.laws import law as laws
from smalti.plan.laws.fits import FITS


def plan(text: str) -> Phases:
    return solve(dict(word.split("=", 1) for word in text.split()))


def usd(found: Estimate | None) -> float:
    assert found is not None
    return found.value


def test_the_bills_of_the_talks() -> None:
    found = plan("pairs=27540 comparisons=1m")
    assert usd(found.phase("fine-tuning").labelling_usd) == pytest.approx(826_200)  # printed: $826k
    assert usd(found.phase("preference").labelling_usd) == pytest.approx(8_000_000)  # printed: $8M
    spans = [found.phase(name).labelling_usd for name in ("fine-tuning", "preference")]
    assert [one.interval for one in spans if one] == [
        pytest.approx((275_400, 2_754_000)),  # at $10 and at $100
        pytest.approx((5_000_000, 20_000_000)),  # at $5 and at $20
    ]
    assert usd(plan("chats=1000").phase("fine-tuning").labelling_usd) == pytest.approx(130_000)
    both = plan("pairs=100 chats=10").phase("fine-tuning")
    assert usd(both.labelling_usd) == pytest.approx(100 * 30 + 10 * 130)
    assert dict(both.examples) == {"pairs": 100, "chats": 10}


def test_other_prices_and_no_price_range() -> None:
    found = plan("pairs=1000 usd_per_pair=12.5").phase("fine-tuning")
    assert found.labelling_usd == Estimate(12_500)
    assert found.cost_usd is None, "computing is not known without a model"


def test_computing_by_hand() -> None:
    found = plan(
        "params=7b gpu=h100-sxm precision=bf16 gpus=64 mfu=0.4 price_usd_per_gpu_hour=2 pretraining_tokens=140b "
        "curriculum_tokens=10b "
        "pairs=1000 tokens_per_pair=500 fine_tuning_epochs=2 usd_per_pair=30 "
        "comparisons=2000 tokens_per_comparison=1000 preference_epochs=1 usd_per_comparison=8"
    )
    assert found.assumptions == ()
    per_hour = hardware("h100-sxm").require_peak("bf16") * 0.4 * 3600
    before, later, tuned, preferred = found.phases
    assert usd(before.gpu_hours) == pytest.approx(5.88e21 / per_hour)
    assert usd(before.days) == pytest.approx(5.88e21 / per_hour / 24 / 64)
    assert usd(before.cost_usd) == pytest.approx(5.88e21 / per_hour * 2)
    assert usd(later.flops) == pytest.approx(6 * 7e9 * 10e9)
    assert usd(tuned.flops) == pytest.approx(6 * 7e9 * 1000 * 500 * 2)
    assert usd(preferred.flops) == pytest.approx(8 * 7e9 * 2000 * 1000), "with the forward pass of the reference model"
    assert usd(tuned.cost_usd) == pytest.approx(30_000 + usd(tuned.compute_usd))
    assert all(one.cost_usd and one.cost_usd.interval is None for one in found.phases), "nothing is assumed"
    costs = [usd(one.cost_usd) for one in found.phases]
    assert [usd(one.cost_usd) for one in found.rungs] == pytest.approx([0, sum(costs[2:]), sum(costs[1:]), sum(costs)])


def test_a_mixture_of_experts_computes_with_its_active_parameters() -> None:
    found = plan("params=132b active_params=36b curriculum_tokens=1T").phase("curriculum")
    assert usd(found.flops) == pytest.approx(6 * 36e9 * 1e12)


def test_the_whole_of_a_model_is_assumed_and_said() -> None:
    found = plan("params=7b")
    names = {one.name for one in found.assumptions}
    assert {"gpu", "mfu", "price_usd_per_gpu_hour", "pretraining_tokens", "curriculum_tokens", "pairs"} <= names
    tokens = laws.tokens_for_params(FITS["besiroglu-2024"], 7e9)
    assert usd(found.phase("pretraining").tokens) == pytest.approx(tokens)
    assert usd(found.phase("curriculum").tokens) == pytest.approx(tokens / 10)
    for one in found.phases:
        assert one.cost_usd is not None
        assert one.cost_usd.interval is not None
        assert one.cost_usd.interval[0] < one.cost_usd.value < one.cost_usd.interval[1]
    assert found.rung is None


@pytest.mark.parametrize(
    ("budget", "rung"), [("100", "prompt"), ("1.0665e6", "tune"), ("1.068e6", "continue"), ("1e7", "pretrain")]
)
def test_the_rung_that_a_budget_pays_for(budget: str, rung: str) -> None:
    found = plan(f"params=7b cost_usd={budget} price_usd_per_gpu_hour=3.99")
    assert found.rung == rung
    assert [one.name for one in found.rungs] == list(RUNGS)
    assert found.rungs[0].affordable == "yes"


def test_what_is_in_reach() -> None:
    found = plan("params=7b cost_usd=1e5 mfu=0.4 price_usd_per_gpu_hour=3.99")
    assert found.rung == "prompt", "27,540 pairs are more than the budget"
    tune = found.rungs[1]
    assert tune.affordable == "no"
    assert tune.pairs_in_reach == pytest.approx(100_000 / 30, rel=1e-3)
    large = plan("params=70b cost_usd=1e5")
    assert large.rungs[3].pairs_in_reach == 0, "computing alone is more"


def test_sums_and_products_of_what_is_not_sure() -> None:
    one, other = Estimate(10, (5, 20)), Estimate(3)
    assert one.times(2).interval == pytest.approx((10, 40))
    assert one.times(one).interval == pytest.approx((100 / 2**2**0.5, 100 * 2**2**0.5))
    assert one.inverse == Estimate(0.1, (0.05, 0.2))
    assert total([one, other]) == Estimate(13, (8, 23))
    assert total([other, other]) == Estimate(6)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("cost_usd=1e6", "the model is not given"),
        ("gpus=8", "the model is not given"),
        ("pairs=10 gpus=8", "gpus has no effect without a model"),
        ("pairs=10 gpu=h100-sxm", "gpu has no effect without a model"),
        ("pairs=10 precision=fp8", "precision has no effect without a model"),
        ("params=7b pretraining_tokens=1T fine_tuning_epochs=3", "fine_tuning_epochs has no effect without pairs"),
        ("params=7b pairs=10 preference_epochs=3", "preference_epochs has no effect without comparisons"),
        ("params=7b active_params=70b pairs=10", "active_params=70b are more than params=7b"),
        ("pairs=10 usd_per_chat=100", "usd_per_chat has no effect without chats"),
        ("params=7b cost_usd=1e6 tokens_per_chat=100", "tokens_per_chat has no effect without chats"),
        ("pairs=0", "pairs=0 is not a positive number"),
        ("pair=10", "'pair' is not a quantity of this plan"),
        ("model=mpt-7b params=7b", "params=7b and model=mpt-7b exclude each other"),
        ("params=7b precision=fp4", "precision=fp4 cannot be planned with"),
        ("params=7b gpu=h200x", "the device 'h200x' is not known"),
    ],
)
def test_refused(text: str, message: str) -> None:
    with pytest.raises(UserError) as raised:
        plan(text)
    assert message in raised.value.message
    assert raised.value.allowed


def test_in_print(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", "phases", "model=mpt-7b", "cost_usd=1e6", "gpus=64"]) == 0
    out = capsys.readouterr().out
    for part in (
        "fine-tuning",
        "27,540 pairs",
        "826,200",
        "affordable pairs",
        "1,000,000 USD pay for: prompt",
        "assumed:",
    ):
        assert part in out, part
    assert run(["plan", "phases", "comparisons=1m", "--json"]) == 0
    value = json.loads(capsys.readouterr().out)
    assert value["phases"][3]["labelling_usd"]["value"] == 8e6
    assert run(["plan", "phases"]) == 2
