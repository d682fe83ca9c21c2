"""Frozen weights in 4 or 8 bits, and their products: dequantised for each pass, never kept.

The numbers of a weight, row after row, are cut into blocks of 64, which may cross rows. A block is stored as its
largest absolute value (float32) and a code for each number: ``nf4``, the NormalFloat of QLoRA (arXiv:2305.14314,
appendix E), two in a byte; or ``int8``. ``nf4_double``: scales too, in groups of 256, as codes of their logarithms.
All is uint8, which FSDP gathers without a cast. Where rows are whole blocks, codes and scales have the leading dims of
the weight, to be split over ranks as it is.

Shapes: n blocks, I inputs, O outputs, E experts, S slots.
"""

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from smalti.config.adapter import BLOCK, GROUP, Quantization
from smalti.model.blocks.moe.experts import grouped

NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
"""The 16 levels that the paper publishes: quantiles of the normal distribution, scaled to [-1, 1], 0 among them."""

_BYTES = {"nf4": BLOCK // 2, "nf4_double": BLOCK // 2, "int8": BLOCK}
"""Bytes of the codes of a block."""

_CHUNK = 1 << 15
"""Blocks that are dequantised at a time: 2 million numbers, a multiple of ``GROUP``."""


def quantize(weight: Tensor, kind: Quantization) -> tuple[Tensor, Tensor]:
    """Return codes [n, 32] (nf4) or [n, 64] (int8), and the bytes of scales, [n, 4] or [groups, 264]; all uint8."""
    flat = weight.detach().float().flatten()
    blocks = F.pad(flat, (0, -flat.numel() % BLOCK)).view(-1, BLOCK)
    scales = blocks.abs().amax(dim=1, keepdim=True)
    units = blocks / scales.clamp(min=torch.finfo(torch.float32).tiny)
    if kind == "int8":
        codes = (units * 127).round().add_(127).to(torch.uint8)
    else:
        levels = torch.tensor(NF4, device=weight.device)
        nearest = torch.bucketize(units, (levels[1:] + levels[:-1]) / 2).to(torch.uint8)
        codes = nearest[:, 0::2] * 16 + nearest[:, 1::2]
    return codes, _grouped_scales(scales) if kind == "nf4_double" else scales.view(torch.uint8)


def _grouped_scales(scales_n1: Tensor) -> Tensor:
    """Return scales in 8 bits, [groups, 264]: 256 codes; the smallest logarithm of a scale but 0, and a step, float32.

    Code 0 is a scale of 0, code c a logarithm of c - 1 steps above the smallest: the relative error is at most half a
    step, however large one scale is beside the others. The last scale fills its group.
    """
    tiny = torch.finfo(torch.float32).tiny
    values = F.pad(scales_n1.T, (0, -len(scales_n1) % GROUP), mode="replicate").view(-1, GROUP)
    logs = torch.where(values > 0, values, values.amax(dim=1, keepdim=True)).clamp(min=tiny).log()
    least, most = logs.aminmax(dim=1, keepdim=True)
    step = (most - least) / 254
    codes = ((logs - least) / step.clamp(min=tiny)).round().add_(1).masked_fill_(values == 0, 0).to(torch.uint8)
    return torch.cat([codes, torch.cat([least, step], dim=1).view(torch.uint8)], dim=1)


def _scales(stored: Tensor, start: int, stop: int) -> Tensor:
    """Return the scales of the blocks from ``start``, a multiple of 256, to ``stop``: [stop - start, 1], float32."""
    if stored.shape[1] == 4:
        return stored[start:stop].contiguous().view(torch.float32)
    groups = stored[start // GROUP : -(-stop // GROUP)]
    codes = groups[:, :GROUP].float()
    least, step = groups[:, GROUP:].contiguous().view(torch.float32).split(1, dim=1)
    scales = ((codes - 1) * step + least).exp() * (codes > 0)  # a product, so that the group of a NaN is NaN
    return scales.view(-1, 1)[: stop - start]


def dequantize(codes: Tensor, scales: Tensor, shape: Sequence[int], kind: Quantization, dtype: torch.dtype) -> Tensor:
    """Return the weight of this shape; scaled in float32, then cast to ``dtype``. Codes and scales of any shape."""
    codes = codes.reshape(-1, _BYTES[kind])
    scales = scales if kind == "nf4_double" else scales.reshape(-1, 4)
    table = _table(kind, codes.device)
    out = torch.empty((len(codes), BLOCK), dtype=dtype, device=codes.device)
    for start in range(0, len(codes), _CHUNK):
        stop = min(start + _CHUNK, len(codes))
        values = F.embedding(codes[start:stop].int(), table).flatten(1)
        out[start:stop] = values.mul_(_scales(scales, start, stop))
    return out.flatten()[: math.prod(shape)].view(tuple(shape))


def _table(kind: Quantization, device: torch.device) -> Tensor:
    """Return what a byte stands for: [256, 2] or [256, 1]."""
    if kind == "int8":
        return ((torch.arange(256, device=device) - 127) / 127)[:, None]
    levels = torch.tensor(NF4, device=device)
    return torch.stack([levels.repeat_interleave(16), levels.repeat(16)], dim=1)


def stored_shape(shape: Sequence[int], block_bytes: int) -> tuple[int, ...]:
    """Return the shape in which codes or scales, of so many bytes a block, of a weight of this shape are stored."""
    *rows, columns = shape
    if columns % BLOCK:
        return -(-math.prod(shape) // BLOCK), block_bytes
    return *rows, columns // BLOCK * block_bytes


class Dequantized(Mapping[str, Tensor]):
    """Weights of which those with ``names`` are quantised and dequantised on access."""

    def __init__(self, weights: Mapping[str, Tensor], names: Collection[str], kind: Quantization) -> None:
        self._weights, self._names, self._kind = weights, frozenset(names), kind

    def __getitem__(self, name: str) -> Tensor:
        weight = self._weights[name]
        if name not in self._names:
            return weight
        return dequantize(*quantize(weight, self._kind), weight.shape, self._kind, weight.dtype)

    def __iter__(self) -> Iterator[str]:
        return iter(self._weights)

    def __len__(self) -> int:
        return len(self._weights)


class Store:
    """Where a module keeps a quantised weight: the parameters ``<name>_codes`` and ``<name>_scales``, of nf4_double
    ``<name>_grouped_scales``."""

    def __init__(self, module: nn.Module, name: str, kind: Quantization) -> None:
        """Replace the parameter ``name`` of ``module``, on the meta device, by those of its codes and scales."""
        weight = getattr(module, name)
        self.kind, self.shape = kind, tuple(weight.shape)
        delattr(module, name)
        shapes = {"codes": stored_shape(self.shape, _BYTES[kind]), "scales": stored_shape(self.shape, 4)}
        if kind == "nf4_double":
            shapes["grouped_scales"] = (-(-math.prod(shapes.pop("scales")) // (4 * GROUP)), GROUP + 8)
        self.parts = [f"{name}_{part}" for part in shapes]
        for part, shape in zip(self.parts, shapes.values(), strict=True):
            empty = torch.empty(shape, dtype=torch.uint8, device=weight.device)
            module.register_parameter(part, nn.Parameter(empty, requires_grad=False))

    def tensors(self, part: Callable[[str], Tensor]) -> tuple[Tensor, Tensor]:
        """Return codes and scales; ``part`` returns a parameter of the module, or this rank's part of it."""
        return part(self.parts[0]), part(self.parts[1])

    def read(self, part: Callable[[str], Tensor], dtype: torch.dtype) -> Tensor:
        """Return the dequantised weight."""
        codes, scales = self.tensors(part)
        return dequantize(codes, scales, self._shape_of(codes), self.kind, dtype)

    def linear(self, part: Callable[[str], Tensor], x_NI: Tensor) -> Tensor:
        """Return x W^T, [N, O], of a weight [O, I]."""
        codes, scales = self.tensors(part)
        out_NO: Tensor = _Linear.apply(x_NI, codes, scales, self._shape_of(codes), self.kind)
        return out_NO

    def grouped(self, part: Callable[[str], Tensor], x_SI: Tensor, end_E: Tensor, *, transposed: bool) -> Tensor:
        """Return the product of each expert's rows with its weight [E, O, I], or [E, I, O] if ``transposed``."""
        codes, scales = self.tensors(part)
        shape = self._shape_of(codes)
        out_SO: Tensor = _GroupedProduct.apply(x_SI, codes, scales, end_E, shape, self.kind, transposed)
        return out_SO

    def _shape_of(self, codes: Tensor) -> tuple[int, ...]:
        """Return the shape of the weight, or of the part of it that these codes belong to."""
        if self.shape[-1] % BLOCK:
            return self.shape
        return *codes.shape[:-1], codes.shape[-1] // _BYTES[self.kind] * BLOCK


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_NI: Tensor, codes: Tensor, scales: Tensor, shape: tuple[int, ...], kind: Any) -> Tensor:
        ctx.save_for_backward(codes, scales)
        ctx.shape, ctx.kind = shape, kind
        return x_NI @ dequantize(codes, scales, shape, kind, x_NI.dtype).T

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_NO: Tensor) -> tuple[Tensor | None, ...]:
        codes, scales = ctx.saved_tensors
        weight_OI = dequantize(codes, scales, ctx.shape, ctx.kind, grad_NO.dtype)
        return grad_NO @ weight_OI, None, None, None, None


class _GroupedProduct(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_SI: Tensor,
        codes: Tensor,
        scales: Tensor,
        end_E: Tensor,
        shape: tuple[int, ...],
        kind: Any,
        transposed: bool,
    ) -> Tensor:
        ctx.save_for_backward(codes, scales, end_E)
        ctx.shape, ctx.kind, ctx.transposed = shape, kind, transposed
        weight = dequantize(codes, scales, shape, kind, x_SI.dtype)
        return grouped(x_SI, weight if transposed else weight.mT, end_E)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_SO: Tensor) -> tuple[Tensor | None, ...]:
        codes, scales, end_E = ctx.saved_tensors
        weight = dequantize(codes, scales, ctx.shape, ctx.kind, grad_SO.dtype)
        return grouped(grad_SO, weight.mT if ctx.transposed else weight, end_E), *(None,) * 6
