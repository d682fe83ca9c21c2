"""The dense feed-forward part of a block: SwiGLU, GEGLU (Shazeer 2020, arXiv:2002.05202) or a plain two-matrix MLP.

Guarantees: for one token a row on a CPU (a decode step), the bits of a row's activation do not depend on its place in
the batch.

Shapes: ... any leading dims, D hidden, F intermediate.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from smalti.config.model import ModelConfig

_TILE = 1 << 14
"""Most elements that torch's activations compute on one thread (``GELU_MIN_ELEMENTS_FOR_MULTI_THREADING``)."""


def activation(config: ModelConfig) -> Callable[[Tensor], Tensor]:
    """Return the pointwise function that the config names; ``gelu`` is the exact one, with erf."""
    functions: dict[str, Callable[[Tensor], Tensor]] = {
        "silu": F.silu,
        "gelu": F.gelu,
        "gelu_tanh": partial(F.gelu, approximate="tanh"),
        "relu": F.relu,
    }
    return partial(_by_rows, functions[config.activation])


def _by_rows(function: Callable[[Tensor], Tensor], x_F: Tensor) -> Tensor:
    """Return ``function(x)``; for one token a row on a CPU, computed in tiles of whole vectors, each on one thread.

    torch splits a long tensor over threads, and the rest of a thread's elements after its last two vectors of 64 bytes
    goes through other code, with other bits for SiLU and GELU by tanh.
    """
    if not x_F.is_cpu or x_F.dim() != 3 or x_F.shape[1] != 1:
        return function(x_F)
    width = x_F.shape[-1]
    padded_F = F.pad(x_F, (0, -width % 64)) if width % 64 else x_F
    tiles = [function(tile) for tile in padded_F.flatten().split(_TILE)]
    return torch.cat(tiles).view(padded_F.shape)[..., :width]


class MLP(nn.Module):
    """down(act(gate(x)) * up(x)), or down(act(up(x))) when not gated."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        width, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.gate_proj = nn.Linear(width, inner, bias=bias) if config.gated else None
        self.up_proj = nn.Linear(width, inner, bias=bias)
        self.down_proj = nn.Linear(inner, width, bias=bias)
        self.activation = activation(config)

    def forward(self, x_D: Tensor) -> Tensor:
        """[..., D] -> [..., D]."""
        up_F = self.up_proj(x_D)
        inner_F = self.activation(up_F) if self.gate_proj is None else self.activation(self.gate_proj(x_D)) * up_F
        out_D: Tensor = self.down_proj(inner_F)
        return out_D
