"""Runs the decoder over a group of sequences of equal length, with one key/value cache.

Promises: every row of a group stands at the same position, so there is no padding and no mask, and a row's logits are
those of the sequence alone (up to the rounding of a larger matmul). The output head runs on the last position only.

B: rows. T: tokens fed at once. V: vocabulary.
"""

from collections.abc import Sequence as Rows

import torch
from torch import Tensor

from smalti.model.blocks.kv_cache import KVCache
from smalti.model.decoder import Decoder


class Runner:
    """The model and the cache of one group."""

    def __init__(self, model: Decoder, batch_size: int, limit_tokens: int) -> None:
        self._model = model
        weight = model.embed.weight
        self._device, self._dtype = weight.device, weight.dtype
        self._limit_tokens = limit_tokens
        self._cache = self._new_cache(batch_size)

    def forward(self, rows: Rows[Rows[int]]) -> Tensor:
        """Feed T tokens of each row after those already cached; logits of the next token, fp32 [B, V]."""
        ids_BT = torch.tensor(rows, dtype=torch.long, device=self._device)
        with torch.inference_mode():
            logits_BV: Tensor = self._model(ids_BT, cache=self._cache, head=_last_logits).value
        return logits_BV.float()

    def keep(self, rows: list[int]) -> None:
        """Go on with these rows of the group only, in this order."""
        old, self._cache = self._cache, self._new_cache(len(rows))
        for (keys, values), (old_keys, old_values) in zip(self._cache.layers, old.layers, strict=True):
            keys[:, :, : old.length] = old_keys[rows, :, : old.length]
            values[:, :, : old.length] = old_values[rows, :, : old.length]
        self._cache.advance(old.length)

    def _new_cache(self, batch_size: int) -> KVCache:
        return KVCache(self._model.config, batch_size, self._limit_tokens, dtype=self._dtype, device=self._device)


def _last_logits(hidden_BTD: Tensor, weight_VD: Tensor) -> Tensor:
    return hidden_BTD[:, -1] @ weight_VD.T
