"""Tensor parallelism: each matrix is split over the ranks of the axis ``tensor``.

Shoeybi et al. 2019, arXiv 1909.08053; between the matrices each rank has a slice of every row (Korthikanti et al. 2022,
arXiv 2205.05198). Parameters keep their names. Not for decoding with a cache. What is sharded, and how:
docs/concepts/distributed/tensor-parallel.md.

Shapes: B rows, T tokens of a row, t those of this rank's slice, D hidden, F inner, V vocabulary.
"""

from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from smalti.base.errors import UserError
from smalti.cost.layout.rules import divisors, require, why_not_tensor
from smalti.distributed.group.mesh import Mesh
from smalti.distributed.parallel.adapters import ColumnParallelLoRA, LocalLoRAExperts, RowParallelLoRA, shard_experts
from smalti.distributed.parallel.dispatch import LocalExperts
from smalti.distributed.parallel.dtensors import local, shard
from smalti.distributed.parallel.slices import (
    Ranks,
    all_gather_replicated,
    all_gather_sequence,
    all_reduce,
    reduce_scatter_sequence,
    scale_gradient,
)
from smalti.model.adapters.lora import LoRAExperts, LoRALinear
from smalti.model.blocks.attention.choice import kernels_of
from smalti.model.blocks.attention.module import Attention
from smalti.model.blocks.attention.scores import HeadPart
from smalti.model.blocks.mlp import MLP
from smalti.model.blocks.moe import MoE, RouterStats
from smalti.model.blocks.norm import RMSNorm
from smalti.model.decoder import Decoder

AXIS = "tensor"


def apply(model: nn.Module, mesh: Mesh) -> None:
    """Make weights DTensors of the axis and add the collectives around them. Before ``fsdp.shard``.

    UserError with the nearest size where heads, widths or vocabulary are not a multiple of the ranks.
    """
    layout = mesh.layout
    if layout.tensor == 1:
        return
    assert isinstance(model, Decoder), "only the modules of a Decoder are known"
    config = model.config
    require(layout, "tensor", lambda size: why_not_tensor(config, size), divisors(layout.world_size))
    axis = mesh.axis("tensor")
    ranks = Ranks.of(axis)
    for module in list(model.modules()):
        if isinstance(module, Attention):
            _apply_to_attention(module, axis, ranks)
        elif isinstance(module, MoE):
            _apply_to_experts(module, axis, ranks)
        elif isinstance(module, MLP):
            _apply_to_mlp(module, axis, ranks)
    _apply_to_embedding_and_head(model, axis, ranks)
    model.hooks = replace(
        model.hooks,
        kernels_of=partial(kernels_of, part=HeadPart(ranks.local_rank, ranks.size)),
        positions_of=partial(_positions_of, model.hooks.positions_of, ranks),
        project=_project if model.score is None else partial(_project_scores, ranks),
    )


def is_tensor_sharded(parameter: Tensor) -> bool:
    """Return whether ranks of the axis hold different parts of it, whether or not FSDP shards it too."""
    return isinstance(parameter, DTensor) and AXIS in (parameter.device_mesh.mesh_dim_names or ())


class HeadShard(NamedTuple):
    """This rank's part of the weight of an output head."""

    weight: Tensor
    """[v, D]."""
    first: int
    """Index of its first row in the whole matrix."""
    ranks: Ranks | None
    """The ranks that share the matrix; None where it is not sharded."""


def head_shard(weight_VD: Tensor) -> HeadShard:
    """Return this rank's part of the weight that a head gets."""
    if not isinstance(weight_VD, DTensor):
        return HeadShard(weight_VD, 0, None)
    ranks, part = Ranks.of(weight_VD.device_mesh), weight_VD.to_local()
    return HeadShard(part, ranks.local_rank * part.shape[0], ranks)


# ---- inside a block -------------------------------------------------------------------------------------------------


