"""What a run costs before it starts: parameters, tokens, FLOPs, step time, total time. Pure arithmetic on the config.

The time is a prediction: training FLOPs / (matmul rate x efficiency), the efficiency from ``plan/efficiency.py`` unless
given. Reading data, evals in the loop and checkpoints are not in it.
"""

import math
from dataclasses import asdict, dataclass
from typing import Any, Literal

from smalti.base.errors import UserError
from smalti.config.durations import total_steps
from smalti.config.run import RunConfig
from smalti.plan.efficiency import efficiency_frac as expected_frac
from smalti.plan.flops import FORMULA, train_flops_per_token, train_flops_per_token_causal
from smalti.plan.params import Params, count

CHINCHILLA_TOKENS_PER_PARAM = 20
"""Compute-optimal tokens for each parameter of a dense model (Hoffmann et al. 2022, arXiv 2203.15556)."""


@dataclass(frozen=True)
class Budget:
    """The plan of one run. Times are None where no rate is known."""

    params: Params
    """Parameter counts."""
    tokens: int
    """Tokens of the whole run."""
    steps: int
    """Optimizer steps."""
    global_batch_tokens: int
    """Tokens of one step."""
    seq_len: int
    """Tokens of one sequence."""
    flops_per_token: int
    """Forward and backward, under ``FORMULA``."""
    flops_per_token_causal: int
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


def budget(
    config: RunConfig,
    *,
    rate_flops_per_s: float | None = None,
    efficiency_frac: float | None = None,
    device: Literal["cpu", "cuda"] = "cpu",
) -> Budget:
    """Plan ``config``.

    ``rate_flops_per_s``: matmul rate of all ranks together, in the compute format; None leaves the times out.
    ``efficiency_frac``: share of it that training reaches; absent: the table for ``device``. UserError when either
    cannot be (a rate of 0, a share outside 0..1).
    """
    if rate_flops_per_s is not None and not 0 < rate_flops_per_s < math.inf:
        raise UserError(f"a rate of {rate_flops_per_s} FLOP/s cannot be", allowed="a number above 0")
    if efficiency_frac is not None and not 0 < efficiency_frac <= 1:
        raise UserError(f"an efficiency of {efficiency_frac} cannot be", allowed="above 0, at most 1")
    batch = config.train.global_batch_tokens
    steps = total_steps(config.train.duration, global_batch_tokens=batch)
    per_token = train_flops_per_token(config.model, config.data.seq_len)
    frac = step_s = None
    if rate_flops_per_s is not None:
        frac = efficiency_frac or expected_frac(config.model, device=device, compute=config.train.precision.compute)
        step_s = per_token * batch / (rate_flops_per_s * frac)
    return Budget(
        params=count(config.model),
        tokens=steps * batch,
        steps=steps,
        global_batch_tokens=batch,
        seq_len=config.data.seq_len,
        flops_per_token=per_token,
        flops_per_token_causal=train_flops_per_token_causal(config.model, config.data.seq_len),
        total_flops=float(per_token) * steps * batch,
        rate_flops_per_s=rate_flops_per_s,
        efficiency_frac=frac,
        step_s=step_s,
        total_s=None if step_s is None else step_s * steps,
        tokens_per_s=None if step_s is None else batch / step_s,
    )
