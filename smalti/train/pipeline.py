"""Runs the microbatches of a step through pipeline stages, as a ``TrainState.forward_backward``.

Each pipeline stage calls the loss on its own part; every sum has the same name and shape on all ranks, and is zero if a
rank contributes nothing. Microbatches are padded to one shape by rows without targets. Gradients are reduced once a
step. A loss must call the model once, with a head.

Shapes: S rows, T time, D hidden.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class
from torch.nn import functional as F

from smalti.base.errors import UserError
from smalti.config.model import ModelConfig
from smalti.config.parallel import PipelineSchedule
from smalti.cost.microbatch import why_not_microbatches
from smalti.distributed.parallel.pipeline import Stage, StagedDecoder
from smalti.model.decoder import DecoderOutput
from smalti.track.progress import Phase
from smalti.train.batches import IGNORE, Microbatch
from smalti.train.step import Loss, Metrics, TrainState

_CLASSES: dict[PipelineSchedule, str] = {
    "1f1b": "1F1B", "interleaved": "Interleaved1F1B", "zero_bubble": "ZBVZeroBubble",
}  # fmt: skip


class PipelineForwardBackward:
    """A ``ForwardBackward`` with one of torch's pipeline schedules."""

    def __init__(self, schedule: PipelineSchedule) -> None:
        self._name = schedule
        self._built: dict[tuple[int, tuple[int, ...]], _Built] = {}

    def __call__(self, state: TrainState, microbatches: Sequence[Any], loss: Loss) -> list[Metrics]:
        """Run the microbatches forward and backward; returns the sums of each on each of this rank's stages."""
        model = state.model
        padded = _padded(microbatches)
        built = self._for(model, padded)
        sums: list[Metrics] = []
        for stage in built.stages:
            stage.begin(state, padded, loss, sums)
        whole = cast(FSDPModule, model)
        for setting in (whole.set_requires_gradient_sync, whole.set_is_last_backward, whole.set_reshard_after_backward):
            setting(False)
        numbers = torch.arange(len(padded))
        try:
            built.schedule.step(number=numbers, target=numbers, return_outputs=False)
        except RuntimeError as error:  # torch's stages wrap the error
            raise _cause(error) from None
        # What torch's stages do at the end of a step where each is an FSDP module; it sets the three again.
        PipelineStage.perform_reduce_grad(cast(Any, _Whole(model)), 1)
        for stage in built.stages:
            stage.end()
        return sums

    def _for(self, model: nn.Module, microbatches: list[Microbatch]) -> "_Built":
        assert isinstance(model, StagedDecoder)
        shape = model.shape_between(microbatches[0].inputs)
        key = len(microbatches), shape
        if key not in self._built:
            ranks = len({stage.local_rank for stage in model.stages})
            reason = why_not_microbatches(len(microbatches), ranks, self._name)
            if reason is not None:
                raise UserError(f"the rows of a step {reason}", hint="smaller microbatches: train.microbatch_tokens")
            self._built[key] = _build(model, self._name, len(microbatches), shape)
        return self._built[key]


def _cause(error: BaseException) -> BaseException:
    """Return the first error of a chain, by which callers recognise out of memory, a lost rank and bad data."""
    while error.__cause__ is not None:
        error = error.__cause__
    return error


class _Whole(NamedTuple):
    submod: nn.Module


class _Built(NamedTuple):
    """A schedule for a number and a shape of microbatches."""

    schedule: Any
    stages: "list[_OneStage]"


def _build(model: StagedDecoder, name: PipelineSchedule, microbatches: int, shape: tuple[int, ...]) -> _Built:
    device = next(model.parameters()).device
    x_STD = torch.empty(shape, dtype=model.compute, device="meta", requires_grad=True)
    total = torch.empty((), device="meta", requires_grad=True)
    modules = [_OneStage(model, stage) for stage in model.local_stages]
    stages = [
        _WideStage(
            module,
            module.stage.index,
            len(model.stages),
            device,
            input_args=() if module.stage.is_first else (x_STD,),
            output_args=(total,) if module.stage.is_last else (x_STD,),
            group=model.group,
            dw_builder=_nothing_left if name == "zero_bubble" and not _is_cut(module.stage, model.config) else None,
        )
        for module in modules
    ]
    schedule: Any = get_schedule_class(_CLASSES[name])
    own_stages = stages[0] if name == "1f1b" else stages
    return _Built(schedule(own_stages, microbatches, loss_fn=lambda total, _: total, scale_grads=False), modules)


class _WideStage(PipelineStage):
    """Accumulates the gradients of weights in the precision of ``reduce`` also if the backward pass is split.

    FSDP does so at the end of a backward pass of inputs only; two of weights in a row would accumulate in bf16.
    """

    def backward_one_chunk(self, *args: Any, **kwargs: Any) -> None:
        cast(_OneStage, self.submod).set_phase(Phase.BACKWARD)
        super().backward_one_chunk(*args, **kwargs)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        cast(_OneStage, self.submod).set_phase(Phase.BACKWARD)
        super().backward_weight_one_chunk(bwd_chunk_id, last_backward=last_backward)
        for module in self.submod.modules():
            if isinstance(module, FSDPModule):
                for parameter in _fsdp_parameters(module):
                    parameter.accumulate_unsharded_grad_if_needed()
                    parameter.to_accumulated_grad_if_needed()


