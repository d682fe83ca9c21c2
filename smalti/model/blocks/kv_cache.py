"""The key/value cache of a decoder, and what the decoder calls of any such cache.

Shapes: B batch, T time (queries), S time (keys), K key/value heads, d width of a head.
"""

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from smalti.base.errors import UserError
from smalti.config.model import ModelConfig
from smalti.model.blocks.attention.choice import kernels_of, windows_of
from smalti.model.blocks.attention.scores import Attend, bias_of_distance, scores_of
from smalti.model.blocks.attention.sdpa import Dense, Fused


class Read(NamedTuple):
    """Keys and values that some rows of a batch attend to, and the kernel."""

    rows: slice
    keys: Tensor
    """[B, K, S, d] of those rows, the new tokens included; ``values`` likewise."""
    values: Tensor
    attend: Attend


class Place(NamedTuple):
    """Positions of new tokens."""

    positions_BT: Tensor
    """[B or 1, T]."""
    lengths_B1: Tensor
    """[B or 1, 1]: the length that each row has room for, for rotary scalings that depend on a length."""


class Cache(Protocol):
    """The methods that ``Decoder.forward`` calls: ``begin`` once, ``update`` once in each layer, ``advance`` once."""

    def begin(self, like_BTD: Tensor) -> Place:
        """Prepare for T new tokens in each row and return their positions. UserError if they do not fit."""
        ...

    def update(self, layer: int, keys_BKTd: Tensor, values_BKTd: Tensor) -> list[Read]:
        """Store the new tokens of a layer; returns what all rows attend to, in the order of the rows."""
        ...

    def advance(self, n_tokens: int) -> None:
        """Add the new tokens to the length, after all layers have been updated."""
        ...


def cached_kernels(
    config: ModelConfig, positions_BT: Tensor, n_keys: int, dtype: torch.dtype
) -> dict[int | None, Attend]:
    """Build the kernels over the first keys of a cache of ``dtype``; ``config.window(layer)`` is a layer's key.

    A query attends to the keys up to its own position, as far as its window reaches.
    """
    scores = scores_of(config, positions_BT.device)
    distance_BTS = positions_BT[..., None] - torch.arange(n_keys, device=positions_BT.device)
    kernels: dict[int | None, Attend] = {}
    for window in windows_of(config):
        bias = bias_of_distance(distance_BTS, window, scores, dtype=dtype)
        plain = positions_BT.shape[1] > 1 and scores.plain and window is None
        kernels[window] = Fused(scores.scale, bias[:, None]) if plain else Dense(scores, bias)
    return kernels


class KVCache:
    """Keys and values of the tokens seen so far, preallocated: per layer two tensors [B, K, max_length_tokens, d].

    All rows have the same ``length``. ``rope_length_tokens``: the final length of the rows, for rotary scalings that
    depend on a length; None: ``max_length_tokens``.
    """

    def __init__(
        self,
        config: ModelConfig,
        batch_size: int,
        max_length_tokens: int,
        *,
        rope_length_tokens: int | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        shape = (batch_size, config.kv_heads, max_length_tokens, config.width_per_head)
        self.layers = [
            (torch.empty(shape, dtype=dtype, device=device), torch.empty(shape, dtype=dtype, device=device))
            for _ in range(config.num_hidden_layers)
        ]
        self.max_length_tokens = max_length_tokens
        self.rope_length_tokens = rope_length_tokens or max_length_tokens
        self.length = 0
        self._config = config
        self._kernels: dict[int | None, Attend] = {}

    def __len__(self) -> int:
        """Number of layers."""
        return len(self.layers)

    def __getitem__(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values [B, K, length, d] of a layer, as views."""
        keys_BKSd, values_BKSd = self.layers[layer]
        return keys_BKSd[:, :, : self.length], values_BKSd[:, :, : self.length]

    def begin(self, like_BTD: Tensor) -> Place:
        """Return the positions of T new tokens, the same in all rows. UserError if they do not fit."""
        time, device = like_BTD.shape[1], like_BTD.device
        if self.length + time > self.max_length_tokens:
            raise UserError(
                f"the cache has room for {self.max_length_tokens} tokens, {self.length} in use: {time} more do not fit",
                hint="build the KVCache with a larger max_length_tokens, or shorten the prompt",
            )
        positions_BT = torch.arange(self.length, self.length + time, device=device)[None]
        if self.length == 0 and time > 1:
            self._kernels = kernels_of(self._config, like_BTD, None)
        else:
            dtype = self.layers[0][0].dtype if self.length else like_BTD.dtype
            self._kernels = cached_kernels(self._config, positions_BT, self.length + time, dtype)
        return Place(positions_BT, positions_BT.new_tensor([[self.rope_length_tokens]]))

    def update(self, layer: int, keys_BKTd: Tensor, values_BKTd: Tensor) -> list[Read]:
        """Append T tokens to a layer. ``length`` stays until ``advance``."""
        end = self.length + keys_BKTd.shape[2]
        all_keys_BKSd, all_values_BKSd = self.layers[layer]
        all_keys_BKSd[:, :, self.length : end] = keys_BKTd
        all_values_BKSd[:, :, self.length : end] = values_BKTd
        attend = self._kernels[self._config.window(layer)]
        if self.length == 0:
            # There are no other tokens: use their own dtype, which may have a faster kernel.
            return [Read(slice(None), keys_BKTd, values_BKTd, attend)]
        return [Read(slice(None), all_keys_BKSd[:, :, :end], all_values_BKSd[:, :, :end], attend)]

    def advance(self, n_tokens: int) -> None:
        """Add ``n_tokens`` to ``length``, after all layers have been updated."""
        self.length += n_tokens
