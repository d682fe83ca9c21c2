"""Tensor parallelism: each matrix shared by the ranks of the axis ``tensor``, laid on a plain model.

Query, key, value, gate and up are cut along what they write, output and down along what they read (Shoeybi et al. 2019,
arXiv 1909.08053). Between them each rank has a slice of every row, so norms and residuals are not computed twice
(Korthikanti et al. 2022, arXiv 2205.05198): attention and MLP gather what they read and sum and scatter what they
write. Experts are cut along F; their router sees whole rows on every rank. Embedding and head are split over the
vocabulary, and what a head is given is the whole row and a DTensor, of which ``vocabulary`` tells this rank's part.

Promises: the parameters keep their names; those that are cut are DTensors of the axis. Of the others (norms, router,
biases of what is summed) every rank has all and, after a backward pass, a part of the gradient: ``summing`` adds them
up, once a step. Not for decoding with a cache.

Shapes: B rows, T tokens of a row, t those of this rank's slice, D hidden, F inner, V vocabulary.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn import functional as F

from smalti.base.errors import UserError
from smalti.config.model import ModelConfig
from smalti.cost.layout.rules import against_tensor, divisors
from smalti.distributed.parallel.fsdp import local
from smalti.distributed.parallel.mesh import Mesh
from smalti.distributed.parallel.slices import Ranks, gathered, joined, scattered, shared, summed
from smalti.model.blocks.attention.choice import kernels_of
from smalti.model.blocks.attention.module import Attention
from smalti.model.blocks.attention.scores import HeadPart
from smalti.model.blocks.mlp import MLP
from smalti.model.blocks.moe import MoE, RouterStats
from smalti.model.blocks.moe.experts import Weights
from smalti.model.blocks.norm import RMSNorm
from smalti.model.decoder import Decoder, soft_cap

AXIS = "tensor"

ForwardBackward = Callable[[Any, Sequence[Any], Any], Any]
"""``train.step.ForwardBackward``."""


def apply(model: nn.Module, mesh: Mesh) -> None:
    """Make weights DTensors of the axis and put the collectives around them. Before ``fsdp.shard``.

    UserError with the nearest size where heads, widths or vocabulary are no multiple of the ranks.
    """
    if mesh.layout.tensor == 1:
        return
    assert isinstance(model, Decoder), "only a Decoder knows what to cut"
    _check(model.config, mesh)
    axis = mesh.axis("tensor")
    ranks = Ranks.of(axis)
    for module in list(model.modules()):
        if isinstance(module, Attention):
            _apply_attention(module, axis, ranks)
        elif isinstance(module, MoE):
            _apply_experts(module, axis, ranks)
        elif isinstance(module, MLP):
            _apply_mlp(module, axis, ranks)
    _apply_ends(model, axis, ranks)
    model.kernels_of = partial(kernels_of, part=HeadPart(ranks.place, ranks.size))
    model.positions_of = partial(_positions_of, model.positions_of, ranks)


def summing(forward_backward: ForwardBackward, mesh: Mesh) -> ForwardBackward:
    """``forward_backward``, then one sum over the axis of the gradients of parameters that are not cut."""
    if mesh.layout.tensor == 1:
        return forward_backward

    def with_sums(state: Any, microbatches: Sequence[Any], loss: Any) -> Any:
        sums = forward_backward(state, microbatches, loss)
        parts = [local(p.grad) for p in state.model.parameters() if p.grad is not None and not is_cut(p)]
        if parts:
            flat = torch.cat([part.flatten() for part in parts])
            dist.all_reduce(flat, group=mesh.group("tensor"))
            wholes = flat.split([part.numel() for part in parts])
            torch._foreach_copy_(parts, [whole.view_as(part) for whole, part in zip(wholes, parts, strict=True)])
        return sums

    return with_sums


def is_cut(parameter: Tensor) -> bool:
    """Whether ranks of the axis hold different parts of it, sharded by FSDP besides or not."""
    return isinstance(parameter, DTensor) and AXIS in (parameter.device_mesh.mesh_dim_names or ())


class Vocabulary(NamedTuple):
    """This rank's part of an output matrix."""

    weight: Tensor
    """Its rows here, [v, D]."""
    first: int
    """Of them in the whole."""
    ranks: Ranks | None
    """That have the others; None where this is all."""


