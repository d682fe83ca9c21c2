"""The dense feed-forward part of a block: SwiGLU, GEGLU (Shazeer 2020, arXiv:2002.05202) or a plain two-matrix MLP.

Shapes: ... any leading dims, D hidden, F intermediate.
"""

from collections.abc import Callable
from functools import partial

from torch import Tensor, nn
from torch.nn import functional as F

from smalti.config.model import ModelConfig


def activation(config: ModelConfig) -> Callable[[Tensor], Tensor]:
    """The pointwise function that the config names; ``gelu`` is the exact one, with erf."""
    functions: dict[str, Callable[[Tensor], Tensor]] = {
        "silu": F.silu,
        "gelu": F.gelu,
        "gelu_tanh": partial(F.gelu, approximate="tanh"),
        "relu": F.relu,
    }
    return functions[config.activation]


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
