"""Rotary position embedding (Su et al. 2021, arXiv:2104.09864) in Hugging Face's half-rotation layout.

Promises: the angles are computed in float32 from the positions alone, once per forward, and then cast to the dtype of
the activations (as transformers does); no buffer exists, so a model built on the meta device needs nothing restored.

Shapes: B batch, T time, H heads, d width of a head, h = d / 2, 1 a dim that is broadcast.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def rope_table(positions_BT: Tensor, head_width: int, theta: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosines and sines, both [B, T, 1, h], of position * theta^(-2i/d) for i in 0..h-1."""
    steps_h = torch.arange(0, head_width, 2, dtype=torch.float32, device=positions_BT.device)
    frequencies_h = 1.0 / (theta ** (steps_h / head_width))
    angles_BT1h = (positions_BT.to(torch.float32)[..., None] * frequencies_h)[:, :, None, :]
    return angles_BT1h.cos().to(dtype), angles_BT1h.sin().to(dtype)


def rotate(x_BTHd: Tensor, cos_BT1h: Tensor, sin_BT1h: Tensor) -> Tensor:
    """Rotate the pairs (i, i + h) of each head by the angles; [B, T, H, d] -> contiguous [B, T, H, d]."""
    rotated_BTHd: Tensor = _Rotate.apply(x_BTHd, cos_BT1h, sin_BT1h)
    return rotated_BTHd


class _Rotate(torch.autograd.Function):
    """The derivative of a rotation is the rotation back, so nothing but the table is kept for backward."""

    @staticmethod
    def forward(ctx: Any, x_BTHd: Tensor, cos_BT1h: Tensor, sin_BT1h: Tensor) -> Tensor:
        ctx.save_for_backward(cos_BT1h, sin_BT1h)
        return _turn(x_BTHd, cos_BT1h, sin_BT1h, 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BTHd: Tensor) -> tuple[Tensor, None, None]:
        cos_BT1h, sin_BT1h = ctx.saved_tensors
        return _turn(grad_BTHd, cos_BT1h, sin_BT1h, -1), None, None


def _turn(x_BTHd: Tensor, cos_BT1h: Tensor, sin_BT1h: Tensor, direction: int) -> Tensor:
    out_BTHd = torch.empty(x_BTHd.shape, dtype=x_BTHd.dtype, device=x_BTHd.device)
    first_BTHh, second_BTHh = x_BTHd.chunk(2, dim=-1)
    low_BTHh, high_BTHh = out_BTHd.chunk(2, dim=-1)
    torch.mul(first_BTHh, cos_BT1h, out=low_BTHh)
    low_BTHh.addcmul_(second_BTHh, sin_BT1h, value=-direction)
    torch.mul(second_BTHh, cos_BT1h, out=high_BTHh)
    high_BTHh.addcmul_(first_BTHh, sin_BT1h, value=direction)
    return out_BTHd
