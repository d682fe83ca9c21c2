"""Causal self-attention with grouped queries.

The kernel is an argument (from ``choice.kernels_of`` or a cache), which all layers may share. Heads are counted from
the projections' outputs, so a projection that is sharded over ranks works (without ALiBi, whose slopes are of all
heads).

Shapes: B batch, T time (queries), S time (keys), D hidden, H query heads, K key/value heads, d width of a head.
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from smalti.config.model import ModelConfig
from smalti.model.blocks.attention.scores import Attend
from smalti.model.blocks.norm import RMSNorm
from smalti.model.blocks.rope import rotate

if TYPE_CHECKING:
    from smalti.model.blocks.kv_cache import Cache, Read


class Attention(nn.Module):
    """Multi-head attention with grouped queries (Ainslie et al. 2023, arXiv:2305.13245)."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        width, head_width = config.hidden_size, config.width_per_head
        self.layer = layer
        self.head_width = head_width
        self.clip_qkv = config.clip_qkv
        bias, heads, kv_heads = config.attention_bias, config.num_attention_heads, config.kv_heads
        self.q_proj = nn.Linear(width, heads * head_width, bias=bias)
        self.k_proj = nn.Linear(width, kv_heads * head_width, bias=bias)
        self.v_proj = nn.Linear(width, kv_heads * head_width, bias=bias)
        self.o_proj = nn.Linear(heads * head_width, width, bias=bias)
        self.qk_norm = config.qk_norm
        per_norm = {None: (0, 0), "head": (1, 1), "full": (heads, kv_heads)}[config.qk_norm]
        self.q_norm, self.k_norm = (
            RMSNorm(n_heads * head_width, config.norm_eps) if n_heads else None for n_heads in per_norm
        )

    def forward(
        self,
        x_BTD: Tensor,
        rope: tuple[Tensor, Tensor] | None,
        attend: Attend | None,
        cache: "Cache | None" = None,
    ) -> Tensor:
        """[B, T, D] -> [B, T, D]; ``rope`` is the result of ``rope_table``, ``attend`` the kernel if there is no
        cache."""
        query_BTHd, key_BTKd, value_BTKd = self._project(x_BTD)
        if rope is not None:
            query_BTHd, key_BTKd = rotate(query_BTHd, *rope), rotate(key_BTKd, *rope)
        query_BHTd, key_BKTd, value_BKTd = (part.transpose(1, 2) for part in (query_BTHd, key_BTKd, value_BTKd))
        if cache is not None:
            mixed_BTHd = _attend_cached(query_BHTd, cache.update(self.layer, key_BKTd, value_BKTd))
        else:
            assert attend is not None, "without a cache the decoder passes a kernel"
            mixed_BTHd = attend(query_BHTd, key_BKTd, value_BKTd)
        out_BTD: Tensor = self.o_proj(mixed_BTHd.flatten(2))
        return out_BTD

    def _project(self, x_BTD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        batch, time, _ = x_BTD.shape
        query, key, value = self.q_proj(x_BTD), self.k_proj(x_BTD), self.v_proj(x_BTD)
        per_head = (batch, time, -1, self.head_width)
        if self.q_norm is not None and self.k_norm is not None:
            shape = per_head if self.qk_norm == "head" else (batch, time, -1)
            query, key = self.q_norm(query.view(shape)), self.k_norm(key.view(shape))
        if self.clip_qkv is not None:
            query, key, value = (part.clamp(-self.clip_qkv, self.clip_qkv) for part in (query, key, value))
        return query.view(per_head), key.view(per_head), value.view(per_head)


def _attend_cached(query_BHTd: Tensor, reads: "list[Read]") -> Tensor:
    """Return [B, T, H, d] in the query's dtype, whatever the dtype of the cache."""
    parts = [read.attend(query_BHTd[read.rows].to(read.keys.dtype), read.keys, read.values) for read in reads]
    return (parts[0] if len(parts) == 1 else torch.cat(parts)).to(query_BHTd.dtype)
