"""Modules with adapters whose matrices are split over the axes ``tensor`` and ``expert``.

A matrix W that is split along its outputs has B split in the same way and A whole on every rank; one that is split
along its inputs has A split and B whole. So no collective is added to those of W; each rank has a part of the gradient
of what is whole, and ``train/gradient_sums.py`` adds these once a step.

Shapes: B rows, T tokens of a row, t those of this rank's slice, D hidden, F inner.
"""

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from smalti.distributed.parallel.dispatch import ExactDispatch, LocalExperts, StaticDispatch
from smalti.distributed.parallel.dtensors import local, shard
from smalti.distributed.parallel.slices import Ranks, reduce_scatter_sequence
from smalti.model.adapters.lora import LoRAExperts, LoRALinear
from smalti.model.blocks.moe.experts import Experts

_COLUMNS = {"weight": 0, "weight_codes": 0, "weight_scales": 0, "bias": 0, "lora_B": 0}
_ROWS = {"weight": 1, "weight_codes": 1, "weight_scales": 1, "lora_A": 1}
"""Parameter -> the dim along which it is split; others are whole on every rank."""


class ColumnParallelLoRA(LoRALinear):
    """Replaces ``linear`` and takes over all that it has: each rank computes some columns of the output."""

    dims = _COLUMNS

    def __init__(self, linear: LoRALinear, axis: DeviceMesh) -> None:
        nn.Module.__init__(self)
        vars(self).update(vars(linear))
        for name, _ in list(self.named_parameters(recurse=False)):
            if name in self.dims:
                shard(self, name, self.dims[name], axis)

    def part(self, name: str) -> Tensor:
        """Return this rank's part of a parameter."""
        return local(super().part(name))


class RowParallelLoRA(ColumnParallelLoRA):
    """Replaces ``linear``: each rank reads some columns of the input, as in ``tensor.RowParallelLinear``."""

    dims = _ROWS

    def __init__(self, linear: LoRALinear, axis: DeviceMesh, ranks: Ranks | None) -> None:
        super().__init__(linear, axis)
        self.ranks = ranks

    def forward(self, x_BTF: Tensor) -> Tensor:
        """[B, T, F / ranks] -> [B, t, D], or [B, T, D], a part of the sum."""
        if self.ranks is None:
            return self.products(x_BTF, self.bias)
        out_BtD = reduce_scatter_sequence(self.products(x_BTF, None), self.ranks)
        return out_BtD if self.bias is None else out_BtD + self.bias


def shard_experts(experts: Experts, axis: DeviceMesh) -> None:
    """Shard the parameters of experts along their width F."""
    for name, _ in list(experts.named_parameters(recurse=False)):
        matrix, _, side = name.partition("_lora_")
        if side and (side == "A") != (matrix == "down_proj"):
            continue  # its dims are E, the rank and D
        shard(experts, name, 2 if side == "A" else 1, axis)


class LocalLoRAExperts(LocalExperts, LoRAExperts):
    """``LocalExperts`` with adapters."""


class ExactLoRADispatch(ExactDispatch, LoRAExperts):
    """``ExactDispatch`` to experts with adapters."""


class StaticLoRADispatch(StaticDispatch, LoRAExperts):
    """``StaticDispatch`` to experts with adapters."""
