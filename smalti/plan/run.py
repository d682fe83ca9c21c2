"""What a run costs before it starts: parameters, tokens, FLOPs, step time, total time. Pure arithmetic on the config.

The time is a prediction: training FLOPs / (matmul rate x efficiency), the efficiency from ``plan/efficiency.py`` unless
given. Reading data, evals in the loop and checkpoints are not in it.
"""

import math
from dataclasses import asdict, dataclass
from typing import Any, Literal

from smalti.base.errors import UserError
from smalti.config.durations import RunLength
from smalti.config.run import RunConfig
from smalti.plan.efficiency import efficiency_frac as expected_frac
from smalti.plan.flops import FORMULA, train_flops_per_token, train_flops_per_token_causal
from smalti.plan.params import Params, count

CHINCHILLA_TOKENS_PER_PARAM = 20
"""Compute-optimal tokens for each parameter of a dense model (Hoffmann et al. 2022, arXiv 2203.15556)."""


@dataclass(frozen=True)
class RunPlan:
    """The plan of one run. Times are None where no rate is known."""

    params: Params
    """Parameter counts."""
    tokens: int
    """Tokens of the whole run."""
    steps: int
    """Optimizer steps."""
    global_batch_tokens: float
    """Tokens of one step; the mean where batches change."""
    flops_per_token: float
    """Forward and backward, under ``FORMULA``; the mean where sequences of several lengths are learned."""
    flops_per_token_causal: float
    """The same with attention halved, for comparison only."""
    total_flops: float
    """Of the whole run, under ``FORMULA``."""
    rate_flops_per_s: float | None
    """Matmul rate of all ranks together."""
    efficiency_frac: float | None
    """Share of that rate that the step is expected to reach."""
    step_s: float | None
    """Predicted time of one step."""
    total_s: float | None
    """Predicted time of all steps."""
    tokens_per_s: float | None
    """Predicted throughput of all ranks together."""

    @property
    def tokens_per_param(self) -> float:
        """Tokens for each parameter (all of them)."""
        return self.tokens / self.params.total

    @property
    def tokens_per_active_param(self) -> float:
        """Tokens for each parameter that a token meets; the figure to hold against Chinchilla's 20."""
        return self.tokens / self.params.active

    def to_json(self) -> dict[str, Any]:
        """A flat JSON object with units in the names."""
        rest = asdict(self)
        params = rest.pop("params")
        return {
            **{f"params_{name}": value for name, value in params.items()},
            **rest,
            "flops_formula": FORMULA,
            "tokens_per_param": self.tokens_per_param,
            "tokens_per_active_param": self.tokens_per_active_param,
        }


def plan_run(
    config: RunConfig,
    *,
    rate_flops_per_s: float | None = None,
    efficiency_frac: float | None = None,
    device: Literal["cpu", "cuda"] = "cpu",
) -> RunPlan:
    """Plan ``config``.

    ``rate_flops_per_s``: matmul rate of all ranks together, in the compute format; None leaves the times out.
    ``efficiency_frac``: share of it that training reaches; absent: the table for ``device``. UserError when either
    cannot be (a rate of 0, a share outside 0..1).
    """
    if rate_flops_per_s is not None and not 0 < rate_flops_per_s < math.inf:
        raise UserError(f"a rate of {rate_flops_per_s} FLOP/s cannot be", allowed="a number above 0")
    if efficiency_frac is not None and not 0 < efficiency_frac <= 1:
        raise UserError(f"an efficiency of {efficiency_frac} cannot be", allowed="above 0, at most 1")
    length, by_seq_len, model = config.length, config.tokens_by_seq_len(), config.model
    steps, tokens = length.total_steps, length.total_tokens
    flops = sum(train_flops_per_token(model, seq_len) * n for seq_len, n in by_seq_len.items())
    causal = sum(train_flops_per_token_causal(model, seq_len) * n for seq_len, n in by_seq_len.items())
    frac = total_s = None
    if rate_flops_per_s is not None:
        frac = efficiency_frac or expected_frac(model, device=device, compute=config.train.precision.compute)
        total_s = flops / (rate_flops_per_s * frac)
    return RunPlan(
        params=count(model),
        tokens=tokens,
        steps=steps,
        global_batch_tokens=_mean(tokens, steps),
        flops_per_token=_mean(flops, tokens),
        flops_per_token_causal=_mean(causal, tokens),
        total_flops=float(flops),
        rate_flops_per_s=rate_flops_per_s,
        efficiency_frac=frac,
        step_s=None if total_s is None else total_s / steps,
        total_s=total_s,
        tokens_per_s=None if total_s is None else tokens / total_s,
    )


def length_text(length: RunLength) -> str:
    """``600 steps x 8192 tokens``, or with a ramp ``100 steps x 4096 + 500 steps x 8192 tokens``."""
    parts = [(start, size) for start, size in length.batches if start < length.total_steps]
    ends = [*(start for start, _ in parts[1:]), length.total_steps]
    return " + ".join(f"{end - start} steps x {n}" for (start, n), end in zip(parts, ends, strict=True)) + " tokens"


def _mean(total: int, n: int) -> float:
    return total // n if total % n == 0 else total / n
