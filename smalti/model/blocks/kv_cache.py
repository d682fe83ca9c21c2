"""The keys and values of the tokens that a decoder has seen.

Shapes: B batch, T time (queries), S time (keys), K key/value heads, d width of a head.
"""

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from smalti.base.errors import UserError
from smalti.config.model import ModelConfig
from smalti.model.blocks.attention import attention_mask


class Read(NamedTuple):
    """What some rows of a batch attend to."""

    rows: slice
    keys: Tensor
    """[B, K, S, d] of those rows, the new tokens included; so are the values."""
    values: Tensor
    mask: Tensor | None
    """What ``attention_mask`` gives: added to the scores; None for plain causal attention."""


class Cache(Protocol):
    """What ``Decoder.forward`` asks of a cache: ``begin`` once, ``update`` once in each layer, ``advance`` once."""

    def begin(self, like_BTD: Tensor) -> Tensor:
        """Get ready for T new tokens in each row; their positions, [B or 1, T]. UserError when they do not fit."""
        ...

    def update(self, layer: int, keys_BKTd: Tensor, values_BKTd: Tensor) -> list[Read]:
        """Store the new tokens of a layer; what all rows attend to, in the order of the rows."""
        ...

    def advance(self, n_tokens: int) -> None:
        """Count the new tokens as seen, after all layers have been written."""
        ...


class KVCache:
    """Keys and values of the tokens seen so far, preallocated: per layer two tensors [B, K, max_length_tokens, d].

    All rows have the same ``length``.
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
        self._mask: Tensor | None = None

    def __len__(self) -> int:
        """Number of layers."""
        return len(self.layers)

    def __getitem__(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values [B, K, length, d] of a layer, as views."""
        keys_BKSd, values_BKSd = self.layers[layer]
        return keys_BKSd[:, :, : self.length], values_BKSd[:, :, : self.length]

    def begin(self, like_BTD: Tensor) -> Tensor:
        """Positions [1, T] of T new tokens. UserError when they do not fit."""
        time = like_BTD.shape[1]
        if self.length + time > self.max_length_tokens:
            raise UserError(
                f"the cache holds {self.max_length_tokens} tokens, {self.length} are taken: {time} more do not fit",
                hint="make the KVCache with a larger max_length_tokens, or shorten the prompt",
            )
        self._mask = attention_mask(like_BTD, self.length, None)
        if self._mask is not None and self.length:
            self._mask = self._mask.to(self.layers[0][0].dtype)
        return torch.arange(self.length, self.length + time, device=like_BTD.device)[None]

    def update(self, layer: int, keys_BKTd: Tensor, values_BKTd: Tensor) -> list[Read]:
        """Append T tokens to a layer. ``length`` stays until ``advance``."""
        end = self.length + keys_BKTd.shape[2]
        all_keys_BKSd, all_values_BKSd = self.layers[layer]
        all_keys_BKSd[:, :, self.length : end] = keys_BKTd
        all_values_BKSd[:, :, self.length : end] = values_BKTd
        if self.length == 0:
            # The new tokens are all there is: in their own dtype, which may have the faster kernel.
            return [Read(slice(None), keys_BKTd, values_BKTd, self._mask)]
        return [Read(slice(None), all_keys_BKSd[:, :, :end], all_values_BKSd[:, :, :end], self._mask)]

    def advance(self, n_tokens: int) -> None:
        """Count ``n_tokens`` as seen, after all layers have been written."""
        self.length += n_tokens
