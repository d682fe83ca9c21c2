"""Scaling laws: the loss of a model by parameters and tokens, and the optimum for a budget or a loss.

L(N, D) = E + A / N^alpha + B / D^beta (Hoffmann et al. 2022, arXiv 2203.15556, approach 3); training costs 6 N D FLOPs.
With ``unique_tokens``, N and D are effective ones (Muennighoff et al. 2023, arXiv 2305.16264). For an MoE, N usually
counts the active parameters. Intervals cover only the fit's constants, not other data or sizes.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from smalti.base.errors import UserError
from smalti.plan import data
from smalti.plan.laws.bisect import root
from smalti.plan.laws.fits import FITS, Fit, Interval, fit_named, spread
from smalti.plan.quantities import format_number

__all__ = ["FITS", "Fit", "Interval", "fit_named"]

EXCESS_PARAMS_HALF_LIFE = 5.309743
"""R*_N: parameters in excess of the optimum for the unique tokens lose their value as repeated tokens do, but sooner
(Muennighoff et al. 2023, appendix A)."""

CLARK_PARAMS_MAX, CLARK_EXPERTS_MAX = 937e9, 512
_S_BASE = (-0.082, -0.108, 0.009, 1.847, 314.478)
"""a, b, c, E_start and E_max of Clark et al. 2022, table 3."""

STEADY_TOKENS_PER_PARAM = 100
"""Fits from runs below this overstate the gain from more tokens above it (Sardana & Frankle 2024)."""


@dataclass(frozen=True)
class Optimum:
    """The optimal model under one condition."""

    fit: str
    params: float
    """Parameters that the law counts: for an MoE the active ones."""
    tokens: float
    flops: float
    """6 x params x tokens."""
    loss: float
    intervals: Mapping[str, Interval | None]
    """Intervals of ``params``, ``tokens``, ``tokens_per_param``, ``flops`` and ``loss``, if the fit has errors."""

    @property
    def tokens_per_param(self) -> float:
        """Tokens for each parameter."""
        return self.tokens / self.params


def loss(fit: Fit, params: float, tokens: float, *, unique_tokens: float | None = None) -> float:
    """Return the loss in nats per token of ``params`` trained on ``tokens``, repeating ``unique_tokens`` if fewer."""
    n, d = _effective(fit, params, tokens, unique_tokens)
    return float(fit.E + fit.A * n**-fit.alpha + fit.B * d**-fit.beta)


def loss_interval(fit: Fit, params: float, tokens: float, *, unique_tokens: float | None = None) -> Interval | None:
    """Return the interval of ``loss``; None if the fit has no errors."""
    return spread(fit, lambda moved: {"loss": loss(moved, params, tokens, unique_tokens=unique_tokens)})["loss"]


def effective_params(fit: Fit, params: float, unique_tokens: float) -> float:
    """Return the effective parameters for ``unique_tokens``: U + U R* (1 - exp(-R / R*)), R = params / U - 1.

    U is the optimal number of parameters for ``unique_tokens`` seen once, or ``params`` if those are fewer. The paper
    counts the unique tokens that the run sees; here it is all unique tokens that exist, so that the law is Chinchilla's
    if data is no limit. Where data repeats, both are the same.
    """
    suited = min(params, params_for_tokens(fit, unique_tokens))
    excess = params / suited - 1
    return suited * (1 + EXCESS_PARAMS_HALF_LIFE * -math.expm1(-excess / EXCESS_PARAMS_HALF_LIFE))


def params_for_tokens(fit: Fit, tokens: float) -> float:
    """Return the parameters for which ``tokens`` are compute-optimal: A alpha N^-alpha = B beta D^-beta."""
    return float((fit.alpha * fit.A / (fit.beta * fit.B) * tokens**fit.beta) ** (1 / fit.alpha))


def tokens_for_params(fit: Fit, params: float) -> float:
    """Return the compute-optimal tokens for ``params``."""
    return float((fit.beta * fit.B / (fit.alpha * fit.A) * params**fit.alpha) ** (1 / fit.beta))


def tokens_for_loss(fit: Fit, params: float, target: float, *, unique_tokens: float | None = None) -> float:
    """Return the tokens that bring ``params`` to the loss ``target``. Raises UserError if no number does."""
    _positive(params=params, loss=target)
    worth = params if unique_tokens is None else effective_params(fit, params, unique_tokens)
    least = fit.E + fit.A * worth**-fit.alpha
    tokens = math.inf if target <= least else (fit.B / (target - least)) ** (1 / fit.beta)
    if unique_tokens is not None:
        tokens = _taken(tokens, unique_tokens, data.REPEATS_HALF_LIFE)
        least += fit.B * (unique_tokens * (1 + data.REPEATS_HALF_LIFE)) ** -fit.beta
    if tokens == math.inf:
        limit = "" if unique_tokens is None else f" and {unique_tokens:.4g} unique tokens"
        raise _unreachable(fit, target, least, f"{params:.4g} parameters{limit}")
    return tokens


def _taken(worth: float, unique: float, half_life: float) -> float:
    """Return the tokens of which ``worth`` are the effective tokens; infinite if no number is enough."""
    if worth <= unique:
        return worth
    faded = (worth / unique - 1) / half_life
    return unique * (1 - half_life * math.log1p(-faded)) if faded < 1 else math.inf


def clark_params(params: float, experts: float) -> float:
    """Return the parameters of a dense model with the loss of ``params`` active ones and ``experts`` for each active.

    Clark et al. 2022 (arXiv 2202.01169), effective parameters with the constants of S-BASE: log10 L = a log N +
    b log E' + c log N log E' + d with a saturating E'. Fitted on models of 15M to 1.3B active parameters, 2 to 512
    experts of which a token uses one, all trained on 130B tokens; by this law routing no longer helps from
    ``CLARK_PARAMS_MAX`` active parameters on. An estimate: other work finds larger gains for finer experts and longer
    training.
    """
    _positive(params=params, experts=experts)
    if params > CLARK_PARAMS_MAX or not 1 <= experts <= CLARK_EXPERTS_MAX:
        raise UserError(
            f"params={params:.4g} with experts={experts:.4g} are outside the range of Clark et al. 2022",
            allowed=f"params up to {CLARK_PARAMS_MAX:.3g}, 1 to {CLARK_EXPERTS_MAX} experts for each active one",
            hint="leave experts out: the law then counts the active parameters alone",
        )
    a, b, c, start, _ = _S_BASE
    by_size, by_experts = math.log10(params), math.log10(_saturated(experts))
    lowered = a * by_size + b * by_experts + c * by_size * by_experts
    return float(10 ** ((lowered - b * math.log10(start)) / (a + c * math.log10(start))))


def clark_exponent(experts: float) -> float:
    """Return d log ``clark_params`` / d log params, which is below 1."""
    a, _, c, start, _ = _S_BASE
    return (a + c * math.log10(_saturated(experts))) / (a + c * math.log10(start))


def _saturated(experts: float) -> float:
    *_, start, most = _S_BASE
    return 1 / (1 / (experts - 1 + 1 / (1 / start - 1 / most)) + 1 / most)


def balance(
    fit: Fit, params: float, tokens: float, *, served_tokens: float = 0.0, unique_tokens: float | None = None
) -> float:
    """Return a value above 0 where more parameters pay more, below 0 where more tokens do, and 0 at the optimum.

    At the least cost N (D + I / 3) of a loss, a percent of N and a percent of D lower the loss in proportion to their
    cost: (alpha A N^-alpha) / (beta B D^-beta) = (D + I / 3) / D, with I = ``served_tokens``, the inference tokens
    times the cost of an inference FLOP in training FLOPs (Sardana & Frankle 2024; I = 0 is Chinchilla's). The value
    falls with N and rises with D, so there is one zero on every line.
    """
    n, d = _effective(fit, params, tokens, unique_tokens)
    by_params = math.log(fit.alpha * fit.A) - fit.alpha * math.log(n)
    by_tokens = math.log(fit.beta * fit.B) - fit.beta * math.log(d)
    if unique_tokens is not None:
        suited = min(params, params_for_tokens(fit, unique_tokens))
        by_params += math.log(params / n) - (params / suited - 1) / EXCESS_PARAMS_HALF_LIFE
        repeats = max(0.0, tokens / unique_tokens - 1)
        by_tokens += math.log(tokens / d) - repeats / data.REPEATS_HALF_LIFE
    return by_params - by_tokens - math.log1p(served_tokens / (3 * tokens))


def compute_optimal(fit: Fit, flops: float, *, unique_tokens: float | None = None) -> Optimum:
    """Return the model of the lowest loss for ``flops`` of training: N = G (C / 6)^(beta / (alpha + beta))."""
    _positive(flops=flops)

    def solve(moved: Fit) -> tuple[float, float]:
        if unique_tokens is None:
            exponent = 1 / (moved.alpha + moved.beta)
            g = (moved.alpha * moved.A / (moved.beta * moved.B)) ** exponent
            n = g * (flops / 6) ** (moved.beta / (moved.alpha + moved.beta))
        else:
            n = math.exp(
                root(lambda x: balance(moved, math.exp(x), flops / 6 / math.exp(x), unique_tokens=unique_tokens))
            )
        return n, flops / 6 / n

    return _optimum(fit, solve, unique_tokens)


def lifetime_flops(model: Optimum, served_tokens: float) -> float:
    """Return the FLOPs of training and inference: 6 N D + 2 N I."""
    return model.flops + 2 * model.params * served_tokens


def usd_per_flop(usd_per_gpu_hour: float, peak_flops_per_s: float, mfu: float) -> float:
    """Return the dollars of one model FLOP on a GPU that reaches the share ``mfu`` of its peak."""
    _positive(usd_per_gpu_hour=usd_per_gpu_hour, peak_flops_per_s=peak_flops_per_s, mfu=mfu)
    return usd_per_gpu_hour / (3600 * peak_flops_per_s * mfu)


def outside(fit: Fit, params: float, tokens: float) -> list[str]:
    """Return notes on numbers outside the range of the runs behind the fit."""
    notes = []
    for what, value, (low, high) in (("parameters", params, fit.params_range), ("tokens", tokens, fit.tokens_range)):
        if value > high:
            notes.append(
                f"{format_number(value)} {what} are {value / high:.3g} times the most in the runs behind {fit.name}"
            )
        elif value < low:
            notes.append(
                f"{format_number(value)} {what} are fewer than the least in the runs behind {fit.name}, "
                f"{format_number(low)}"
            )
    if tokens / params > STEADY_TOKENS_PER_PARAM:
        notes.append(
            f"{tokens / params:.4g} tokens per parameter: fits from runs below {STEADY_TOKENS_PER_PARAM} overstate the "
            "gain from more tokens there (Sardana & Frankle 2024)"
        )
    return notes


def cheapest(
    fit: Fit, target: float, served_tokens: float = 0.0, unique_tokens: float | None = None
) -> tuple[float, float]:
    """Return the parameters and tokens that reach the loss ``target`` at the least N (D + ``served_tokens`` / 3)."""
    if unique_tokens is not None:
        return _cheapest_repeated(fit, target, served_tokens, unique_tokens)
    rest = target - fit.E
    if rest <= 0:
        raise _unreachable(fit, target, fit.E, "any model")

    def pair(logit: float) -> tuple[float, float]:  # logit of the tokens' share of the loss above the floor
        of_params = rest / (1 + math.exp(logit))
        of_tokens = rest / (1 + math.exp(-logit))
        return (fit.A / of_params) ** (1 / fit.alpha), (fit.B / of_tokens) ** (1 / fit.beta)

    return pair(root(lambda x: balance(fit, *pair(x), served_tokens=served_tokens), low=-60.0, high=60.0))


def _cheapest_repeated(fit: Fit, target: float, served: float, unique_tokens: float) -> tuple[float, float]:
    least = loss(fit, 1e40, 1e40, unique_tokens=unique_tokens)
    if target <= least:
        raise _unreachable(fit, target, least, f"{unique_tokens:.4g} unique tokens")

    def balance_at(x: float) -> float:
        try:
            tokens = tokens_for_loss(fit, math.exp(x), target, unique_tokens=unique_tokens)
        except UserError:
            return math.inf  # too few parameters for any number of tokens
        return balance(fit, math.exp(x), tokens, served_tokens=served, unique_tokens=unique_tokens)

    params = math.exp(root(balance_at))
    return params, tokens_for_loss(fit, params, target, unique_tokens=unique_tokens)


def _optimum(fit: Fit, solve: Callable[[Fit], tuple[float, float]], unique_tokens: float | None) -> Optimum:
    def values(moved: Fit) -> dict[str, float]:
        n, d = solve(moved)
        reached = loss(moved, n, d, unique_tokens=unique_tokens)
        return {"params": n, "tokens": d, "flops": 6 * n * d, "loss": reached, "tokens_per_param": d / n}

    best = values(fit)
    del best["tokens_per_param"]
    return Optimum(fit=fit.name, **best, intervals=spread(fit, values))


def _effective(fit: Fit, params: float, tokens: float, unique_tokens: float | None) -> tuple[float, float]:
    _positive(params=params, tokens=tokens)
    if unique_tokens is None:
        return params, tokens
    _positive(unique_tokens=unique_tokens)
    return effective_params(fit, params, unique_tokens), data.effective_tokens(unique_tokens, tokens / unique_tokens)


def _positive(**values: float) -> None:
    for name, value in values.items():
        if not (math.isfinite(value) and value > 0):
            raise UserError(f"{name}={value} is out of range", allowed="finite numbers above 0")


def _unreachable(fit: Fit, target: float, least: float, what: str) -> UserError:
    return UserError(
        f"a loss of {target:.6g} is out of reach of {what}: {fit.name} goes down to {least:.6g}",
        allowed=f"a loss above {least:.6g}",
        hint="a loss is in nats per token, for the data and tokenizer of the fit",
    )
