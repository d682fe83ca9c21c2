"""Attention over short rows on the CPU, as plain matmuls.

Why it exists: torch's fused CPU kernel runs bfloat16 at the speed of float32, and its backward pass computes the
scores again. Forward + backward, torch 2.13, two cores of an AMD EPYC (family 25, model 17), fused and here: B8 T512
H6 d64 76 and 34 ms, in float32 91 and 59; B8 T256 H4 d32 10 and 5, in float32 9 and 7; B2 T1024 H12 d64 93 and 66, in
float32 116 and 94. On longer rows, and in float32 where no backward pass follows, the fused kernel stays the choice: it
keeps no probabilities.

Promises: equals ``scaled_dot_product_attention`` up to rounding (the scores are rounded to the input's dtype before the
softmax, as in transformers' eager attention). Keeps half of the [T, T] probabilities of every head for backward.

Shapes: B batch, T time, H query heads, K key/value heads, G = H / K query heads per key head, d width of a head, t
queries of a block, s keys that they may see, S = T.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

_LONGEST_TOKENS = 1024
_BLOCK_TOKENS = 128


def is_short(dtype: torch.dtype, device: torch.device, time: int) -> bool:
    """Whether ``short_attention`` is the faster way to attend over rows of ``time`` tokens (float32: and go back)."""
    fits = dtype == torch.bfloat16 or (dtype == torch.float32 and torch.is_grad_enabled())
    return device.type == "cpu" and fits and 1 < time <= _LONGEST_TOKENS


def short_attention(query_BHTd: Tensor, key_BKTd: Tensor, value_BKTd: Tensor, bias_BTS: Tensor) -> Tensor:
    """[B, H, T, d] -> [B, T, H, d]; ``bias_BTS`` [B or 1, 1, T, T] is added to the scores and must be causal."""
    mixed_BTHd: Tensor = _Short.apply(query_BHTd, key_BKTd, value_BKTd, bias_BTS)
    return mixed_BTHd


class _Short(torch.autograd.Function):
    """Queries go in blocks, each against the keys up to its end only: about half of the square is never computed."""

    @staticmethod
    def forward(ctx: Any, query_BHTd: Tensor, key_BKTd: Tensor, value_BKTd: Tensor, bias_BTS: Tensor) -> Tensor:
        (batch, heads, time, width), groups = query_BHTd.shape, key_BKTd.shape[1]
        key_BKTd, value_BKTd = key_BKTd.contiguous(), value_BKTd.contiguous()
        query_BKGTd = (query_BHTd * width**-0.5).unflatten(1, (groups, -1))
        out_BTHd = query_BHTd.new_empty(batch, time, heads, width)
        out_BKGTd = out_BTHd.transpose(1, 2).unflatten(1, (groups, -1))
        probabilities = []
        for begin, end in _spans(time):
            score_BKgs = _rows(query_BKGTd, begin, end) @ key_BKTd[:, :, :end].transpose(-2, -1)
            score_BKgs.unflatten(2, (-1, end - begin)).add_(bias_BTS[:, :, None, begin:end, :end])
            probability_BKgs = score_BKgs.softmax(dim=-1)
            mixed_BKgd = probability_BKgs @ value_BKTd[:, :, :end]
            out_BKGTd[:, :, :, begin:end] = mixed_BKgd.unflatten(2, (-1, end - begin))
            probabilities.append(probability_BKgs)
        ctx.save_for_backward(query_BKGTd, key_BKTd, value_BKTd, *probabilities)
        return out_BTHd

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BTHd: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        query_BKGTd, key_BKTd, value_BKTd, *probabilities = ctx.saved_tensors
        time, width = query_BKGTd.shape[3:]
        grad_BKGTd = grad_BTHd.transpose(1, 2).unflatten(1, (query_BKGTd.shape[1], -1))
        d_query_BTHd = torch.empty_like(grad_BTHd, memory_format=torch.contiguous_format)
        d_query_BKGTd = d_query_BTHd.transpose(1, 2).unflatten(1, (query_BKGTd.shape[1], -1))
        d_key_BKTd = torch.zeros_like(key_BKTd, dtype=torch.float32)
        d_value_BKTd = torch.zeros_like(value_BKTd, dtype=torch.float32)
        for (begin, end), probability_BKgs in zip(_spans(time), probabilities, strict=True):
            grad_BKgd, query_BKgd = _rows(grad_BKGTd, begin, end), _rows(query_BKGTd, begin, end)
            d_value_BKTd[:, :, :end] += probability_BKgs.transpose(-2, -1) @ grad_BKgd
            d_probability_BKgs = grad_BKgd @ value_BKTd[:, :, :end].transpose(-2, -1)
            d_score_BKgs = torch._softmax_backward_data(
                d_probability_BKgs, probability_BKgs, -1, probability_BKgs.dtype
            )
            d_rows_BKgd = (d_score_BKgs @ key_BKTd[:, :, :end]).mul_(width**-0.5)
            d_query_BKGTd[:, :, :, begin:end] = d_rows_BKgd.unflatten(2, (-1, end - begin))
            d_key_BKTd[:, :, :end] += d_score_BKgs.transpose(-2, -1) @ query_BKgd
        dtype = key_BKTd.dtype
        return d_query_BTHd.transpose(1, 2), d_key_BKTd.to(dtype), d_value_BKTd.to(dtype), None


def _spans(time: int) -> list[tuple[int, int]]:
    return [(begin, min(begin + _BLOCK_TOKENS, time)) for begin in range(0, time, _BLOCK_TOKENS)]


def _rows(x_BKGTd: Tensor, begin: int, end: int) -> Tensor:
    """The queries of one block for all heads of a group, [B, K, G * t, d]: grouped queries need no repeated keys."""
    return x_BKGTd[:, :, :, begin:end].flatten(2, 3)
