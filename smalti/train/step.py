"""One training step: forward, backward, gradient reduction, clipping and update.

A loss is ``(model, microbatch) -> (sum, weight, metrics)``: sums, never means. The step adds them over microbatches and
ranks and alone divides, by the global weight; so the update does not depend on how the global batch was split. Nothing
here waits for the device: a loss or a gradient that is not finite changes no weight, moment or router bias; the caller
finds it in the results.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from smalti.distributed.parallel.dtensors import local, square_norm
from smalti.track.progress import NoProgress, Phase, ProgressWriter
from smalti.train.weight_average import WeightAverage

Metrics = dict[str, Tensor]
Loss = Callable[[nn.Module, Any], tuple[Tensor, Tensor, Metrics]]


class LossState(Protocol):
    """Values of a loss that change after each step, the same on every rank."""

    def after_step(self, model: nn.Module, sums: Metrics, skip: Tensor) -> None:
        """Update them from the sums of the loss's metrics over the whole batch; nothing where ``skip``, shape (), is
        true. ``sums`` has the weight too."""

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors for a checkpoint."""


@runtime_checkable
class StatefulLoss(Protocol):
    """A ``Loss`` with values that change after each step."""

    @property
    def state(self) -> LossState | None:
        """The values; None: this loss has none."""


ForwardBackward = Callable[["TrainState", Sequence[Any], Loss], list[Metrics]]
"""(state, microbatches, loss) -> a dict for each forward and backward pass: ``total``, ``weight`` and the loss's sums.

It enters the phase of each forward and each backward pass in ``state.progress``."""


def one_by_one(state: "TrainState", microbatches: Sequence[Any], loss: Loss) -> list[Metrics]:
    """Run one microbatch after the other forward and backward: gradients add up as sums.

    FSDP reduce-scatters the gradients in every backward pass (without ``no_sync``), so ranks keep only their shards.
    """
    sums: list[Metrics] = []
    for microbatch in microbatches:
        state.progress.enter(Phase.FORWARD)
        total, weight, metrics = loss(state.model, microbatch)
        state.progress.enter(Phase.BACKWARD)
        total.backward()
        sums.append({"total": total, "weight": weight, **metrics})
    return sums


@dataclass
class TrainState:
    """The state of training that a step updates.

    ``step`` is the number of finished updates; ``lr`` maps the index of an update to its learning rate.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    lr: Callable[[int], float]
    clip_norm: float
    loss_state: LossState | None = None
    """Receives the sums of the loss after each step: the load of the experts, for example."""
    forward_backward: ForwardBackward = one_by_one
    """Runs the microbatches of a step forward and backward: one by one, or by a pipeline schedule."""
    tensor_parallel_size: int = 1
    """Size of the tensor axis, whose ranks compute the same sums."""
    pipeline_parallel_size: int = 1
    """Size of the pipeline axis: each parameter is on the ranks of one pipeline stage."""
    before_update: Callable[[], None] = lambda: None
    """Called before weights and moments change; returns when a checkpoint in progress has copied them."""
    average: WeightAverage | None = None
    """The moving average of the weights (``train.ema``)."""
    step: int = 0
    progress: ProgressWriter | NoProgress = field(default_factory=NoProgress)
    """Receives the phase of the step that runs, or that raised the error; ``BACKWARD`` has recomputed blocks too."""
    found_inf: Tensor | None = None
    """1 from the first step with a non-finite loss or gradient on, else 0; shape (), on the device. While 1, later
    steps update nothing. Set to None to clear it."""


class StepResult(NamedTuple):
    """Results of one step, still on the device: reading one waits for it."""

    loss: Tensor
    """Global mean loss (total / weight), fp64, shape ()."""
    weight: Tensor
    """Global weight: in language modelling the number of predicted tokens."""
    grad_norm: Tensor
    """L2 norm of the global mean gradient, before clipping."""
    metrics: Metrics
    """The loss's own sums / weight, under the loss's names."""


def train_step(state: TrainState, microbatches: Sequence[Any], loss: Loss) -> StepResult:
    """Run ``microbatches`` (the same number on each rank) forward and backward, and update ``state`` once.

    If the loss or the gradient norm is not finite, this step and later ones change no bit of weights, moments and
    router biases; only ``state.step`` increases, until the loop reads the results and ends the run.
    """
    # ---- forward and backward: gradients add up as sums -------------------------------------------------------------
    state.optimizer.zero_grad(set_to_none=True)
    sums = state.forward_backward(state, microbatches, loss)
    state.progress.enter(Phase.OPTIMIZER)

    # ---- one reduction over all ranks: loss, weight, squared gradient norm, metrics ---------------------------------
    gradients = [p.grad for p in state.model.parameters() if p.grad is not None]
    names = list(sums[0])
    parts = [torch.stack([s[name].detach().double() for s in sums]).sum(0) for name in names]
    # the ranks of the tensor axis hold the same sums, which the all_reduce below would count once per rank
    parts = [part / state.tensor_parallel_size for part in parts]
    own_square = square_norm(gradients, pipeline=state.pipeline_parallel_size)
    packed = torch.cat([own_square.reshape(1), *(part.reshape(-1) for part in parts)])
    dist.all_reduce(packed)
    square, *flat = packed.split([1, *(part.numel() for part in parts)])
    reduced = {name: value.view(part.shape) for name, value, part in zip(names, flat, parts, strict=True)}
    weight = reduced.pop("weight").clamp(min=1e-30)

    # ---- divide by the global weight and clip, in one pass over the gradients ---------------------------------------
    grad_norm = square.sqrt().squeeze() / weight
    scale = (state.clip_norm / (grad_norm + 1e-6)).clamp(max=1.0) / weight
    shards = [local(gradient) for gradient in gradients]
    torch._foreach_mul_(shards, scale.to(shards[0].dtype))

    # ---- update, unless this or an earlier step was not finite ------------------------------------------------------
    total = reduced.pop("total") / weight
    found_inf = (~(total.isfinite() & grad_norm.isfinite())).float()
    state.found_inf = found_inf if state.found_inf is None else found_inf.maximum(state.found_inf)
    state.optimizer.found_inf = state.found_inf  # type: ignore[attr-defined]  # as torch.amp.GradScaler gives it
    for group in state.optimizer.param_groups:
        group["lr"] = state.lr(state.step) * group.get("lr_frac", 1.0)
    state.before_update()
    state.optimizer.step()
    if state.average is not None:
        state.average.update(state.step, state.found_inf)
    if state.loss_state is not None:
        state.loss_state.after_step(state.model, {**reduced, "weight": weight}, skip=state.found_inf > 0)
    state.step += 1
    return StepResult(total, weight, grad_norm, {name: value / weight for name, value in reduced.items()})
