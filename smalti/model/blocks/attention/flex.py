"""Attention by torch's ``flex_attention``: compiled on CUDA, forward only and not compiled elsewhere.

Shapes: B batch, T time, H query heads, K key/value heads, d width of a head.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from smalti.model.blocks.attention.scores import Scores, document_runs


class Flex:
    """A kernel for any kind of score; it holds the block mask of a batch."""

    def __init__(self, like_BTD: Tensor, window: int | None, scores: Scores, documents_BT: Tensor | None) -> None:
        (batch, time), device = like_BTD.shape[:2], like_BTD.device
        self.scores = scores
        # A tensor, because torch.compile makes a float that differs in the next model a symbol, with which
        # flex_attention cannot be compiled (torch 2.11 to 2.13); filled on the device, so nothing waits.
        self.cap = None if scores.cap is None else torch.full((), scores.cap, device=device)
        self._attend, build = _functions(device.type == "cuda")
        runs_BT = None if documents_BT is None else document_runs(documents_BT).cumsum(dim=1)

        def sees(row: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            seen = query >= key
            if window is not None:
                seen = seen & (query - key < window)
            return seen if runs_BT is None else seen & (runs_BT[row, query] == runs_BT[row, key])

        self.mask = build(sees, None if runs_BT is None else batch, None, time, time, device=device)

    def __call__(self, query_BHTd: Tensor, key_BKTd: Tensor, value_BKTd: Tensor) -> Tensor:
        """Return [B, T, H, d]."""
        mixed_BHTd: Tensor = self._attend(
            query_BHTd,
            key_BKTd,
            value_BKTd,
            score_mod=None if self.scores.plain else self._score,
            block_mask=self.mask,
            scale=self.scores.scale,
            enable_gqa=query_BHTd.shape[1] != key_BKTd.shape[1],
        )
        return mixed_BHTd.transpose(1, 2)

    def _score(self, score: Tensor, _row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        if self.cap is not None:
            score = self.cap * torch.tanh(score / self.cap)
        if self.scores.slopes_KG is not None:
            score = score - self.scores.slopes_KG.flatten()[head] * (query - key)
        return score


@cache
def _functions(compiled: bool) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return ``flex_attention`` and ``create_block_mask``; uncompiled, the former computes all scores."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    if not compiled:
        return flex_attention, create_block_mask
    # Each kind of score and mask recompiles the function; beyond torch's limit it would run uncompiled, and fail.
    torch._dynamo.config.recompile_limit = max(64, torch._dynamo.config.recompile_limit)
    return torch.compile(flex_attention), torch.compile(create_block_mask)
