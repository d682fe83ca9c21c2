"""Attention by torch's fused kernels, and by plain matmuls over all keys.

Shapes: B batch, T time (queries), S time (keys), H query heads, K key/value heads, G = H / K, d width of a head.
"""

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from smalti.model.blocks.attention.scores import Scores, bias_of_rows


class Fused:
    """``scaled_dot_product_attention``: whole rows, causal; with a mask [B or 1, 1, T, S] to add, whatever it says."""

    def __init__(self, scale: float, mask: Tensor | None = None) -> None:
        self.scale, self.mask = scale, mask

    def __call__(self, query_BHTd: Tensor, key_BKSd: Tensor, value_BKSd: Tensor) -> Tensor:
        """[B, T, H, d]. ``enable_gqa`` beats repeated keys: 36.9 against 38.8 ms at B16 T256 H4 K2 on the CPU."""
        mixed_BHTd = F.scaled_dot_product_attention(
            query_BHTd,
            key_BKSd,
            value_BKSd,
            attn_mask=self.mask,
            is_causal=self.mask is None and query_BHTd.shape[2] > 1,
            scale=self.scale,
            enable_gqa=query_BHTd.shape[1] != key_BKSd.shape[1],
        )
        return mixed_BHTd.transpose(1, 2)


class Dense:
    """Plain matmuls over all keys, with everything that a score may have: for few queries, or where nothing else runs.

    For one query a row on a CPU, as a decode step has, its bits depend neither on the other rows nor on threads, where
    the number of keys, masked ones included, is the same and a multiple of 16. ``_matmul_of_rows`` and
    docs/decisions/0008 say how; torch's fused CPU kernel gives other bits depending on the thread that works on a row.
    It is as fast there: 4.0 against 3.7 ms on two cores for 16 rows of 704 keys, 12 heads of 64.
    """

    def __init__(self, scores: Scores, bias: Tensor | None) -> None:
        """``bias``: what ``bias_of_distance`` gave, with B or 1 before its other dims; None: all keys are seen."""
        self.scores = scores
        self.bias = bias if bias is None or bias.dim() == 5 else bias[:, None, None]

    def __call__(self, query_BHTd: Tensor, key_BKSd: Tensor, value_BKSd: Tensor) -> Tensor:
        """[B, T, H, d]."""
        (batch, _, time, width), groups = query_BHTd.shape, key_BKSd.shape[1]
        query_BKgd = (query_BHTd * self.scores.scale).reshape(batch, groups, -1, width)
        matmul = _matmul_of_rows if time == 1 and query_BHTd.is_cpu else torch.matmul
        score_BKgS = matmul(query_BKgd, key_BKSd.transpose(-2, -1))
        if not self.scores.plain:
            score_BKgS = score_BKgS.to(torch.promote_types(score_BKgS.dtype, torch.float32))
        if self.scores.cap is not None:
            score_BKgS = (score_BKgS / self.scores.cap).tanh() * self.scores.cap
        if self.bias is not None:
            score_BKgS = (score_BKgS.unflatten(2, (-1, time)) + self.bias).flatten(2, 3)
        mixed_BKgd = matmul(score_BKgS.softmax(dim=-1).to(value_BKSd.dtype), value_BKSd)
        return mixed_BKgd.reshape(batch, -1, time, width).transpose(1, 2)


def _matmul_of_rows(left_BKgx: Tensor, right_BKxy: Tensor) -> Tensor:
    """left @ right, [B, K, g, y], with bits that do not depend on B or on the place in the batch.

    MKL's batched matmul takes another kernel for a matrix that begins off a boundary of its vectors (64 bytes at most),
    so each of left and of the product is padded to whole ones; and it splits a single matrix over threads, so there
    are two at least.
    """
    batch, groups, n_rows, inner = left_BKgx.shape
    multiple = 16 // math.gcd(16, inner, right_BKxy.shape[-1])
    if n_rows % multiple:
        left_BKgx = F.pad(left_BKgx, (0, 0, 0, -n_rows % multiple))
    if batch * groups == 1:
        left_BKgx = left_BKgx.expand(2, -1, -1, -1)
    return (left_BKgx @ right_BKxy)[:batch, :, :n_rows]


def dense_rows(like_BTD: Tensor, window: int | None, scores: Scores, documents_BT: Tensor | None) -> Dense:
    """Whole rows, packed or not."""
    return Dense(scores, bias_of_rows(like_BTD, window, scores, documents_BT))
