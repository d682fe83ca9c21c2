"""Rotary position embedding (Su et al. 2021, arXiv:2104.09864) in Hugging Face's half-rotation layout.

Promises: the angles are computed in float32 from the positions alone, once per forward, and then cast to the dtype of
the activations (as transformers does); no buffer exists, so a model built on the meta device needs nothing restored.

Shapes: B batch, T time, H heads, d width of a head, 1 a dim that is broadcast.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def rope_table(positions_BT: Tensor, head_width: int, theta: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosines and signed sines, both [B, T, 1, d], of position * theta^(-2i/d) for i in 0..d/2-1, twice over.

    The sines of the first half are negative, so that a rotation is x * cosine + (x with its halves swapped) * sine.
    """
    steps = torch.arange(0, head_width, 2, dtype=torch.float32, device=positions_BT.device)
    frequencies = 1.0 / (theta ** (steps / head_width))
    angles = (positions_BT.to(torch.float32)[..., None] * frequencies)[:, :, None, :]
    cosine, sine = angles.cos(), angles.sin()
    return torch.cat((cosine, cosine), dim=-1).to(dtype), torch.cat((-sine, sine), dim=-1).to(dtype)


def rotate(x_BTHd: Tensor, cosine_BT1d: Tensor, sine_BT1d: Tensor) -> Tensor:
    """Rotate the pairs (i, i + d/2) of each head by the angles; [B, T, H, d] -> contiguous [B, T, H, d]."""
    rotated_BTHd: Tensor = _Rotate.apply(x_BTHd, cosine_BT1d, sine_BT1d)
    return rotated_BTHd


class _Rotate(torch.autograd.Function):
    """The derivative of a rotation is the rotation back, so nothing but the table is kept for backward."""

    @staticmethod
    def forward(ctx: Any, x_BTHd: Tensor, cosine_BT1d: Tensor, sine_BT1d: Tensor) -> Tensor:
        ctx.save_for_backward(cosine_BT1d, sine_BT1d)
        return _turn(x_BTHd, cosine_BT1d, sine_BT1d, 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BTHd: Tensor) -> tuple[Tensor, None, None]:
        cosine_BT1d, sine_BT1d = ctx.saved_tensors
        return _turn(grad_BTHd, cosine_BT1d, sine_BT1d, -1), None, None


def _turn(x_BTHd: Tensor, cosine_BT1d: Tensor, sine_BT1d: Tensor, direction: int) -> Tensor:
    first, second = x_BTHd.chunk(2, dim=-1)
    return (x_BTHd * cosine_BT1d).addcmul_(torch.cat((second, first), dim=-1), sine_BT1d, value=direction)
