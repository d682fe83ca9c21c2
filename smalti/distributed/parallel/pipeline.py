"""Pipeline parallelism: the layers of a decoder split over the ranks of the axis ``pipeline``.

A step of training runs the pipeline stages by a schedule: ``train/pipeline.py``.

Shapes: B batch, T time, D hidden, V vocabulary, L layers with experts, E experts.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from smalti.config.model import ModelConfig
from smalti.config.parallel import PipelineSchedule
from smalti.cost.layout.rules import require, stage_count, stage_layers, why_not_pipeline
from smalti.distributed.group.mesh import Mesh
from smalti.model.blocks.kv_cache import Cache
from smalti.model.blocks.moe import RouterStats, over_layers
from smalti.model.decoder import Decoder, DecoderOutput, Head


@dataclass(frozen=True)
class Stage:
    """A pipeline stage: consecutive layers."""

    index: int
    layers: range
    local_rank: int
    """Number of its rank along the axis ``pipeline``."""
    is_last: bool

    @property
    def is_first(self) -> bool:
        """True if the stage begins with the embedding."""
        return self.index == 0


def stages_of(layers: int, ranks: int, schedule: PipelineSchedule) -> list[Stage]:
    """Return all pipeline stages in the order of the layers; if these do not divide, earlier stages have one more.

    1f1b: one per rank. interleaved: two per rank, ``ranks`` apart. zero_bubble: two per rank, placed as a V, so that
    the first rank has the first and the last (arXiv:2401.10241, section 6).
    """
    count = stage_count(ranks, schedule)
    assert layers >= count, f"{layers} layers are fewer than {count} stages; why_not_pipeline must have refused this"
    rank_of = [index % ranks for index in range(count)]
    if schedule == "zero_bubble":
        rank_of = [*range(ranks), *reversed(range(ranks))]
    return [
        Stage(index, span, rank_of[index], index == count - 1) for index, span in enumerate(stage_layers(layers, count))
    ]


def apply(model: nn.Module, mesh: Mesh, *, schedule: PipelineSchedule, compute: torch.dtype) -> nn.Module:
    """Return a model with only this rank's layers in place of a Decoder on the meta device. Before every other axis.

    compute: the dtype of activations, and so of the tensors sent between pipeline stages. UserError with the nearest
    size where there are too few layers, or the embedding is the head too.
    """
    layout = mesh.layout
    if layout.pipeline == 1:
        return model
    assert isinstance(model, Decoder), "only a Decoder is split into pipeline stages"
    config = model.config
    require(layout, "pipeline", lambda size: why_not_pipeline(config, size, schedule), range(1, layout.pipeline))
    with torch.device("meta"):
        return StagedDecoder(model, mesh, schedule, compute)


class Shapes(NamedTuple):
    """The tensors of a whole model."""

    parameters: dict[str, tuple[int, ...]]
    buffers: dict[str, tuple[int, ...]]
    """Persistent buffers, which are in the ``state_dict``."""


def whole_shapes(model: nn.Module) -> Shapes:
    """Return names and shapes of all tensors of the model, including other ranks' pipeline stages. A collective."""
    parameters = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    others = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items() if name not in parameters}
    shapes = Shapes(parameters, others)
    if not isinstance(model, StagedDecoder):
        return shapes
    parts = [shapes] * dist.get_world_size(model.group)
    dist.all_gather_object(parts, shapes, group=model.group)
    return Shapes(
        *({name: shape for part in kind for name, shape in part.items()} for kind in zip(*parts, strict=True))
    )


