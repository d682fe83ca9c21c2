"""The keys and values of the tokens that a decoder has seen.

Shapes: B batch, T time (queries), S time (keys), K key/value heads, d width of a head.
"""

import torch
from torch import Tensor

from smalti.base.errors import UserError
from smalti.config.model import ModelConfig


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