def _fsdp_parameters(module: FSDPModule) -> list[Any]:
    state: Any = module._get_fsdp_state()
    single = getattr(state, "_fsdp_param_group", None)  # torch 2.11 has one group a module
    groups = getattr(state, "_fsdp_param_groups", None) or ([] if single is None else [single])
    return [parameter for group in groups for parameter in group.fsdp_params if hasattr(parameter, "_unsharded_param")]


def _is_cut(stage: Stage, config: ModelConfig) -> bool:
    """Return whether ``zero_bubble`` splits the backward pass of a stage into that of inputs and that of weights.

    The loss computes all gradients in the forward pass, and experts compute theirs in one kernel, which would run
    twice: their backward pass is not split.
    """
    return not stage.is_last and not any(config.has_experts(layer) for layer in stage.layers)


def _nothing_left() -> Any:
    return lambda: None


class _OneStage(nn.Module):
    """The module that a schedule calls: a pipeline stage of this rank with its part of the loss, for one microbatch."""

    def __init__(self, model: nn.Module, stage: Stage) -> None:
        super().__init__()
        self.model, self.stage = model, stage
        self._microbatches, self._sums = list[Microbatch](), list[Metrics]()
        self._loss: Loss | None = None
        self._state: TrainState | None = None

    def begin(self, state: TrainState, microbatches: list[Microbatch], loss: Loss, sums: list[Metrics]) -> None:
        """Set the input of the next step; the sums of each pass are appended to ``sums``."""
        self._state, self._microbatches, self._loss, self._sums = state, microbatches, loss, sums

    def end(self) -> None:
        """Release the input and the sums."""
        self._state, self._microbatches, self._loss, self._sums = None, [], None, []

    def set_phase(self, phase: Phase) -> None:
        """Enter a phase of the step."""
        assert self._state is not None
        self._state.progress.enter(phase)

    def forward(self, *received: Tensor, number: Tensor) -> Tensor:
        """Run the stage on the output of the previous one.

        Returns the input of the next stage; at the last the loss of the microbatch, shape ().
        """
        assert self._loss is not None
        self.set_phase(Phase.FORWARD)
        model = _StageAsModel(self.model, self.stage, received[0] if received else None)
        total, weight, metrics = self._loss(cast(nn.Module, model), self._microbatches[int(number)])
        weight = weight if self.stage.is_last else torch.zeros_like(weight)
        self._sums.append({"total": total.detach(), "weight": weight, **metrics})
        if self.stage.is_last:
            return total
        assert model.output is not None
        return _with_stage_loss(model.output, total)


class _StageAsModel:
    """A pipeline stage that the loss can call like the whole model; the head of all but the last returns zeros."""

    def __init__(self, model: nn.Module, stage: Stage, x_STD: Tensor | None) -> None:
        self._model, self._stage, self._x_STD = model, stage, x_STD
        self.output: Tensor | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> DecoderOutput:
        output: DecoderOutput = self._model(*args, **kwargs, stage=self._stage, x_BTD=self._x_STD)
        if self._stage.is_last:
            return output
        self.output = output.value
        nothing = torch.zeros((), device=output.value.device)
        return output._replace(value=cast(Tensor, (nothing, nothing)))


def _with_stage_loss(x_STD: Tensor, part: Tensor) -> Tensor:
    """Return ``x_STD``; its backward pass also passes a gradient of 1 to ``part``, a loss of this pipeline stage."""
    carried: Tensor = _AddStageLoss.apply(x_STD, part) if part.requires_grad else x_STD
    return carried


class _AddStageLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_STD: Tensor, part: Tensor) -> Tensor:
        ctx.set_materialize_grads(True)
        ctx.part = part.shape, part.dtype, part.device
        return x_STD.detach()  # neither a copy nor a view, which a schedule could not detach in place

    @staticmethod
    def backward(ctx: Any, grad_STD: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        shape, dtype, device = ctx.part
        return grad_STD, torch.ones(shape, dtype=dtype, device=device)


def _padded(microbatches: Sequence[Microbatch]) -> list[Microbatch]:
    """Return the microbatches with equal numbers of rows; added rows have no targets, so they do not count."""
    rows = max(microbatch.inputs.shape[0] for microbatch in microbatches)
    return [_filled(batch, rows) if batch.inputs.shape[0] < rows else batch for batch in microbatches]


def _filled(microbatch: Microbatch, rows: int) -> Microbatch:
    def filled(tensor_ST: Tensor, value: int) -> Tensor:
        return F.pad(tensor_ST, (0, 0, 0, rows - tensor_ST.shape[0]), value=value)

    documents = None if microbatch.documents is None else filled(microbatch.documents, 0)
    n_documents = microbatch.n_documents
    if n_documents is not None:
        n_documents += rows - microbatch.inputs.shape[0]  # one for each added row
    parts = filled(microbatch.inputs, 0), filled(microbatch.targets, IGNORE), filled(microbatch.positions, 0)
    return Microbatch(*parts, documents, n_documents)