class StagedDecoder(Decoder):
    """A decoder with only this rank's pipeline stages, whose parameters have the names of the whole model.

    The first stage includes the embedding, the last one the last norm and the head. Called as any decoder, without
    gradients, it returns the whole model's output on every rank, so evaluation needs no other code; the stages then run
    one after the other.
    """

    def __init__(self, model: Decoder, mesh: Mesh, schedule: PipelineSchedule, compute: torch.dtype) -> None:
        super().__init__(model.config)
        for name, child in model.named_children():  # which may have adapters and other dtypes
            setattr(self, name, child)
        self.stages = stages_of(model.config.num_hidden_layers, mesh.layout.pipeline, schedule)
        self.local_stages = [stage for stage in self.stages if stage.local_rank == mesh.local_rank("pipeline")]
        self.compute, self.group = compute, mesh.group("pipeline")
        self._slices = mesh.layout.tensor
        layers = {layer for stage in self.local_stages for layer in stage.layers}
        for name, _ in list(self.blocks.named_children()):
            if int(name) not in layers:
                delattr(self.blocks, name)
        if not any(stage.is_first for stage in self.local_stages):
            self.embed, self.embedding_norm = None, None  # type: ignore[assignment]
        if not any(stage.is_last for stage in self.local_stages):
            self.norm, self.lm_head = None, None  # type: ignore[assignment]

    @property
    def local_rows(self) -> list[int]:
        """Indices of this rank's layers among the L layers with experts."""
        layers = {layer for stage in self.local_stages for layer in stage.layers}
        return [row for row, layer in enumerate(_with_experts(self.config)) if layer in layers]

    def shape_between(self, input_ids_BT: Tensor) -> tuple[int, ...]:
        """Return the shape of activations between pipeline stages: [B, T, D], or a tensor rank's slice."""
        rows, tokens = input_ids_BT.shape
        return rows, tokens // self._slices, self.config.hidden_size

    def forward(
        self,
        input_ids_BT: Tensor,
        positions_BT: Tensor | None = None,
        documents_BT: Tensor | None = None,
        *,
        n_documents: int | None = None,
        cache: Cache | None = None,
        mask_BT: Tensor | None = None,
        head: Head | None = None,
        stage: Stage | None = None,
        x_BTD: Tensor | None = None,
    ) -> DecoderOutput:
        """Compute ``Decoder.forward`` for the whole model and without gradients; the value is the same on every rank.

        With ``stage``, one of this rank's: compute that stage alone, from ``x_BTD``, the output of the stage before.
        The value is its output; the router sums are those of its layers, with zeros for the others.
        """
        assert cache is None, "a model in pipeline stages does not generate"
        if stage is not None:
            return self._run_stage(stage, input_ids_BT, positions_BT, documents_BT, n_documents, mask_BT, head, x_BTD)
        assert not torch.is_grad_enabled(), "gradients come from a step's schedule alone"
        return self._relay(input_ids_BT, positions_BT, documents_BT, n_documents, mask_BT, head)

    def _run_stage(
        self,
        stage: Stage,
        input_ids_BT: Tensor,
        positions_BT: Tensor | None,
        documents_BT: Tensor | None,
        n_documents: int | None,
        mask_BT: Tensor | None,
        head: Head | None,
        x_BTD: Tensor | None,
    ) -> DecoderOutput:
        if stage.is_first:
            x_BTD = self.embed_tokens(input_ids_BT)
        assert x_BTD is not None, "a pipeline stage needs the output of the one before it"
        x_BTD, per_layer = self.run_blocks(
            x_BTD, positions_BT, documents_BT, n_documents=n_documents, mask_BT=mask_BT, layers=stage.layers
        )
        value = self.project_logits(x_BTD, head) if stage.is_last else x_BTD
        return DecoderOutput(value, _over_all(per_layer, self.config, x_BTD.device))

    def _relay(
        self,
        input_ids_BT: Tensor,
        positions_BT: Tensor | None,
        documents_BT: Tensor | None,
        n_documents: int | None,
        mask_BT: Tensor | None,
        head: Head | None,
    ) -> DecoderOutput:
        """Run one stage after the other; return the last one's value and the sums of all on every rank."""
        local_rank = dist.get_group_rank(self.group, dist.get_rank())
        device = input_ids_BT.device
        x_BTD, sums = None, _over_all({}, self.config, device)
        for stage, after in zip(self.stages, [*self.stages[1:], None], strict=True):
            if stage.local_rank == local_rank:
                output = self._run_stage(
                    stage, input_ids_BT, positions_BT, documents_BT, n_documents, mask_BT, head, x_BTD
                )
                x_BTD = output.value
                if sums is not None and output.router is not None:
                    sums = RouterStats(*(a + b for a, b in zip(sums, output.router, strict=True)))
            if after is None or after.local_rank == stage.local_rank:
                continue
            if stage.local_rank == local_rank:
                assert x_BTD is not None
                dist.send(x_BTD.contiguous(), group=self.group, group_dst=after.local_rank)
            elif after.local_rank == local_rank:
                x_BTD = torch.empty(self.shape_between(input_ids_BT), dtype=self.compute, device=device)
                dist.recv(x_BTD, group=self.group, group_src=stage.local_rank)
        for value in sums or ():
            dist.all_reduce(value, group=self.group)
        return DecoderOutput(self._from_last(x_BTD, device), sums)

    def _from_last(self, value: Tensor | None, device: torch.device) -> Tensor:
        """Broadcast the value of the last pipeline stage to every rank of the pipeline."""
        last = self.stages[-1].local_rank
        shapes = [None if value is None else (value.shape, value.dtype)]
        dist.broadcast_object_list(shapes, group=self.group, group_src=last, device=device)
        assert shapes[0] is not None
        if dist.get_group_rank(self.group, dist.get_rank()) != last or value is None:
            shape, dtype = shapes[0]
            value = torch.empty(shape, dtype=dtype, device=device)
        value = value.contiguous()
        dist.broadcast(value, group=self.group, group_src=last)
        return value


def _with_experts(config: ModelConfig) -> list[int]:
    return [layer for layer in range(config.num_hidden_layers) if config.has_experts(layer)]


def _over_all(per_layer: dict[int, RouterStats], config: ModelConfig, device: torch.device) -> RouterStats | None:
    """Return the sums of all layers with experts, zeros for those not in ``per_layer``; None for a dense model."""
    if config.moe is None:
        return None
    zero, zero_E = torch.zeros((), device=device), torch.zeros(config.moe.num_experts, device=device)
    nothing = RouterStats(zero, zero, zero_E, zero_E, zero)
    return over_layers([per_layer.get(layer, nothing) for layer in _with_experts(config)])
