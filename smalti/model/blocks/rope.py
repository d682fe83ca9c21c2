"""Rotary position embedding (Su et al. 2021, arXiv:2104.09864) in Hugging Face's half-rotation layout.

The angles are computed once per forward in float32, then cast to the dtype of the activations, as in transformers;
there is no buffer. ``rope_scaling`` is computed as in transformers 5.23; docs/concepts/model/attention.md has the rules
that depend on the length.

Shapes: B batch, T time, H heads, d width of a head, f = d / 2 frequencies, 1 a broadcast dim.
"""

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from smalti.config.model import ModelConfig, RopeScalingConfig


def rope_table(
    config: ModelConfig, positions_BT: Tensor, dtype: torch.dtype, lengths_B1: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return cosines and signed sines, both [B or 1, T, 1, d], of position times frequency, each frequency twice.

    The sines of the first half are negative, so that a rotation is x * cosine + (x with its halves swapped) * sine.
    lengths_B1: each row's length, on which ``dynamic`` and ``longrope`` depend: with a cache the length that it has
    room for, which stays the same while the row grows; None: the largest position plus one, as in transformers.
    """
    if lengths_B1 is None:
        lengths_B1 = positions_BT.max() + 1
    frequencies, factor = rope_frequencies(config, lengths_B1)
    angles = (positions_BT.to(torch.float32)[..., None] * frequencies)[:, :, None, :]
    cosine, sine = angles.cos() * factor, angles.sin() * factor
    return torch.cat((cosine, cosine), dim=-1).to(dtype), torch.cat((-sine, sine), dim=-1).to(dtype)


def rope_frequencies(config: ModelConfig, lengths: Tensor) -> tuple[Tensor, float]:
    """Return the frequencies, float32 [f] or, if they depend on the length, [*lengths.shape, f]; and a factor on the
    table.

    f_i = theta^(-2i/d), changed by ``config.rope_scaling``.
    """
    scaling, width = config.rope_scaling, config.width_per_head
    steps_f = torch.arange(0, width, 2, dtype=torch.float32, device=lengths.device) / width
    plain_f = 1.0 / config.rope_theta**steps_f
    if scaling is None:
        return plain_f, 1.0
    if scaling.rope_type == "longrope":
        return _longrope(config, scaling, plain_f, lengths)
    factor = scaling.factor
    assert factor is not None, "the config checks the keys of each rule"
    if scaling.rope_type == "linear":
        return plain_f / factor, 1.0
    if scaling.rope_type == "dynamic":
        return _dynamic(config, factor, steps_f, lengths), 1.0
    original = scaling.original_max_position_embeddings
    assert original is not None
    if scaling.rope_type == "llama3":
        return _llama3(scaling, factor, original, plain_f), 1.0
    return _yarn(config, scaling, factor, original, plain_f), _yarn_attention_factor(scaling, factor)


def _dynamic(config: ModelConfig, factor: float, steps_f: Tensor, lengths: Tensor) -> Tensor:
    """Return NTK-aware frequencies: beyond the trained length the base grows with it (bloc97 and emozilla, in YaRN's
    paper)."""
    trained, width = config.max_position_embeddings, config.width_per_head
    stretch = factor * lengths.clamp(min=trained) / trained - (factor - 1)
    # The single frequency of a head of 2 is 1 whatever the base.
    base = config.rope_theta * stretch ** (width / max(width - 2, 1))
    frequencies: Tensor = 1.0 / base[..., None] ** steps_f
    return frequencies


def _longrope(
    config: ModelConfig, scaling: RopeScalingConfig, plain_f: Tensor, lengths: Tensor
) -> tuple[Tensor, float]:
    """Return LongRoPE's frequencies, with other divisors beyond the original length, and factor (arXiv:2402.13753)."""
    original = scaling.original_max_position_embeddings
    assert original is not None
    short_f, long_f = (
        plain_f / torch.tensor(divisors, dtype=torch.float32, device=plain_f.device)
        for divisors in (scaling.short_factor, scaling.long_factor)
    )
    attention_factor = scaling.attention_factor
    if attention_factor is None:
        factor = scaling.factor or config.max_position_embeddings / original
        attention_factor = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    return torch.where((lengths > original)[..., None], long_f, short_f), attention_factor


def _llama3(scaling: RopeScalingConfig, factor: float, original: int, plain_f: Tensor) -> Tensor:
    """Return Llama 3.1's frequencies: low ones are divided by the factor, high ones unchanged, linear between."""
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    assert low is not None and high is not None
    turns_f = original * plain_f / (2 * math.pi)
    share_f = (turns_f - low) / (high - low)
    between_f = (1 - share_f) * plain_f / factor + share_f * plain_f
    return torch.where(turns_f < low, plain_f / factor, torch.where(turns_f > high, plain_f, between_f))


def _yarn(config: ModelConfig, scaling: RopeScalingConfig, factor: float, original: int, plain_f: Tensor) -> Tensor:
    """Return YaRN's frequencies: those with few turns in the original length are divided (arXiv:2309.00071, eq. 23)."""
    width, log_base = config.width_per_head, math.log(config.rope_theta)

    def index_of(turns: float) -> float:
        return width * math.log(original / (turns * 2 * math.pi)) / (2 * log_base)

    low, high = index_of(scaling.beta_fast or 32.0), index_of(scaling.beta_slow or 1.0)
    if scaling.truncate is not False:
        low, high = float(math.floor(low)), float(math.ceil(high))
    low, high = max(low, 0.0), min(high, width - 1.0)
    if low == high:
        high += 0.001
    index_f = torch.arange(width // 2, dtype=torch.float32, device=plain_f.device)
    divided_f = ((index_f - low) / (high - low)).clamp(0, 1)
    return plain_f / factor * divided_f + plain_f * (1 - divided_f)


def _yarn_attention_factor(scaling: RopeScalingConfig, factor: float) -> float:
    """Return YaRN's 0.1 ln(factor) + 1, or the quotient of two such terms (DeepSeek's ``mscale``)."""
    if scaling.attention_factor is not None:
        return scaling.attention_factor

    def term(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    if scaling.mscale and scaling.mscale_all_dim:
        return term(scaling.mscale) / term(scaling.mscale_all_dim)
    return term(1.0)


def rotate(x_BTHd: Tensor, cosine_BT1d: Tensor, sine_BT1d: Tensor) -> Tensor:
    """Rotate the pairs (i, i + d/2) of each head by the angles; [B, T, H, d] -> contiguous [B, T, H, d]."""
    rotated_BTHd: Tensor = _Rotate.apply(x_BTHd, cosine_BT1d, sine_BT1d)
    return rotated_BTHd


class _Rotate(torch.autograd.Function):
    """A rotation; its derivative is the inverse rotation, so only the table is saved for backward."""

    @staticmethod
    def forward(ctx: Any, x_BTHd: Tensor, cosine_BT1d: Tensor, sine_BT1d: Tensor) -> Tensor:
        ctx.save_for_backward(cosine_BT1d, sine_BT1d)
        return _rotate_halves(x_BTHd, cosine_BT1d, sine_BT1d, 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BTHd: Tensor) -> tuple[Tensor, None, None]:
        cosine_BT1d, sine_BT1d = ctx.saved_tensors
        return _rotate_halves(grad_BTHd, cosine_BT1d, sine_BT1d, -1), None, None


def _rotate_halves(x_BTHd: Tensor, cosine_BT1d: Tensor, sine_BT1d: Tensor, direction: int) -> Tensor:
    first, second = x_BTHd.chunk(2, dim=-1)
    return (x_BTHd * cosine_BT1d).addcmul_(torch.cat((second, first), dim=-1), sine_BT1d, value=direction)
