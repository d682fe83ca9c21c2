"""Optima of a law of the loss by closed formulas and by search: what ``smalti plan budget`` must come to.

The planner solves its equations together (``plan/budget``); here each question has a function of its own.
"""

import math
from dataclasses import dataclass
from functools import partial

from smalti.plan import data
from smalti.plan.laws import law as laws
from smalti.plan.laws.fits import Fit


@dataclass(frozen=True)
class Lifetime:
    """The cheapest model of one loss over training and inference, beside the one that is cheapest to train."""

    optimum: laws.Optimum
    lifetime_flops: float
    """6 N D + 2 N x weight x inference tokens: of training and inference; dollars in units of training FLOPs."""
    chinchilla: laws.Optimum
    """Of the same loss, with the fewest FLOPs in training."""
    chinchilla_lifetime_flops: float

    @property
    def saving_frac(self) -> float:
        """Share of the lifetime cost that it saves."""
        return 1 - self.lifetime_flops / self.chinchilla_lifetime_flops


def params_for_loss(fit: Fit, tokens: float, target: float, *, unique_tokens: float | None = None) -> float:
    """Parameters that ``tokens`` bring to the loss ``target``; UserError where no number does."""
    laws._positive(tokens=tokens, loss=target)
    worth = tokens if unique_tokens is None else data.effective_tokens(unique_tokens, tokens / unique_tokens)
    least = fit.E + fit.B * worth**-fit.beta
    found = math.inf if target <= least else (fit.A / (target - least)) ** (1 / fit.alpha)
    if unique_tokens is not None:
        suited = laws.params_for_tokens(fit, unique_tokens)
        found = laws._taken(found, suited, laws.EXCESS_PARAMS_HALF_LIFE)
        least += fit.A * (suited * (1 + laws.EXCESS_PARAMS_HALF_LIFE)) ** -fit.alpha
    if found == math.inf:
        limit = "" if unique_tokens is None else f" of which {unique_tokens:.4g} are unique"
        raise laws._unreachable(fit, target, least, f"{tokens:.4g} tokens{limit}")
    return found


def optimal_for_loss(fit: Fit, target: float, *, unique_tokens: float | None = None) -> laws.Optimum:
    """The fewest FLOPs that reach the loss ``target``."""
    return laws._optimum(fit, lambda one: laws.cheapest(one, target, 0.0, unique_tokens), unique_tokens)


def inference_optimal(
    fit: Fit, target: float, inference_tokens: float, *, weight: float = 1.0, unique_tokens: float | None = None
) -> Lifetime:
    """The model of loss ``target`` that costs least over training and ``inference_tokens`` of use.

    Minimises 6 N D + 2 N x weight x inference tokens (Sardana & Frankle 2024, arXiv 2401.00448).
    ``weight`` is what an inference FLOP costs beside a training FLOP: 1 counts FLOPs, ``money_weight`` dollars.
    """
    laws._positive(inference_tokens=inference_tokens, weight=weight)
    served = weight * inference_tokens
    best, plain = (
        laws._optimum(
            fit, partial(laws.cheapest, target=target, served_tokens=i, unique_tokens=unique_tokens), unique_tokens
        )
        for i in (served, 0.0)
    )
    return Lifetime(best, laws.lifetime_flops(best, served), plain, laws.lifetime_flops(plain, served))


def money_weight(
    train_usd_per_flop: float, input_usd_per_flop: float, output_usd_per_flop: float, output_frac: float
) -> float:
    """Dollars of an inference FLOP over those of a training FLOP, when ``output_frac`` of the tokens are written.

    Dollars of a FLOP are the price of a GPU hour / (3600 x peak x utilisation), each with its own GPU, number format
    and utilisation (Sardana & Frankle 2024).
    """
    laws._positive(train=train_usd_per_flop, input=input_usd_per_flop, output=output_usd_per_flop)
    return ((1 - output_frac) * input_usd_per_flop + output_frac * output_usd_per_flop) / train_usd_per_flop
