"""Modules with low-rank adapters: y = W x + scale B (A x), where W is frozen (LoRA, arXiv:2106.09685).

They replace ``nn.Linear`` and ``Experts``; names of the base's parameters stay the same. An adapter of the matrix
``q_proj`` is ``q_proj.lora_A`` and ``q_proj.lora_B``; of the experts' ``up_proj``, ``up_proj_lora_A`` [E, r, in] and
``up_proj_lora_B`` [E, out, r], a pair for each expert.

Shapes: I inputs, O outputs, r rank, N tokens, E experts, k experts per token, S slots, D hidden, F inner.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from smalti.base.rng import derive_key
from smalti.config.adapter import Quantization
from smalti.cost.memory.experts import row_multiple
from smalti.model.adapters.quantized import Store
from smalti.model.blocks.moe.experts import (
    Experts,
    Weights,
    bag,
    bag_backward,
    clear,
    grouped,
    slots,
    unused_slots,
)

PARTS = ("gate_proj", "up_proj", "down_proj")


def draw(name: str, shape: Sequence[int], seed: int) -> Tensor:
    """Return the initial value of an adapter's parameter: 0 for B; for A uniform with the bound 1 / sqrt(inputs).

    That is Kaiming's with a = sqrt(5), as peft and ``nn.Linear`` have it. A function of seed, name and expert alone.
    """
    if name.endswith("lora_B"):
        return torch.zeros(tuple(shape))
    if len(shape) == 3:
        return torch.stack([_uniform(shape[1:], derive_key(seed, name, expert)) for expert in range(shape[0])])
    return _uniform(shape, derive_key(seed, name))


def _uniform(shape: Sequence[int], key: int) -> Tensor:
    generator = torch.Generator(device="cpu").manual_seed(key)
    return torch.empty(tuple(shape)).uniform_(-1 / math.sqrt(shape[-1]), 1 / math.sqrt(shape[-1]), generator=generator)


class LoRALinear(nn.Linear):
    """Replaces ``linear``, whose weight and bias it takes; ``rank`` 0: without an adapter (of a quantised weight)."""

    is_adapted = True
    """False: the adapter is left out (``apply.without_adapters``)."""

    def __init__(self, linear: nn.Linear, rank: int, scale: float, quantization: Quantization | None = None) -> None:
        super().__init__(linear.in_features, linear.out_features, bias=False, device="meta")
        self.weight, self.bias, self.scale = linear.weight, linear.bias, scale
        self.rank, self.store = rank, None if quantization is None else Store(self, "weight", quantization)
        if not rank:
            return
        self.lora_A = nn.Parameter(torch.empty(rank, linear.in_features, device=linear.weight.device))
        self.lora_B = nn.Parameter(torch.empty(linear.out_features, rank, device=linear.weight.device))

    def forward(self, x_I: Tensor) -> Tensor:
        """[..., I] -> [..., O]."""
        return self.products(x_I, None if self.bias is None else self.part("bias"))

    def part(self, name: str) -> Tensor:
        """Return a parameter; of one that is split over ranks, a subclass returns this rank's part."""
        parameter: Tensor = getattr(self, name)
        return parameter

    def products(self, x_I: Tensor, bias_O: Tensor | None) -> Tensor:
        """Return W x + scale B (A x) + bias for the parts of the matrices that this module has."""
        x_NI = x_I.flatten(0, -2)
        if self.store is None:
            out_NO = F.linear(x_NI, self.part("weight"), bias_O)
        else:
            out_NO = self.store.linear(self.part, x_NI)
            out_NO = out_NO if bias_O is None else out_NO + bias_O
        if self.rank and self.is_adapted:
            out_NO.addmm_(F.linear(x_NI, self.part("lora_A")), self.part("lora_B").T, alpha=self.scale)
        return out_NO.view(*x_I.shape[:-1], -1)


