"""Sampling of the next token: greedy, temperature, top-k and top-p, in fp32.

A token depends on its row's logits, parameters, seed and position alone, so a sequence gets the same tokens in any
batch and after a restart (given equal logits). Two sequences with the same prompt and seed get the same answer: give
each its own seed to get different ones.

B: rows. V: vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from smalti.base.errors import DataError, UserError
from smalti.base.rng import derive_key

MIN_TEMPERATURE = 1e-3
"""Below it, differences in the last digits of fp32 logits decide alone: that is greedy, which 0 asks for."""
MAX_LOGPROBS = 100
"""Maximum number of likeliest tokens that may be requested at each position."""


class NotFinite(DataError):
    """The model's logits are no distribution. The cause is the model, not the request."""


@dataclass(frozen=True)
class SamplingParams:
    """Options of sampling, and of the end of an answer.

    Raises UserError for a value out of range.
    """

    max_tokens: int = 128
    """At most this many new tokens; 0 only together with ``prompt_logprobs``."""
    temperature: float = 0.0
    """0 takes the likeliest token; 1 samples from the model's own distribution; else at least 0.001."""
    top_p: float = 1.0
    """Sample among the likeliest tokens of this total probability (nucleus sampling, arXiv 1904.09751)."""
    top_k: int = 0
    """Sample among this many likeliest tokens; 0 means no bound."""
    seed: int = 0
    """Seed of the draws of this sequence."""
    stop: tuple[str, ...] = ()
    """The answer ends before the first of these texts."""
    logprobs: int | None = None
    """Report the log-probability of each sampled token and of this many likeliest ones; None reports none."""
    prompt_logprobs: int | None = None
    """The same for the tokens of the prompt, each given those before it."""
    ignore_eos: bool = False
    """Continue after an end token; it has no text."""

    def __post_init__(self) -> None:
        bounds = (
            (
                "max_tokens",
                self.max_tokens >= (self.prompt_logprobs is None),
                "1 or more",
            ),
            (
                "temperature",
                self.temperature == 0 or MIN_TEMPERATURE <= self.temperature < float("inf"),
                f"0 (the likeliest token), or {MIN_TEMPERATURE} or more",
            ),
            ("top_p", 0 < self.top_p <= 1, "above 0, at most 1"),
            ("top_k", self.top_k >= 0, "0 (no bound) or more"),
            ("stop", all(self.stop), "texts that are not empty"),
            ("logprobs", 0 <= (self.logprobs or 0) <= MAX_LOGPROBS, f"0 to {MAX_LOGPROBS}"),
            ("prompt_logprobs", 0 <= (self.prompt_logprobs or 0) <= MAX_LOGPROBS, f"0 to {MAX_LOGPROBS}"),
        )
        for name, holds, allowed in bounds:
            if not holds:
                raise UserError(f"{name}={getattr(self, name)} is out of range", allowed=allowed)


def check_finite(logits_BV: Tensor) -> None:
    """Raise NotFinite when a row holds a logit that is NaN or +inf, or none above -inf."""
    if not bool(logits_BV.amax(dim=-1).isfinite().all()):
        raise NotFinite(
            "the model answered with logits that are not finite numbers (NaN, inf)", hint="check the exported weights"
        )


def sample(logits_BV: Tensor, params: Sequence[SamplingParams], positions: Sequence[int]) -> list[int]:
    """Sample one token for each row; ``positions`` are those of the tokens in their sequences.

    The draw is the inverse of the cumulative distribution at u = key(seed, position) / 2^63, tokens sorted by falling
    probability (equal ones by id). Raises NotFinite when a row holds a logit that is NaN or +inf, or none above -inf.
    """
    logits_BV = logits_BV.float()
    check_finite(logits_BV)
    greedy = [row.temperature == 0 for row in params]
    ids_B = logits_BV.argmax(dim=-1)
    if all(greedy):
        return [int(token) for token in ids_B.tolist()]
    device = logits_BV.device
    temperature_B = torch.tensor([row.temperature or 1.0 for row in params], device=device)
    uniform_B = torch.tensor(
        [_uniform(row.seed, position) for row, position in zip(params, positions, strict=True)], device=device
    )
    scaled_BV = (logits_BV - logits_BV.amax(dim=-1, keepdim=True)) / temperature_B[:, None]
    sorted_BV, order_BV = _truncated_probabilities(scaled_BV, params)
    cumulative_BV = sorted_BV.cumsum(dim=-1)
    threshold_B = uniform_B * cumulative_BV[:, -1]
    rank_B = (cumulative_BV <= threshold_B[:, None]).sum(dim=-1)
    last_B = ((sorted_BV > 0) * torch.arange(sorted_BV.shape[-1], device=device)).amax(dim=-1)
    drawn_B = order_BV.gather(1, torch.minimum(rank_B, last_B)[:, None])[:, 0]
    sampled_B = torch.where(torch.tensor(greedy, device=device), ids_B, drawn_B)
    return [int(token) for token in sampled_B.tolist()]


def _truncated_probabilities(scaled_BV: Tensor, params: Sequence[SamplingParams]) -> tuple[Tensor, Tensor]:
    """Return probabilities in descending order, 0 outside top-k and top-p, and the token ids in that order."""
    device, vocabulary = scaled_BV.device, scaled_BV.shape[-1]
    sorted_BV, order_BV = scaled_BV.sort(dim=-1, descending=True, stable=True)
    probability_BV = sorted_BV.softmax(dim=-1)
    top_k_B = torch.tensor([row.top_k or vocabulary for row in params], device=device)
    top_p_B = torch.tensor([row.top_p for row in params], device=device)
    probability_BV = probability_BV * (torch.arange(vocabulary, device=device) < top_k_B[:, None])
    # The sum before each token: shifted, not subtracted, so that rounding cannot make it fall and leave a hole.
    cumulative_BV = probability_BV.cumsum(dim=-1)
    before_BV = cumulative_BV.roll(1, dims=-1)
    before_BV[:, 0] = 0
    # The share is of what top-k left, so that both bounds together mean what each means alone. A top_p of 1 keeps all:
    # the comparison alone would drop the tail, where the cumulative sum in fp32 already reads 1. (A sum() over the row
    # would not be batch-invariant.)
    inside_BV = before_BV < top_p_B[:, None] * cumulative_BV[:, -1:]
    inside_BV = inside_BV | (top_p_B[:, None] >= 1)
    inside_BV[:, 0] = True
    return probability_BV * inside_BV, order_BV


def _uniform(seed: int, position: int) -> float:
    """Return a number in [0, 1) keyed by (seed, position); rounded to 1 in fp32, it selects the last token."""
    return (derive_key("sample", seed, position) >> 10) / float(1 << 53)
