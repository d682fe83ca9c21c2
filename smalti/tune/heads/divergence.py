"""Divergence of a student's next-token distribution from a teacher's, with one tile of both logits in memory.

The whole vocabulary counts; neither model's logits are ever whole. As in ``train.cross_entropy``, the gradient is
computed in the forward pass, because the loss is a sum over tokens; the teacher gets none.

Shapes: N tokens, D hidden of the student, E of the teacher, V vocabulary (of this rank, where ranks share it); C tokens
of a tile.
"""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from smalti.distributed.parallel.slices import Ranks, all_gather_stacked
from smalti.distributed.parallel.tensor import head_shard
from smalti.train.cross_entropy import counted_rows
from smalti.tune.heads.log_probs import tiles, wide_logits, zero_sums

Direction = Literal["forward", "reverse"]


class Teacher(NamedTuple):
    """The teacher's last hidden states of the same tokens, and its output matrix."""

    hidden_BTE: Tensor
    weight_VE: Tensor
    soft_cap: float | None = None


class _Options(NamedTuple):
    direction: Direction
    temperature: float
    soft_caps: tuple[float | None, float | None]
    chunk_bytes: int
    ranks: Ranks | None


def divergence_head(
    teacher: Teacher,
    counted_BT: Tensor,
    *,
    direction: Direction = "forward",
    temperature: float = 1.0,
    soft_cap: float | None = None,
    chunk_bytes: int = 2**28,
) -> Callable[[Tensor, Tensor], Tensor]:
    """Return a head for ``Decoder.forward``: (hidden_BTD, weight_VD) -> the sum over counted tokens, shape ().

    The terms are those of ``losses.distillation``: ``forward_kl`` or ``reverse_kl``. If ranks share the vocabulary,
    each returns the whole sum and the gradients of its part: those of hidden must be summed.
    """

    def head(hidden_BTD: Tensor, weight_VD: Tensor) -> Tensor:
        student, of_teacher = head_shard(weight_VD), head_shard(teacher.weight_VE)
        read = [hidden_BTD.flatten(0, -2), teacher.hidden_BTE.flatten(0, -2), counted_BT.flatten()]
        rows_C = counted_rows(read[-1])
        hidden_ND, teacher_NE, counted_N = (
            read if rows_C is None else [tensor.index_select(0, rows_C) for tensor in read]
        )
        options = _Options(direction, temperature, (soft_cap, teacher.soft_cap), chunk_bytes, student.ranks)
        total: Tensor = _Divergence.apply(
            hidden_ND,
            student.weight,
            teacher_NE,
            of_teacher.weight,
            counted_N,
            options,
            torch.is_grad_enabled(),
        )
        return total

    return head


class _Divergence(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: Tensor,
        weight_VD: Tensor,
        teacher_NE: Tensor,
        teacher_VE: Tensor,
        counted_N: Tensor,
        options: _Options,
        with_gradient: bool,
    ) -> Tensor:
        """Return the sum, and save the gradients of the student."""
        exact = torch.promote_types(hidden_ND.dtype, torch.float32)
        for_hidden, for_weight = (with_gradient and needed for needed in ctx.needs_input_grad[:2])
        grad_hidden_ND = torch.empty_like(hidden_ND) if for_hidden else None
        grad_weight_VD = zero_sums(weight_VD) if for_weight else None
        total = hidden_ND.new_zeros((), dtype=exact)
        for rows in tiles(hidden_ND.shape[0], weight_VD.shape[0], options.chunk_bytes, tensors=3):
            value_C, grad_CV = _tile(hidden_ND[rows], weight_VD, teacher_NE[rows], teacher_VE, options)
            total += (value_C * counted_N[rows]).sum()
            grad_CV = (grad_CV * counted_N[rows, None]).to(hidden_ND.dtype)
            if grad_hidden_ND is not None:
                torch.mm(grad_CV, weight_VD, out=grad_hidden_ND[rows])
            if grad_weight_VD is not None:
                grad_weight_VD += grad_CV.T @ hidden_ND[rows]
        ctx.save_for_backward(grad_hidden_ND, None if grad_weight_VD is None else grad_weight_VD.to(weight_VD.dtype))
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Scale the saved gradients in place; a second backward pass raises an error of torch."""
        return (*(None if saved is None else saved.mul_(grad) for saved in ctx.saved_tensors), *(None,) * 5)


def _tile(
    hidden_CD: Tensor, weight_VD: Tensor, teacher_CE: Tensor, teacher_VE: Tensor, options: _Options
) -> tuple[Tensor, Tensor]:
    """Return t^2 KL of each token [C], and its gradient with respect to the student's uncapped logits [C, V].

    With s = log softmax(z / t) of the student and T that of the teacher: d(t^2 KL(T || s)) / dz = t (e^s - e^T), and
    d(t^2 KL(s || T)) / dz = t e^s (s - T - KL).
    """
    temperature = options.temperature
    student_CV, tanh_CV = wide_logits(hidden_CD, weight_VD, options.soft_caps[0])
    teacher_CV, _ = wide_logits(teacher_CE, teacher_VE, options.soft_caps[1])
    student_CV, teacher_CV = _log_softmax(student_CV, teacher_CV, temperature, options.ranks)
    difference_CV = student_CV - teacher_CV
    if options.direction == "forward":
        teacher_CV = teacher_CV.exp_()
        value_C = _sum_ranks((teacher_CV * difference_CV).sum(dim=-1).neg_(), options.ranks)
        grad_CV = student_CV.exp_().sub_(teacher_CV)
    else:
        student_CV = student_CV.exp_()
        value_C = _sum_ranks((student_CV * difference_CV).sum(dim=-1), options.ranks)
        grad_CV = difference_CV.sub_(value_C[:, None]).mul_(student_CV)
    grad_CV *= temperature
    if tanh_CV is not None:
        grad_CV *= tanh_CV.square_().neg_().add_(1)
    return value_C * temperature**2, grad_CV


def _log_softmax(
    student_CV: Tensor, teacher_CV: Tensor, temperature: float, ranks: Ranks | None
) -> tuple[Tensor, Tensor]:
    """Return log softmax(logits / temperature) of both, over the vocabulary of all ranks."""
    both = [logits / temperature for logits in (student_CV, teacher_CV)]
    partitions_2C = torch.stack([logits.logsumexp(dim=-1) for logits in both])
    if ranks is not None:
        partitions_2C = all_gather_stacked(partitions_2C, ranks).logsumexp(dim=0)
    return both[0].sub_(partitions_2C[0, :, None]), both[1].sub_(partitions_2C[1, :, None])


def _sum_ranks(value_C: Tensor, ranks: Ranks | None) -> Tensor:
    return value_C if ranks is None else all_gather_stacked(value_C, ranks).sum(dim=0)
