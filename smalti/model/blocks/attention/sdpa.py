"""Attention by torch's fused kernels, and by plain matrix products over all keys.

Shapes: B batch, T time (queries), S time (keys), H query heads, K key/value heads, G = H / K, d width of a head.
"""

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from smalti.model.blocks.attention.scores import Scores, bias_of_rows


class Fused:
    """``scaled_dot_product_attention`` over whole rows: causal, or with an additive mask [B or 1, 1, T, S]."""

    def __init__(self, scale: float, mask: Tensor | None = None) -> None:
        self.scale, self.mask = scale, mask

    def __call__(self, query_BHTd: Tensor, key_BKSd: Tensor, value_BKSd: Tensor) -> Tensor:
        """Return [B, T, H, d]."""
        mixed_BHTd = F.scaled_dot_product_attention(
            query_BHTd,
            key_BKSd,
            value_BKSd,
            attn_mask=self.mask,
            is_causal=self.mask is None and query_BHTd.shape[2] > 1,
            scale=self.scale,
            # Faster than repeated keys: 36.9 against 38.8 ms at B16 T256 H4 K2 on the CPU.
            enable_gqa=query_BHTd.shape[1] != key_BKSd.shape[1],
        )
        return mixed_BHTd.transpose(1, 2)


class Dense:
    """Plain matrix products over all keys, with any kind of score: for few queries, or where no other kernel runs.

    For one query a row on a CPU (a decode step) the bits depend neither on the other rows nor on threads, if the number
    of keys, masked ones included, is the same and a multiple of 16 (``_matmul_of_rows``, docs/decisions/0008). The bits
    of torch's fused CPU kernel depend on the thread of a row. Speed: 4.0 against its 3.7 ms on two cores for 16 rows of
    704 keys, 12 heads of 64.
    """

    def __init__(self, scores: Scores, bias: Tensor | None) -> None:
        """``bias``: the result of ``bias_of_distance``, with B or 1 before its other dims; None: no key is masked."""
        self.scores = scores
        self.bias = bias if bias is None or bias.dim() == 5 else bias[:, None, None]

    def __call__(self, query_BHTd: Tensor, key_BKSd: Tensor, value_BKSd: Tensor) -> Tensor:
        """Return [B, T, H, d]."""
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
    """Return left @ right, [B, K, g, y], with bits that depend neither on B nor on the place in the batch.

    MKL's batched product uses another kernel for a matrix that is not aligned to its vectors (64 bytes at most), so
    left and result are padded; and it splits a single matrix over threads, so there are at least two.
    """
    batch, groups, n_rows, inner = left_BKgx.shape
    multiple = 16 // math.gcd(16, inner, right_BKxy.shape[-1])
    if n_rows % multiple:
        left_BKgx = F.pad(left_BKgx, (0, 0, 0, -n_rows % multiple))
    if batch * groups == 1:
        left_BKgx = left_BKgx.expand(2, -1, -1, -1)
    return (left_BKgx @ right_BKxy)[:batch, :, :n_rows]


def dense_rows(like_BTD: Tensor, window: int | None, scores: Scores, documents_BT: Tensor | None) -> Dense:
    """Build the kernel of whole rows, packed or not."""
    return Dense(scores, bias_of_rows(like_BTD, window, scores, documents_BT))