def _apply_to_attention(attention: Attention, axis: DeviceMesh, ranks: Ranks) -> None:
    """Shard query, key and value along their output, the output projection along its input."""
    attention.q_proj = _columns(attention.q_proj, axis)
    attention.k_proj = _columns(attention.k_proj, axis)
    attention.v_proj = _columns(attention.v_proj, axis)
    attention.o_proj = _rows(attention.o_proj, axis, ranks)
    if attention.qk_norm == "full" and attention.q_norm is not None and attention.k_norm is not None:
        attention.q_norm = ParallelRMSNorm(attention.q_norm, axis, ranks)
        attention.k_norm = ParallelRMSNorm(attention.k_norm, axis, ranks)
    _gather_input(attention, ranks)


def _apply_to_mlp(mlp: MLP, axis: DeviceMesh, ranks: Ranks) -> None:
    """Shard gate and up along their output, down along its input."""
    if any(map(is_tensor_sharded, mlp.parameters())):  # shared experts, which their layer has sharded
        return
    _shard_columns(mlp, axis)
    mlp.down_proj = _rows(mlp.down_proj, axis, ranks)
    _gather_input(mlp, ranks)


def _apply_to_experts(moe: MoE, axis: DeviceMesh, ranks: Ranks) -> None:
    """Shard the experts along F, and reduce-scatter their summed output.

    Router losses are equal on all ranks, so each contributes 1/W of the gradient.
    """
    shard_experts(moe.experts, axis)
    moe.experts = (LocalLoRAExperts if isinstance(moe.experts, LoRAExperts) else LocalExperts)(moe.experts)
    if moe.shared_experts is not None:
        _shard_columns(moe.shared_experts, axis)
        moe.shared_experts.down_proj = _rows(moe.shared_experts.down_proj, axis, None)
    _gather_input(moe, ranks)

    def scatter_output(_: nn.Module, args: Any, output: tuple[Tensor, RouterStats]) -> tuple[Tensor, RouterStats]:
        part_BTD, stats = output
        return reduce_scatter_sequence(part_BTD, ranks), RouterStats(*(scale_gradient(value, ranks) for value in stats))

    moe.register_forward_hook(scatter_output)


def _gather_input(module: nn.Module, ranks: Ranks) -> None:
    """All-gather the first argument of the module, [B, t, D] -> [B, T, D]."""
    module.register_forward_pre_hook(lambda _, args: (all_gather_sequence(args[0], ranks), *args[1:]))


def _shard_columns(mlp: MLP, axis: DeviceMesh) -> None:
    if mlp.gate_proj is not None:
        mlp.gate_proj = _columns(mlp.gate_proj, axis)
    mlp.up_proj = _columns(mlp.up_proj, axis)


def _columns(linear: nn.Linear, axis: DeviceMesh) -> nn.Linear:
    return ColumnParallelLoRA(linear, axis) if isinstance(linear, LoRALinear) else ColumnParallelLinear(linear, axis)


def _rows(linear: nn.Linear, axis: DeviceMesh, ranks: Ranks | None) -> nn.Linear:
    replacement = RowParallelLoRA if isinstance(linear, LoRALinear) else RowParallelLinear
    return replacement(linear, axis, ranks)  # type: ignore[arg-type]


class ColumnParallelLinear(nn.Linear):
    """Replaces ``linear``: each rank computes some columns of the output."""

    def __init__(self, linear: nn.Linear, axis: DeviceMesh) -> None:
        super().__init__(linear.in_features, linear.out_features, device="meta")
        self.weight, self.bias = linear.weight, linear.bias
        shard(self, "weight", 0, axis)
        if self.bias is not None:
            shard(self, "bias", 0, axis)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """[B, T, D] -> [B, T, F / ranks]."""
        return F.linear(x_BTD, local(self.weight), None if self.bias is None else local(self.bias))


class RowParallelLinear(nn.Linear):
    """Replaces ``linear``: each rank reads some columns of the input, and the outputs are summed.

    ranks: each gets a slice of the sum, to which the bias is added. None: the caller sums.
    """

    def __init__(self, linear: nn.Linear, axis: DeviceMesh, ranks: Ranks | None) -> None:
        super().__init__(linear.in_features, linear.out_features, device="meta")
        self.weight, self.bias, self.ranks = linear.weight, linear.bias, ranks
        shard(self, "weight", 1, axis)

    def forward(self, x_BTF: Tensor) -> Tensor:
        """[B, T, F / ranks] -> [B, t, D], or [B, T, D], a part of the sum."""
        if self.ranks is None:
            return F.linear(x_BTF, local(self.weight), self.bias)
        out_BtD = reduce_scatter_sequence(F.linear(x_BTF, local(self.weight)), self.ranks)
        return out_BtD if self.bias is None else out_BtD + self.bias


