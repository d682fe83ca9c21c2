"""Log-probability of each target, with a gradient for each token and one tile of logits in memory.

``train.cross_entropy`` computes gradients in its forward pass, because its loss is a sum over tokens. A loss that is
nonlinear in sums over sequences gives its gradients afterwards, so here the backward pass computes the logits again.

Shapes: N tokens, D hidden, V vocabulary (of this rank, where ranks share it); C tokens of a tile.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from smalti.distributed.parallel.slices import Ranks, all_gather_stacked
from smalti.distributed.parallel.tensor import head_shard
from smalti.train.batches import IGNORE
from smalti.train.cross_entropy import capped_logits, check_targets, counted_rows

_BYTES_PER_LOGIT = 12
"""The logit, in fp32 too, and its probability or gradient."""


class _Options(NamedTuple):
    soft_cap: float | None
    chunk_bytes: int
    ranks: Ranks | None


def log_probs_head(
    targets_BT: Tensor, *, soft_cap: float | None = None, chunk_bytes: int = 2**28
) -> Callable[[Tensor, Tensor], Tensor]:
    """Return a head for ``Decoder.forward``: (hidden_BTD, weight_VD) -> log p of the targets in nats, [B, T].

    fp32 (fp64 of fp64 inputs); 0 where the target is IGNORE. If ranks share the weight, each returns the whole values,
    and the gradients of its part: those of hidden must be summed. soft_cap: the bound of
    ``model.final_logit_softcapping``. Raises DataError for a target outside the vocabulary.
    """

    def head(hidden_BTD: Tensor, weight_VD: Tensor) -> Tensor:
        shard, targets_N, hidden_ND = head_shard(weight_VD), targets_BT.flatten(), hidden_BTD.flatten(0, -2)
        check_targets(targets_N, weight_VD.shape[0])
        rows_C = counted_rows(targets_N != IGNORE)
        if rows_C is not None:
            hidden_ND, targets_N = hidden_ND.index_select(0, rows_C), targets_N.index_select(0, rows_C)
        options = _Options(soft_cap, chunk_bytes, shard.ranks)
        log_probs_N: Tensor = _LogProbs.apply(hidden_ND, shard.weight, targets_N - shard.first, options)
        if rows_C is not None:
            log_probs_N = log_probs_N.new_zeros(targets_BT.numel()).index_copy(0, rows_C, log_probs_N)
        # not a view, which FSDP warns of
        return torch.where(targets_BT != IGNORE, log_probs_N.view(targets_BT.shape), 0.0)

    return head


class _LogProbs(torch.autograd.Function):
    """Log-probabilities over tiles of tokens; saves the log-partition of each token."""

    @staticmethod
    def forward(ctx: Any, hidden_ND: Tensor, weight_VD: Tensor, targets_N: Tensor, options: _Options) -> Tensor:
        """Return log p [N]. ``targets_N`` are relative to the first row of ``weight_VD``."""
        partitions, picked = [], []
        for rows in tiles(hidden_ND.shape[0], weight_VD.shape[0], options.chunk_bytes):
            logits_CV, _ = wide_logits(hidden_ND[rows], weight_VD, options.soft_cap)
            index_C1, inside_C = _index(targets_N[rows], weight_VD.shape[0])
            partitions.append(logits_CV.logsumexp(dim=-1))
            picked.append(logits_CV.gather(1, index_C1)[:, 0] * inside_C)
        partition_N, picked_N = torch.cat(partitions), torch.cat(picked)
        if options.ranks is not None:
            parts_W2N = all_gather_stacked(torch.stack([partition_N, picked_N]), options.ranks)
            partition_N, picked_N = parts_W2N[:, 0].logsumexp(dim=0), parts_W2N[:, 1].sum(dim=0)
        ctx.save_for_backward(hidden_ND, weight_VD, targets_N, partition_N)
        ctx.options = options
        return picked_N - partition_N

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_N: Tensor) -> tuple[Tensor | None, ...]:
        """d log p / d logits = onehot - softmax; through c tanh(x / c) it is times 1 - tanh^2."""
        hidden_ND, weight_VD, targets_N, partition_N = ctx.saved_tensors
        options: _Options = ctx.options
        for_hidden, for_weight = ctx.needs_input_grad[:2]
        grad_hidden_ND = torch.empty_like(hidden_ND) if for_hidden else None
        grad_weight_VD = zero_sums(weight_VD) if for_weight else None
        for rows in tiles(hidden_ND.shape[0], weight_VD.shape[0], options.chunk_bytes):
            logits_CV, tanh_CV = wide_logits(hidden_ND[rows], weight_VD, options.soft_cap)
            grad_CV = logits_CV.sub_(partition_N[rows, None]).exp_()
            index_C1, inside_C = _index(targets_N[rows], weight_VD.shape[0])
            grad_CV.scatter_add_(1, index_C1, -inside_C[:, None].to(grad_CV.dtype))
            grad_CV *= -grad_N[rows, None]
            if tanh_CV is not None:
                grad_CV *= tanh_CV.square_().neg_().add_(1)
            grad_CV = grad_CV.to(hidden_ND.dtype)
            if grad_hidden_ND is not None:
                torch.mm(grad_CV, weight_VD, out=grad_hidden_ND[rows])
            if grad_weight_VD is not None:
                grad_weight_VD += grad_CV.T @ hidden_ND[rows]
        return grad_hidden_ND, None if grad_weight_VD is None else grad_weight_VD.to(weight_VD.dtype), None, None


def zero_sums(weight_VD: Tensor) -> Tensor:
    """Return zeros to add the gradients of a weight to, in fp32 (fp64 of fp64)."""
    return torch.zeros_like(weight_VD, dtype=torch.promote_types(weight_VD.dtype, torch.float32))


def tiles(tokens: int, vocabulary: int, chunk_bytes: int, *, tensors: int = 1) -> list[slice]:
    """Return the tokens of each tile, whose ``tensors`` logit tensors take at most ``chunk_bytes``, or of one token."""
    size = max(1, chunk_bytes // (_BYTES_PER_LOGIT * tensors * vocabulary))
    return [slice(start, min(start + size, tokens)) for start in range(0, max(1, tokens), size)]


def wide_logits(hidden_CD: Tensor, weight_VD: Tensor, soft_cap: float | None) -> tuple[Tensor, Tensor | None]:
    """Return the logits in fp32 (or fp64) and, with a soft cap, tanh(uncapped logit / cap)."""
    logits_CV, tanh_CV = capped_logits(hidden_CD, weight_VD, soft_cap)
    return logits_CV.to(torch.promote_types(logits_CV.dtype, torch.float32)), tanh_CV


def _index(targets_C: Tensor, vocabulary: int) -> tuple[Tensor, Tensor]:
    """Return the targets as indexes of this rank's part [C, 1], and whether each is in it [C]."""
    inside_C = (targets_C >= 0) & (targets_C < vocabulary)
    return targets_C.clamp(0, vocabulary - 1)[:, None], inside_C