def vocabulary(weight_VD: Tensor) -> Vocabulary:
    """What a head is given as weight, and which part of the vocabulary it is."""
    if not isinstance(weight_VD, DTensor):
        return Vocabulary(weight_VD, 0, None)
    ranks, part = Ranks.of(weight_VD.device_mesh), weight_VD.to_local()
    return Vocabulary(part, ranks.place * part.shape[0], ranks)


# ---- inside a block -------------------------------------------------------------------------------------------------


def _apply_attention(attention: Attention, axis: DeviceMesh, ranks: Ranks) -> None:
    for projection in (attention.q_proj, attention.k_proj, attention.v_proj):
        _by_column(projection, axis)
    _by_row(attention.o_proj, axis, ranks)
    for norm in (attention.q_norm, attention.k_norm):
        if attention.qk_norm == "full" and norm is not None:
            _cut(norm, "weight", 0, axis)
            norm.forward = partial(_full_norm, norm, ranks)  # type: ignore[method-assign]
    inner = attention.forward

    def forward(x_BtD: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return inner(gathered(x_BtD, ranks), *args, **kwargs)

    attention.forward = forward  # type: ignore[method-assign, assignment]


def _apply_mlp(mlp: MLP, axis: DeviceMesh, ranks: Ranks) -> None:
    if is_cut(mlp.up_proj.weight):  # shared experts, which their layer has cut
        return
    for projection in (mlp.gate_proj, mlp.up_proj):
        _by_column(projection, axis)
    _by_row(mlp.down_proj, axis, ranks)
    inner = mlp.forward
    mlp.forward = lambda x_BtD: inner(gathered(x_BtD, ranks))  # type: ignore[method-assign, assignment]


def _apply_experts(moe: MoE, axis: DeviceMesh, ranks: Ranks) -> None:
    """What experts and shared experts write are parts of a sum, scattered together. Gradients through the choices'
    weights are parts too; those of the router's losses are the same on all ranks, so each gives its share."""
    experts = moe.experts
    for name, _ in list(experts.named_parameters(recurse=False)):
        _cut(experts, name, 1, axis)

    def weights() -> Weights:
        gate = None if experts.gate_proj is None else local(experts.gate_proj)
        return Weights(gate, local(experts.up_proj), local(experts.down_proj))

    experts.weights = weights  # type: ignore[method-assign]
    if moe.shared_experts is not None:
        for projection in (moe.shared_experts.gate_proj, moe.shared_experts.up_proj):
            _by_column(projection, axis)
        _cut(moe.shared_experts.down_proj, "weight", 1, axis)
        moe.shared_experts.down_proj.forward = partial(_linear, moe.shared_experts.down_proj)  # type: ignore
    inner = moe.forward

    def forward(x_BtD: Tensor, mask_BT: Tensor | None = None) -> tuple[Tensor, RouterStats]:
        part_BTD, stats = inner(gathered(x_BtD, ranks), mask_BT)
        return scattered(part_BTD, ranks), RouterStats(*(shared(one, ranks) for one in stats))

    moe.forward = forward  # type: ignore[method-assign, assignment]


def _by_column(linear: nn.Linear | None, axis: DeviceMesh) -> None:
    """Each rank writes some of the columns."""
    if linear is None:
        return
    _cut(linear, "weight", 0, axis)
    if linear.bias is not None:
        _cut(linear, "bias", 0, axis)
    linear.forward = partial(_linear, linear)  # type: ignore[method-assign]


def _by_row(linear: nn.Linear, axis: DeviceMesh, ranks: Ranks) -> None:
    """Each rank reads some of the columns; the bias is added to the slices of the sum."""
    _cut(linear, "weight", 1, axis)

    def forward(x_BTF: Tensor) -> Tensor:
        out_BtD = scattered(F.linear(x_BTF, local(linear.weight)), ranks)
        return out_BtD if linear.bias is None else out_BtD + linear.bias

    linear.forward = forward  # type: ignore[method-assign, assignment]


def _linear(linear: nn.Linear, x: Tensor) -> Tensor:
    return F.linear(x, local(linear.weight), None if linear.bias is None else local(linear.bias))


def _full_norm(norm: RMSNorm, ranks: Ranks, x_BTF: Tensor) -> Tensor:
    """``RMSNorm`` over the heads of all ranks, in float32 as ``F.rms_norm`` is inside."""
    wide = x_BTF.float()
    square_BT1 = summed(wide.square().sum(dim=-1, keepdim=True), ranks)
    normal = wide * torch.rsqrt(square_BT1 / (x_BTF.shape[-1] * ranks.size) + norm.eps)
    return (normal * local(norm.weight)).to(x_BTF.dtype)


def _cut(module: nn.Module, name: str, dim: int, axis: DeviceMesh) -> None:
    whole = getattr(module, name)
    part = distribute_tensor(whole.detach(), axis, [Shard(dim)], src_data_rank=None)
    setattr(module, name, nn.Parameter(part, requires_grad=whole.requires_grad))


def _positions_of(inner: Any, ranks: Ranks, slice_tokens: int, device: torch.device) -> Tensor:
    positions_BT: Tensor = inner(slice_tokens * ranks.size, device)
    return positions_BT


# ---- embedding and head ---------------------------------------------------------------------------------------------


def _apply_ends(model: Decoder, axis: DeviceMesh, ranks: Ranks) -> None:
    """A pipeline stage may have one of them, or none."""
    if model.embed is not None:
        _cut(model.embed, "weight", 0, axis)
        model.embed.forward = partial(_embed, model.embed, ranks)  # type: ignore[method-assign]
    if model.lm_head is not None:
        _cut(model.lm_head, "weight", 0, axis)
    if model.norm is not None:
        inner = model.norm.forward
        model.norm.forward = lambda x_BtD: gathered(inner(x_BtD), ranks)  # type: ignore[method-assign]
    model.logits = partial(_logits, model.config.final_logit_softcapping)  # type: ignore[method-assign]


def _embed(embed: nn.Embedding, ranks: Ranks, ids_BT: Tensor) -> Tensor:
    """[B, T] -> [B, t, D]: each token is looked up where its row is, the others add 0."""
    if ids_BT.shape[1] % ranks.size:
        raise UserError(
            f"rows of {ids_BT.shape[1]} tokens cannot be cut into slices for {ranks.size} tensor ranks",
            allowed="a multiple of them",
            hint="train.parallel.tensor=1, or another data.seq_len",
        )
    part_vD = local(embed.weight)
    index_BT = ids_BT - ranks.place * part_vD.shape[0]
    outside_BT = (index_BT < 0) | (index_BT >= part_vD.shape[0])
    found_BTD = F.embedding(index_BT.masked_fill(outside_BT, 0), part_vD)
    return scattered(found_BTD.masked_fill(outside_BT[..., None], 0), ranks)


def _logits(bound: float | None, hidden: Tensor, weight_VD: Tensor) -> Tensor:
    """``Decoder.logits``, of the whole vocabulary on every rank; for what makes the same of them on all ranks."""
    part = vocabulary(weight_VD)
    assert part.ranks is not None
    return soft_cap(joined(F.linear(hidden, part.weight), part.ranks), bound)


def _check(config: ModelConfig, mesh: Mesh) -> None:
    size = mesh.layout.tensor
    why = against_tensor(config, size)
    if why is None:
        return
    fits = [n for n in divisors(mesh.layout.world_size) if against_tensor(config, n) is None]
    near = min(fits, key=lambda n: (abs(n - size), n))
    raise UserError(
        f"train.parallel.tensor={size} cannot be: {why}",
        allowed=f"over {mesh.layout.world_size} ranks, tensor {', '.join(map(str, fits))}",
        hint=f"train.parallel.tensor={near}",
    )
