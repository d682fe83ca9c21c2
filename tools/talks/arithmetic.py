"""The planner's functions in the words of the talks: FLOPs = 6ND, days, MFU, price, epochs, choices of experts.

It has no arithmetic of its own beyond a product: every number is what `smalti plan` computes.
"""

import math
from collections.abc import Sequence
from fractions import Fraction
from functools import cache

from smalti.config.hardware import hardware
from smalti.config.load import from_dict
from smalti.config.model import ModelConfig
from smalti.cost.failures import DAY_S, mtbf_s
from smalti.cost.params import Params, count
from smalti.plan.budget import phases
from smalti.plan.budget.solver import Budget, solve
from smalti.plan.data import EpochCounts, Reading, SourceCounts, SourcePlan, StageCounts, plan_data
from smalti.plan.laws.law import compute_optimal, fit_named

_SEQ_LEN = 1_000


@cache
def model(preset: str) -> ModelConfig:
    """A preset of the package."""
    return from_dict(ModelConfig, {"preset": preset}).config


def params(preset: str) -> Params:
    """Return the parameters of a preset."""
    return count(model(preset))


def peak(gpu: str) -> float:
    """FLOP/s of one GPU in bf16, dense."""
    return hardware(gpu).peak_flops_per_s["bf16"]


def budget(quantity: str, **values: float | str) -> float:
    """Return a quantity of ``smalti plan budget`` that follows from ``values``."""
    value = _solved(tuple(sorted(values.items()))).number(quantity)
    assert value is not None, f"{quantity} does not follow from {values}"
    return value


@cache
def _solved(values: tuple[tuple[str, float | str], ...]) -> Budget:
    return solve(dict(values))


def train_flops(params: float, tokens: float) -> float:
    """Return 6 N D, with N the active parameters."""
    return budget("flops", active_params=params, tokens=tokens)


def chinchilla_tokens(params: float) -> float:
    """Tokens = 20 x Parameters."""
    return budget("tokens", params=params, tokens_per_param=20)


def optimal_tokens_per_param(fit: str, flops: float) -> float:
    """Tokens for each parameter of the compute-optimal model of so many FLOPs."""
    return compute_optimal(fit_named(fit), flops).tokens_per_param


def days(params: float, tokens: float, gpus: int, gpu: str, mfu: float = 1.0) -> float:
    """Days that a run takes."""
    return budget("days", active_params=params, tokens=tokens, gpus=gpus, gpu=gpu, mfu=mfu)


def mfu(params: float, tokens: float, gpus: int, gpu: str, days: float) -> float:
    """The MFU by 6ND that a training time implies."""
    return budget("mfu", active_params=params, tokens=tokens, gpus=gpus, gpu=gpu, days=days)


def usd_per_gpu_hour(cost_usd: float, gpus: int, days: float) -> float:
    """The price that a bill implies."""
    return budget("price_usd_per_gpu_hour", cost_usd=cost_usd, gpus=gpus, days=days)


def cost(gpus: int, days: float, usd_per_gpu_hour: float) -> float:
    """A bill."""
    return budget("cost_usd", gpus=gpus, days=days, price_usd_per_gpu_hour=usd_per_gpu_hour)


def tokens_per_param(params: float, tokens: float) -> float:
    """Tokens for each parameter."""
    return budget("tokens_per_param", params=params, tokens=tokens)


def steps(tokens: float, batch_tokens: float) -> float:
    """Optimizer steps."""
    return tokens / batch_tokens


def per(amount: float, of: float) -> float:
    """A quotient, as a function that can be called later."""
    return amount / of


def failures_per_day(gpus: int, failures_per_1000_gpu_days: float) -> float:
    """Expected failures of a job in a day."""
    return DAY_S / mtbf_s(failures_per_1000_gpu_days, gpus)


def label_usd(kind: str, examples: float, usd_each: float | None = None) -> float:
    """Return the cost of ``pairs``, ``comparisons`` or ``chats`` by ``smalti plan phases``, at its price or another."""
    price = {} if usd_each is None else {f"usd_per_{kind.removesuffix('s')}": usd_each}
    phase = phases.solve({kind: examples, **price}).phase("preference" if kind == "comparisons" else "fine-tuning")
    assert phase.labelling_usd is not None
    return phase.labelling_usd.value


def choices(preset: str, chosen: int | None = None) -> int:
    """Ways in which a token can be sent to the experts of a layer."""
    moe = model(preset).moe
    assert moe is not None
    return math.comb(moe.num_experts, chosen or moe.num_experts_per_tok)


def weights_bytes(preset: str, bits: float) -> float:
    """Bytes of a model's weights."""
    return params(preset).total * bits / 8


def mixture(sources: Sequence[tuple[str, float, float]], tokens: float) -> dict[str, SourcePlan]:
    """Plan a run of ``tokens`` over sources (name, tokens in the source, weight)."""
    weights = [Fraction(str(weight)) for _, _, weight in sources]
    shares = tuple(weight / sum(weights) for weight in weights)
    counts = [
        SourceCounts(name, round(holds), segments=(EpochCounts(round(holds / _SEQ_LEN)),)) for name, holds, _ in sources
    ]
    taken = tuple(round(share * round(tokens) / _SEQ_LEN) for share in shares)
    stage = StageCounts("0", 0, 1, _SEQ_LEN, 0, shares, shares, taken)
    reading = Reading(ranks=1, first_batch_sequences=1, concurrency=1, requests_per_s=1.0)
    return {source.name: source for source in plan_data(counts, [stage], reading).sources}
