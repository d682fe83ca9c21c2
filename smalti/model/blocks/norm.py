"""Normalisation over the last dim, with a weight and no bias.

Guarantees: statistics in float32 whatever the input's dtype; the output has the input's dtype. In float32 it equals
Hugging Face's ``LlamaRMSNorm`` and ``torch.nn.LayerNorm(bias=False)`` to rounding.

Shapes: ... any leading dims, D width.
"""

from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight (Zhang and Sennrich 2019, arXiv:1910.07467)."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x_D: Tensor) -> Tensor:
        """[..., D] -> [..., D]."""
        return F.rms_norm(x_D, self.weight.shape, self.weight, self.eps)


class LayerNorm(nn.Module):
    """(x - mean) / sqrt(var + eps) * weight (Ba et al. 2016, arXiv:1607.06450), without the bias."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x_D: Tensor) -> Tensor:
        """[..., D] -> [..., D]."""
        return F.layer_norm(x_D, self.weight.shape, self.weight, None, self.eps)


def build_norm(kind: Literal["rmsnorm", "layernorm"], width: int, eps: float) -> nn.Module:
    """Build the norm that the config names."""
    return {"rmsnorm": RMSNorm, "layernorm": LayerNorm}[kind](width, eps)
