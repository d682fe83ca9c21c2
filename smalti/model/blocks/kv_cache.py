"""The keys and values of the tokens that a decoder has seen.

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
    """What some rows of a batch attend to."""

    rows: slice
    keys: Tensor
    """[B, K, S, d] of those rows, the new tokens included; so are the values."""
    values: Tensor
    attend: Attend
    """The kernel for them."""


class Place(NamedTuple):
    """Where new tokens stand."""

    positions_BT: Tensor
    """[B or 1, T]."""
    lengths_B1: Tensor
    """[B or 1, 1]: what each row has room for, which rotary scalings that depend on a length go by."""


class Cache(Protocol):
    """What ``Decoder.forward`` calls of a cache: ``begin`` once, ``update`` once in each layer, ``advance`` once."""

    def begin(self, like_BTD: Tensor) -> Place:
        """Get ready for T new tokens in each row; where they stand. UserError when they do not fit."""
        ...

    def update(self, layer: int, keys_BKTd: Tensor, values_BKTd: Tensor) -> list[Read]:
        """Store the new tokens of a layer; what all rows attend to, in the order of the rows."""
        ...

    def advance(self, n_tokens: int) -> None:
        """Count the new tokens as seen, after all layers have been written."""
        ...


def cached_kernels(
    config: ModelConfig, positions_BT: Tensor, n_keys: int, dtype: torch.dtype
) -> dict[int | None, Attend]:
    """What attends in each layer, by ``config.window(layer)``, to the first keys of a cache of ``dtype``.

    A query sees the keys up to its own position, as far as its window reaches.
    """
    scores = scores_of(config, positions_BT.device)
    distance_BTS = positions_BT[..., None] - torch.arange(n_keys, device=positions_BT.device)
    built: dict[int | None, Attend] = {}
    for window in windows_of(config):
        bias = bias_of_distance(distance_BTS, window, scores, dtype=dtype)
        plain = positions_BT.shape[1] > 1 and scores.plain and window is None
        built[window] = Fused(scores.scale, bias[:, None]) if plain else Dense(scores, bias)
    return built


class KVCache:
    """Keys and values of the tokens seen so far, preallocated: per layer two tensors [B, K, max_length_tokens, d].

    All rows have the same ``length``. ``rope_length_tokens``: how long the rows will become, where that is not
    ``max_length_tokens``; only rotary scalings that depend on a length ask.
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
        """Where T new tokens stand, the same in all rows. UserError when they do not fit."""
        time, device = like_BTD.shape[1], like_BTD.device
        if self.length + time > self.max_length_tokens:
            raise UserError(
                f"the cache holds {self.max_length_tokens} tokens, {self.length} are taken: {time} more do not fit",
                hint="make the KVCache with a larger max_length_tokens, or shorten the prompt",
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
            # The new tokens are all there is: in their own dtype, which may have the faster kernel.
            return [Read(slice(None), keys_BKTd, values_BKTd, attend)]
        return [Read(slice(None), all_keys_BKSd[:, :, :end], all_values_BKSd[:, :, :end], attend)]

    def advance(self, n_tokens: int) -> None:
        """Count ``n_tokens`` as seen, after all layers have been written."""
        self.length += n_tokens