class LoRAExperts(Experts):
    """Replaces ``experts``, whose weights it takes; ``targets``: which of gate, up and down get an adapter.

    Of quantised weights there is none in its parameters (``weights`` returns them dequantised).

    With the kernel ``grouped`` the low-rank products are grouped ones too, and no gradient of a frozen weight is
    computed; ``loop``, the reference, adds the adapters to the weights.
    """

    is_adapted = True
    """False: the adapters are left out (``apply.without_adapters``)."""

    def __init__(
        self, experts: Experts, targets: list[str], rank: int, scale: float, quantization: Quantization | None = None
    ) -> None:
        nn.Module.__init__(self)
        self.gate_proj, self.up_proj, self.down_proj = experts.gate_proj, experts.up_proj, experts.down_proj
        self.kernel, self.activation = experts.kernel, experts.activation
        self.num_local_experts, self.scale = experts.num_local_experts, scale
        for part in targets:
            number, inner, hidden = getattr(self, part).shape
            inputs, outputs = (inner, hidden) if part == "down_proj" else (hidden, inner)
            device = self.up_proj.device
            setattr(self, f"{part}_lora_A", nn.Parameter(torch.empty(number, rank, inputs, device=device)))
            setattr(self, f"{part}_lora_B", nn.Parameter(torch.empty(number, outputs, rank, device=device)))
        parts = [part for part in PARTS if getattr(self, part) is not None]
        self.stores = {part: Store(self, part, quantization) for part in parts} if quantization else {}

    def low_rank(self, part: str) -> tuple[Tensor, Tensor] | None:
        """Return A [E, r, I] and B [E, O, r] of a part, None if it has no adapter."""
        names = f"{part}_lora_A", f"{part}_lora_B"
        if not self.is_adapted or not hasattr(self, names[0]):
            return None
        return self.part(names[0]), self.part(names[1])

    def weights(self) -> Weights:
        """Return the weights with their adapters added."""
        return Weights(*(self._merged(part) for part in PARTS))  # type: ignore[arg-type]

    def compute(
        self, x_ND: Tensor, expert_Nk: Tensor, weight_Nk: Tensor | None, *, has_unassigned_rows: bool = False
    ) -> Tensor:
        """Compute the same as ``Experts.compute``."""
        if self.kernel == "loop":
            return super().compute(x_ND, expert_Nk, weight_Nk, has_unassigned_rows=has_unassigned_rows)
        number, width, multiple = self.num_local_experts, x_ND.shape[1], 1
        if weight_Nk is not None:
            multiple = row_multiple(expert_Nk.numel(), number, x_ND.device.type, x_ND.itemsize)
        order_S, slot_Nk, end_E = slots(expert_Nk, number, multiple)
        unwritten_S1 = unused_slots(end_E, order_S) if has_unassigned_rows else None
        x_SD = _Sort.apply(x_ND, order_S, slot_Nk, unwritten_S1)
        inner_SF = self._product("up_proj", x_SD, end_E)
        if not self._has("gate_proj"):
            inner_SF = self.activation(inner_SF)
        else:
            inner_SF = self.activation(self._product("gate_proj", x_SD, end_E)) * inner_SF
        y_SD = self._product("down_proj", inner_SF, end_E)
        out_ND: Tensor = _Combine.apply(clear(y_SD[:, :width], unwritten_S1), order_S, slot_Nk, weight_Nk)
        return out_ND

    def _has(self, part: str) -> bool:
        return part in self.stores or getattr(self, part, None) is not None

    def _product(self, part: str, x_SI: Tensor, end_E: Tensor) -> Tensor:
        """Return the product of each slot with its expert's matrix and adapter, [S, O]."""
        if self.stores:
            out_SO = self.stores[part].grouped(self.part, x_SI, end_E, transposed=part == "down_proj")
        else:
            weight_EFD = self.part(part)
            out_SO = grouped(x_SI, weight_EFD if part == "down_proj" else weight_EFD.mT, end_E)
        pair = self.low_rank(part)
        if pair is None:
            return out_SO
        low_Sr = grouped(x_SI, pair[0].mT, end_E)
        return torch.add(out_SO, grouped(low_Sr, pair[1].mT, end_E), alpha=self.scale)

    def _merged(self, part: str) -> Tensor | None:
        if not self._has(part):
            return None
        pair = self.low_rank(part)
        weight_EFD: Tensor = self.stores[part].read(self.part, _dtype_of(self)) if self.stores else self.part(part)
        if pair is None:
            return weight_EFD
        change_EOI = pair[1] @ pair[0] * self.scale
        return weight_EFD + (change_EOI.mT if part == "down_proj" else change_EOI)


def _dtype_of(experts: nn.Module) -> torch.dtype:
    """Return the dtype of the adapters, float32 without any."""
    return next((p.dtype for p in experts.parameters() if p.is_floating_point()), torch.float32)


class _Sort(torch.autograd.Function):
    """The rows of tokens in the order of slots; gradients are added in a fixed order."""

    @staticmethod
    def forward(ctx: Any, x_ND: Tensor, order_S: Tensor, slot_Nk: Tensor, unwritten_S1: Tensor | None = None) -> Tensor:
        ctx.save_for_backward(slot_Nk, unwritten_S1)
        return x_ND.index_select(0, order_S // slot_Nk.shape[1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_SD: Tensor) -> tuple[Tensor | None, ...]:
        slot_Nk, unwritten_S1 = ctx.saved_tensors
        grad_SD = grad_SD if unwritten_S1 is None else grad_SD.masked_fill(unwritten_S1, 0)
        return bag(grad_SD, slot_Nk), None, None, None


class _Combine(torch.autograd.Function):
    """The weighted sum over each token's slots."""

    @staticmethod
    def forward(ctx: Any, y_SD: Tensor, order_S: Tensor, slot_Nk: Tensor, weight_Nk: Tensor | None) -> Tensor:
        ctx.save_for_backward(y_SD, order_S, slot_Nk, weight_Nk)
        return bag(y_SD, slot_Nk, weight_Nk)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_ND: Tensor) -> tuple[Tensor | None, ...]:
        y_SD, order_S, slot_Nk, weight_Nk = ctx.saved_tensors
        if weight_Nk is None:
            return grad_ND.index_select(0, order_S // slot_Nk.shape[1]), None, None, None
        grad_SD, grad_weight_Nk = bag_backward(grad_ND, y_SD, order_S, slot_Nk, weight_Nk)
        return grad_SD, None, None, grad_weight_Nk
