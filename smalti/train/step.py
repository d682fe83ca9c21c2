"""One optimizer update. The whole arithmetic of a step is on this page.

A loss is ``(model, microbatch) -> (sum, weight, metrics)``: sums over what the microbatch holds, never means. The step
adds them over microbatches and ranks and is the only place that divides, by the global weight; so the update depends
on the global batch alone, not on how it was cut. Nothing here waits for the device.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from smalti.dist.fsdp import local, square_norm
from smalti.train.balance import ExpertBalance

Metrics = dict[str, Tensor]
Loss = Callable[[nn.Module, Any], tuple[Tensor, Tensor, Metrics]]
Passes = Callable[[nn.Module, Sequence[Any], Loss], list[Metrics]]
"""(model, microbatches, loss) -> of each forward and backward pass ``total``, ``weight`` and the sums of the loss."""


def one_by_one(model: nn.Module, microbatches: Sequence[Any], loss: Loss) -> list[Metrics]:
    """Forward and backward over one microbatch after the other: gradients add up as sums."""
    sums: list[Metrics] = []
    for microbatch in microbatches:
        total, weight, metrics = loss(model, microbatch)
        total.backward()
        sums.append({"total": total, "weight": weight, **metrics})
    return sums


@dataclass
class TrainState:
    """What a step changes. ``step`` counts finished updates; ``lr`` maps the index of an update to its rate."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    lr: Callable[[int], float]
    clip_norm: float
    balance: ExpertBalance | None = None
    """Told the load of the experts after each step (``moe/load`` of the loss)."""
    passes: Passes = one_by_one
    """How the microbatches of a step go through the model; another one where its layers are spread over ranks."""
    copies: int = 1
    """Ranks that reckon the same sums, as those that share each matrix do."""
    pipeline: int = 1
    """Pipeline stages of the world: each parameter is known to the ranks of one."""
    step: int = 0


class StepResult(NamedTuple):
    """Figures of one step, still on the device: reading one waits for it."""

    loss: Tensor
    """Global mean loss (total / weight), fp64, shape ()."""
    weight: Tensor
    """Global weight: for language modelling the tokens that were predicted."""
    grad_norm: Tensor
    """L2 norm of the global mean gradient, before clipping."""
    metrics: Metrics
    """The loss's own sums / weight, under the loss's names."""


def train_step(state: TrainState, microbatches: Sequence[Any], loss: Loss) -> StepResult:
    """Forward and backward over ``microbatches`` (the same number on each rank), then one update of ``state``.

    A gradient that is not finite spoils the weights; the loop reads ``grad_norm`` before it saves and ends the run.
    """
    # ---- forward and backward: gradients add up as sums -------------------------------------------------------------
    state.optimizer.zero_grad(set_to_none=True)
    sums = state.passes(state.model, microbatches, loss)

    # ---- one reduction over all ranks: loss, weight, squared gradient norm, metrics ---------------------------------
    gradients = [p.grad for p in state.model.parameters() if p.grad is not None]
    names = list(sums[0])
    parts = [torch.stack([s[name].detach().double() for s in sums]).sum(0) / state.copies for name in names]
    own = square_norm(gradients, pipeline=state.pipeline)
    packed = torch.cat([own.reshape(1), *(part.reshape(-1) for part in parts)])
    dist.all_reduce(packed)
    square, *flat = packed.split([1, *(part.numel() for part in parts)])
    found = {name: value.view(part.shape) for name, value, part in zip(names, flat, parts, strict=True)}
    weight = found.pop("weight").clamp(min=1e-30)

    # ---- divide by the global weight and clip, in one pass over the gradients ---------------------------------------
    grad_norm = square.sqrt().squeeze() / weight
    scale = (state.clip_norm / (grad_norm + 1e-6)).clamp(max=1.0) / weight
    shards = [local(gradient) for gradient in gradients]
    torch._foreach_mul_(shards, scale.to(shards[0].dtype))

    # ---- update -----------------------------------------------------------------------------------------------------
    for group in state.optimizer.param_groups:
        group["lr"] = state.lr(state.step)
    state.optimizer.step()
    if state.balance is not None:
        state.balance.after_step(state.model, found["moe/load"])
    state.step += 1
    total = found.pop("total")
    return StepResult(total / weight, weight, grad_norm, {name: value / weight for name, value in found.items()})
