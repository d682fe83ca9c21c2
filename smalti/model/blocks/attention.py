"""Causal self-attention with grouped queries, and the cache of keys and values for decoding.

Promises: one ``scaled_dot_product_attention`` call per layer (or, for short bfloat16 rows on the CPU, the faster
``short_attention``); no mask tensor unless documents, a prompt fed in pieces or that short path need one, and then the
one that ``attention_mask`` builds serves all layers. Does not split heads over ranks by itself: heads are counted from
the projections' outputs, so a sharded projection works.

Shapes: B batch, T time (queries), S time (keys), D hidden, H query heads, K key/value heads, d width of a head.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from smalti.base.errors import UserError
from smalti.config.model import ModelConfig
from smalti.model.blocks.norm import RMSNorm
from smalti.model.blocks.rope import rotate
from smalti.model.blocks.short_attention import is_short, short_attention


class KVCache:
    """Keys and values of the tokens seen so far, preallocated: per layer two tensors [B, K, max_length_tokens, d].

    All rows have the same ``length``. ``Decoder.forward`` writes each layer by ``update`` and calls ``advance`` once.
    """

    def __init__(
        self,
        config: ModelConfig,
        batch_size: int,
        max_length_tokens: int,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        shape = (batch_size, config.kv_heads, max_length_tokens, config.width_per_head)
        self.layers = [
            (torch.empty(shape, dtype=dtype, device=device), torch.empty(shape, dtype=dtype, device=device))
            for _ in range(config.num_hidden_layers)
        ]
        self.max_length_tokens = max_length_tokens
        self.length = 0

    def __len__(self) -> int:
        """Number of layers."""
        return len(self.layers)

    def __getitem__(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values [B, K, length, d] of a layer, as views."""
        keys_BKSd, values_BKSd = self.layers[layer]
        return keys_BKSd[:, :, : self.length], values_BKSd[:, :, : self.length]

    def check_room(self, n_tokens: int) -> None:
        """UserError when ``n_tokens`` more do not fit."""
        if self.length + n_tokens > self.max_length_tokens:
            raise UserError(
                f"the cache holds {self.max_length_tokens} tokens, {self.length} are taken: {n_tokens} more do not fit",
                hint="make the KVCache with a larger max_length_tokens, or shorten the prompt",
            )

    def update(self, layer: int, keys_BKTd: Tensor, values_BKTd: Tensor) -> tuple[Tensor, Tensor]:
        """Append T tokens to a layer; returns views [B, K, length + T, d]. ``length`` stays until ``advance``."""
        end = self.length + keys_BKTd.shape[2]
        all_keys_BKSd, all_values_BKSd = self.layers[layer]
        all_keys_BKSd[:, :, self.length : end] = keys_BKTd
        all_values_BKSd[:, :, self.length : end] = values_BKTd
        return all_keys_BKSd[:, :, :end], all_values_BKSd[:, :, :end]

    def advance(self, n_tokens: int) -> None:
        """Count ``n_tokens`` as seen, after all layers have been written."""
        self.length += n_tokens


def attention_mask(like_BTD: Tensor, past: int, documents_BT: Tensor | None) -> Tensor | None:
    """What is added to the scores, [B or 1, 1, T, S] of 0 and -inf in ``like_BTD``'s dtype, or None for plain causal.

    Documents: a token sees itself and the tokens of its own document before it. With a cache of ``past`` tokens, token
    t sees keys 0..past+t; a single token sees all and needs no mask. Added rather than boolean because torch's CPU
    kernel turns a boolean mask into this in every layer anew (9.9 against 9.3 ms forward at B16 T256 H4 d32).
    """
    time, device = like_BTD.shape[1], like_BTD.device
    short = past == 0 and is_short(like_BTD.dtype, device, time)
    if documents_BT is None and not short and (past == 0 or time == 1):
        return None
    sees_BTS = torch.ones(1, time, past + time, dtype=torch.bool, device=device).tril(past)
    if documents_BT is not None:
        sees_BTS = sees_BTS & (documents_BT[:, :, None] == documents_BT[:, None, :])
    return torch.zeros(sees_BTS.shape, dtype=like_BTD.dtype, device=device).masked_fill_(~sees_BTS, -torch.inf)[:, None]


class Attention(nn.Module):
    """Multi-head attention with rotary positions and grouped queries (Ainslie et al. 2023, arXiv:2305.13245)."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        width, head_width = config.hidden_size, config.width_per_head
        self.layer = layer
        self.head_width = head_width
        self.clip_qkv = config.clip_qkv
        self.q_proj = nn.Linear(width, config.num_attention_heads * head_width, bias=False)
        self.k_proj = nn.Linear(width, config.kv_heads * head_width, bias=False)
        self.v_proj = nn.Linear(width, config.kv_heads * head_width, bias=False)
        self.o_proj = nn.Linear(config.num_attention_heads * head_width, width, bias=False)
        self.q_norm = RMSNorm(head_width, config.norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(head_width, config.norm_eps) if config.qk_norm else None

    def forward(
        self,
        x_BTD: Tensor,
        rope: tuple[Tensor, Tensor],
        mask_BTS: Tensor | None = None,
        cache: KVCache | None = None,
    ) -> Tensor:
        """[B, T, D] -> [B, T, D]; ``mask_BTS`` is what ``attention_mask`` gave, ``rope`` what ``rope_table`` gave."""
        query_BTHd, key_BTKd, value_BTKd = self._project(x_BTD)
        query_BHTd = rotate(query_BTHd, *rope).transpose(1, 2)
        key_BKSd = rotate(key_BTKd, *rope).transpose(1, 2)
        value_BKSd = value_BTKd.transpose(1, 2)
        if cache is not None:
            key_BKSd, value_BKSd = cache.update(self.layer, key_BKSd, value_BKSd)
        out_BTD: Tensor = self.o_proj(_attend(query_BHTd, key_BKSd, value_BKSd, mask_BTS).flatten(2))
        return out_BTD

    def _project(self, x_BTD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        batch, time, _ = x_BTD.shape
        query, key, value = self.q_proj(x_BTD), self.k_proj(x_BTD), self.v_proj(x_BTD)
        if self.clip_qkv is not None:
            query, key, value = (part.clamp(-self.clip_qkv, self.clip_qkv) for part in (query, key, value))
        query_BTHd, key_BTKd, value_BTKd = (part.view(batch, time, -1, self.head_width) for part in (query, key, value))
        if self.q_norm is not None and self.k_norm is not None:
            query_BTHd, key_BTKd = self.q_norm(query_BTHd), self.k_norm(key_BTKd)
        return query_BTHd, key_BTKd, value_BTKd


def _attend(query_BHTd: Tensor, key_BKSd: Tensor, value_BKSd: Tensor, mask_BTS: Tensor | None) -> Tensor:
    """[B, T, H, d]. ``enable_gqa`` beats repeated keys: 36.9 against 38.8 ms per layer at B16 T256 H4 K2 on the CPU."""
    time, past = query_BHTd.shape[2], key_BKSd.shape[2] - query_BHTd.shape[2]
    if past == 0 and mask_BTS is not None and is_short(query_BHTd.dtype, query_BHTd.device, time):
        return short_attention(query_BHTd, key_BKSd, value_BKSd, mask_BTS)
    mixed_BHTd = F.scaled_dot_product_attention(
        query_BHTd,
        key_BKSd,
        value_BKSd,
        attn_mask=mask_BTS,
        is_causal=mask_BTS is None and time > 1,
        enable_gqa=query_BHTd.shape[1] != key_BKSd.shape[1],
    )
    return mixed_BHTd.transpose(1, 2)