class ParallelRMSNorm(RMSNorm):
    """Replaces ``norm``: over the heads of all ranks, in float32 as inside ``F.rms_norm``."""

    def __init__(self, norm: RMSNorm, axis: DeviceMesh, ranks: Ranks) -> None:
        super().__init__(norm.weight.shape[0], norm.eps)
        self.weight, self.ranks = norm.weight, ranks
        shard(self, "weight", 0, axis)

    def forward(self, x_BTF: Tensor) -> Tensor:
        """[B, T, F / ranks] -> the same shape."""
        wide = x_BTF.float()
        square_BT1 = all_reduce(wide.square().sum(dim=-1, keepdim=True), self.ranks)
        normal = wide * torch.rsqrt(square_BT1 / (x_BTF.shape[-1] * self.ranks.size) + self.eps)
        return (normal * local(self.weight)).to(x_BTF.dtype)


def _positions_of(inner: Any, ranks: Ranks, slice_tokens: int, device: torch.device) -> Tensor:
    positions_BT: Tensor = inner(slice_tokens * ranks.size, device)
    return positions_BT


# ---- embedding and head ---------------------------------------------------------------------------------------------


def _apply_to_embedding_and_head(model: Decoder, axis: DeviceMesh, ranks: Ranks) -> None:
    """Shard embedding and head over the vocabulary, and gather the output of the last norm.

    A pipeline stage may have one of them, or none. Every rank has the scores of a reward model whole.
    """
    if model.embed is not None:
        model.embed = VocabularyParallelEmbedding(model.embed, axis, ranks)
    if model.lm_head is not None:
        shard(model.lm_head, "weight", 0, axis)
    if model.norm is not None:
        model.norm.register_forward_hook(lambda _, args, x_BtD: all_gather_sequence(x_BtD, ranks))


class VocabularyParallelEmbedding(nn.Embedding):
    """Replaces ``embed``: each token is looked up on the rank that has its row, the others add 0."""

    def __init__(self, embed: nn.Embedding, axis: DeviceMesh, ranks: Ranks) -> None:
        super().__init__(embed.num_embeddings, embed.embedding_dim, device="meta")
        self.weight, self.ranks = embed.weight, ranks
        shard(self, "weight", 0, axis)

    def forward(self, ids_BT: Tensor) -> Tensor:
        """[B, T] -> [B, t, D]. UserError where T is not a multiple of the ranks."""
        ranks = self.ranks
        if ids_BT.shape[1] % ranks.size:
            nearest = max(ranks.size, round(ids_BT.shape[1] / ranks.size) * ranks.size)
            raise UserError(
                f"rows of {ids_BT.shape[1]} tokens cannot be cut into slices for {ranks.size} tensor ranks",
                allowed=f"a multiple of {ranks.size}",
                hint=f"data.seq_len={nearest}, or train.parallel.tensor=1",
            )
        part_vD = local(self.weight)
        index_BT = ids_BT - ranks.local_rank * part_vD.shape[0]
        outside_BT = (index_BT < 0) | (index_BT >= part_vD.shape[0])
        rows_BTD = F.embedding(index_BT.masked_fill(outside_BT, 0), part_vD)
        return reduce_scatter_sequence(rows_BTD.masked_fill(outside_BT[..., None], 0), ranks)


def _project(hidden: Tensor, weight_VD: Tensor) -> Tensor:
    """Return the logits of the whole vocabulary, from which the heads of all ranks compute the same."""
    part = head_shard(weight_VD)
    assert part.ranks is not None
    return all_gather_replicated(F.linear(hidden, part.weight), part.ranks)


def _project_scores(ranks: Ranks, hidden: Tensor, weight_1D: Tensor) -> Tensor:
    """Return the scores, which all ranks compute alike; the gradients are summed over them later."""
    return F.linear(scale_gradient(hidden, ranks), scale_gradient(weight_1D, ranks))
