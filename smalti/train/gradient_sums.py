"""Sums the gradients of replicated parameters over the axis ``tensor``, as a ``TrainState.forward_backward``."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from smalti.distributed.group.mesh import Mesh
from smalti.distributed.parallel.dtensors import local
from smalti.distributed.parallel.tensor import is_tensor_sharded
from smalti.train.step import ForwardBackward, Loss, Metrics, TrainState


def with_gradient_sums(forward_backward: ForwardBackward, mesh: Mesh) -> ForwardBackward:
    """Wrap ``forward_backward`` so that gradients of replicated parameters are all-reduced over the axis, once a step.

    Every rank holds these parameters whole (norms, router, biases of outputs that are summed), and a part of their
    gradient.
    """
    if mesh.layout.tensor == 1:
        return forward_backward

    def with_sums(state: TrainState, microbatches: Sequence[Any], loss: Loss) -> list[Metrics]:
        sums = forward_backward(state, microbatches, loss)
        parts = [local(p.grad) for p in state.model.parameters() if p.grad is not None and not is_tensor_sharded(p)]
        if parts:
            flat = torch.cat([part.flatten() for part in parts])
            dist.all_reduce(flat, group=mesh.group("tensor"))
            wholes = flat.split([part.numel() for part in parts])
            torch._foreach_copy_(parts, [whole.view_as(part) for whole, part in zip(wholes, parts, strict=True)])
        return sums

    return with_sums
