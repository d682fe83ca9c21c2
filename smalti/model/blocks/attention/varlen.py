"""Attention over packed documents by torch's ``varlen_attn``: CUDA, bfloat16 and float16; no ALiBi, no soft cap.

Waits for the device once a batch unless the number of documents is given.

Shapes: B batch, T time, N tokens of all rows, H query heads, K key/value heads, d width of a head.
"""

import inspect
from functools import cache
from typing import Any

import torch
from torch import Tensor

from smalti.model.blocks.attention.scores import document_runs


class Varlen:
    """A kernel over packed documents; it holds their offsets."""

    def __init__(
        self,
        like_BTD: Tensor,
        window: int | None,
        scale: float,
        documents_BT: Tensor | None,
        n_documents: int | None = None,
    ) -> None:
        """n_documents: runs of equal numbers in ``documents_BT``; if None, counting them waits for the device."""
        (batch, self.time), device = like_BTD.shape[:2], like_BTD.device
        self.scale, self.window, self.grouped = scale, window, _grouped()
        n_tokens = batch * self.time
        if documents_BT is None:
            self.offsets = torch.arange(0, n_tokens + 1, self.time, dtype=torch.int32, device=device)
        else:
            begins_N = document_runs(documents_BT).flatten()
            self.offsets = _offsets(begins_N, int(begins_N.sum()) if n_documents is None else n_documents)

    def __call__(self, query_BHTd: Tensor, key_BKTd: Tensor, value_BKTd: Tensor) -> Tensor:
        """Return [B, T, H, d]."""
        from torch.nn.attention.varlen import varlen_attn

        options = self.grouped if query_BHTd.shape[1] != key_BKTd.shape[1] else {}
        query_NHd, key_NKd, value_NKd = (
            part.transpose(1, 2).flatten(0, 1) for part in (query_BHTd, key_BKTd, value_BKTd)
        )
        reach = -1 if self.window is None else self.window - 1
        mixed_NHd = varlen_attn(
            query_NHd, key_NKd, value_NKd, self.offsets, self.offsets, self.time, self.time,
            scale=self.scale, window_size=(reach, 0), **options,
        )  # fmt: skip
        assert isinstance(mixed_NHd, Tensor)
        return mixed_NHd.unflatten(0, (-1, self.time))


@cache
def _grouped() -> dict[str, Any]:
    """Return the argument of ``varlen_attn`` for grouped queries; torch 2.11 has none and needs none."""
    from torch.nn.attention.varlen import varlen_attn

    return {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}


def _offsets(begins_N: Tensor, runs: int) -> Tensor:
    """Return [runs + 1] int32: the places where ``begins_N`` is True, and N. ``nonzero`` would wait for the device."""
    n_tokens = len(begins_N)
    place_N = torch.where(begins_N, begins_N.cumsum(0) - 1, runs)
    token_N = torch.where(begins_N, torch.arange(n_tokens, device=begins_N.device), n_tokens)
    offsets = torch.full((runs + 1,), n_tokens, device=begins_N.device)
    return offsets.scatter_(0, place_N, token_N).to(torch.int32)
