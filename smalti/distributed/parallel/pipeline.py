"""Pipeline parallelism: the layers of a decoder spread over the ranks of the axis ``pipeline``.

Promises: a rank holds its own layers alone, under the names that they have in the whole model; the embedding lies with
the first pipeline stage, the last norm and the head with the last one. The model, called as ever without gradients,
answers on every rank with what the whole model says (``Staged``), so what measures a model needs no other code. A step
of training runs the pipeline stages by a schedule: ``train/pipeline.py``. Does not keep ranks busy outside of a step:
there one pipeline stage waits for the other.

Shapes: B batch, T time, D hidden, V vocabulary, L layers with experts, E experts.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from smalti.base.errors import UserError
from smalti.config.model import ModelConfig
from smalti.cost.layout.rules import against_pipeline, stage_count
from smalti.distributed.parallel.mesh import Mesh
from smalti.model.blocks.kv_cache import Cache
from smalti.model.blocks.moe import RouterStats, over_layers
from smalti.model.decoder import Decoder, DecoderOutput, Head

Schedule = Literal["1f1b", "interleaved", "zero_bubble"]


@dataclass(frozen=True)
class Stage:
    """A pipeline stage: neighbouring layers."""

    index: int
    layers: range
    place: int
    """The rank that holds it, along the axis ``pipeline``."""
    is_last: bool

    @property
    def is_first(self) -> bool:
        """Whether it begins with the embedding."""
        return self.index == 0


def stages_of(layers: int, places: int, schedule: Schedule) -> list[Stage]:
    """All pipeline stages, in the order of the layers; where these do not divide, earlier ones have one more.

    1f1b: one a rank. interleaved: two a rank, ``places`` apart. zero_bubble: two a rank, laid as a V, so that the first
    rank has the first and the last (arXiv:2401.10241, section 6).
    """
    count = stage_count(places, schedule)
    assert layers >= count, "against_pipeline"
    ends = [-(-layers * index // count) for index in range(count + 1)]
    places_of = [index % places for index in range(count)]
    if schedule == "zero_bubble":
        places_of = [*range(places), *reversed(range(places))]
    return [
        Stage(index, range(ends[index], ends[index + 1]), places_of[index], index == count - 1)
        for index in range(count)
    ]


def own_stages(model: nn.Module, mesh: Mesh, *, schedule: Schedule, compute: torch.dtype) -> None:
    """Take away the layers of a model on the meta device that are not this rank's. Before everything else.

    ``compute``: what the blocks compute in, and so what travels between pipeline stages.
    """
    if mesh.layout.pipeline == 1:
        return
    assert isinstance(model, Decoder), "only the model of a config is cut into pipeline stages"
    _check(model.config, mesh.layout.pipeline, schedule)
    stages = stages_of(model.config.num_hidden_layers, mesh.layout.pipeline, schedule)
    own = [stage for stage in stages if stage.place == mesh.place("pipeline")]
    kept = nn.ModuleList()
    for name, block in list(model.blocks.named_children()):
        if any(int(name) in stage.layers for stage in own):
            kept.add_module(name, block)
    model.blocks = kept
    if not any(stage.is_first for stage in own):
        model.embed, model.embedding_norm = None, None  # type: ignore[assignment]
    if not any(stage.is_last for stage in own):
        model.norm, model.lm_head = None, None  # type: ignore[assignment]
    model.forward = Staged(model, stages, own, mesh, compute)  # type: ignore[method-assign, assignment]


def _check(config: ModelConfig, places: int, schedule: Schedule) -> None:
    """UserError with the largest size of the axis, where the plan's rule is against this one."""
    why = against_pipeline(config, places, schedule)
    if why is None:
        return
    fits = [size for size in range(1, places) if against_pipeline(config, size, schedule) is None]
    raise UserError(
        f"train.parallel.pipeline={places} with pipeline_schedule={schedule} cannot be: {why}",
        allowed=f"pipeline of at most {fits[-1]}",
        hint=f"train.parallel.pipeline={fits[-1]}",
    )


def staged(model: nn.Module) -> "Staged | None":
    """What calls the pipeline stages of a model; None where it is whole."""
    return model.forward if isinstance(model.forward, Staged) else None


class Shapes(NamedTuple):
    """The tensors of a whole model."""

    parameters: dict[str, tuple[int, ...]]
    buffers: dict[str, tuple[int, ...]]
    """Those that a ``state_dict`` has."""


def whole_shapes(model: nn.Module) -> Shapes:
    """Names and shapes of all tensors of the model, those of other ranks' pipeline stages included; of all ranks."""
    parameters = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    others = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items() if name not in parameters}
    own, cut = Shapes(parameters, others), staged(model)
    if cut is None:
        return own
    parts = [own] * dist.get_world_size(cut.group)
    dist.all_gather_object(parts, own, group=cut.group)
    return Shapes(*({name: shape for one in kind for name, shape in one.items()} for kind in zip(*parts, strict=True)))


class Staged:
    """Takes the place of ``Decoder.forward`` on a rank that has some of the layers."""

    def __init__(self, model: Decoder, stages: list[Stage], own: list[Stage], mesh: Mesh, compute: torch.dtype) -> None:
        self.stages, self.own, self.compute = stages, own, compute
        self.group = mesh.group("pipeline")
        self.config = model.config
        self._model, self._slices = model, mesh.layout.tensor

    @property
    def own_rows(self) -> list[int]:
        """Which of the L layers with experts are this rank's."""
        own = {layer for stage in self.own for layer in stage.layers}
        return [row for row, layer in enumerate(_with_experts(self.config)) if layer in own]

    def width_of(self, input_ids_BT: Tensor) -> tuple[int, ...]:
        """The shape of what travels between pipeline stages for these tokens: [B, T, D], or a tensor rank's slice."""
        rows, tokens = input_ids_BT.shape
        return rows, tokens // self._slices, self.config.hidden_size

    def __call__(
        self,
        input_ids_BT: Tensor,
        positions_BT: Tensor | None = None,
        documents_BT: Tensor | None = None,
        *,
        cache: Cache | None = None,
        mask_BT: Tensor | None = None,
        head: Head | None = None,
        stage: Stage | None = None,
        x_BTD: Tensor | None = None,
    ) -> DecoderOutput:
        """As ``Decoder.forward``, for the whole model and without gradients; the value is the same on every rank.

        With ``stage``, one of this rank's: that one alone, after what the one before gave as ``x_BTD``; its output is
        the value, its router sums those of its layers, with zeros for the others.
        """
        assert cache is None, "a model in pipeline stages does not generate"
        if stage is not None:
            return self._through(stage, input_ids_BT, positions_BT, documents_BT, mask_BT, head, x_BTD)
        assert not torch.is_grad_enabled(), "gradients come from a step's schedule alone"
        return self._relay(input_ids_BT, positions_BT, documents_BT, mask_BT, head)

    def _through(
        self,
        stage: Stage,
        input_ids_BT: Tensor,
        positions_BT: Tensor | None,
        documents_BT: Tensor | None,
        mask_BT: Tensor | None,
        head: Head | None,
        x_BTD: Tensor | None,
    ) -> DecoderOutput:
        if stage.is_first:
            x_BTD = self._model.enter(input_ids_BT)
        assert x_BTD is not None, "a pipeline stage goes on from the one before it"
        x_BTD, per_layer = self._model.through(x_BTD, positions_BT, documents_BT, mask_BT=mask_BT, layers=stage.layers)
        value = self._model.leave(x_BTD, head) if stage.is_last else x_BTD
        return DecoderOutput(value, _over_all(per_layer, self.config, x_BTD.device))

    def _relay(
        self,
        input_ids_BT: Tensor,
        positions_BT: Tensor | None,
        documents_BT: Tensor | None,
        mask_BT: Tensor | None,
        head: Head | None,
    ) -> DecoderOutput:
        """One pipeline stage after the other; the last one's value and the sums of all to every rank."""
        here, device = dist.get_group_rank(self.group, dist.get_rank()), input_ids_BT.device
        x_BTD, sums = None, _over_all({}, self.config, device)
        for stage, after in zip(self.stages, [*self.stages[1:], None], strict=True):
            if stage.place == here:
                output = self._through(stage, input_ids_BT, positions_BT, documents_BT, mask_BT, head, x_BTD)
                x_BTD = output.value
                if sums is not None and output.router is not None:
                    sums = RouterStats(*(a + b for a, b in zip(sums, output.router, strict=True)))
            if after is None or after.place == stage.place:
                continue
            if stage.place == here:
                assert x_BTD is not None
                dist.send(x_BTD.contiguous(), group=self.group, group_dst=after.place)
            elif after.place == here:
                x_BTD = torch.empty(self.width_of(input_ids_BT), dtype=self.compute, device=device)
                dist.recv(x_BTD, group=self.group, group_src=stage.place)
        for one in sums or ():
            dist.all_reduce(one, group=self.group)
        return DecoderOutput(self._from_last(x_BTD, device), sums)

    def _from_last(self, value: Tensor | None, device: torch.device) -> Tensor:
        """What the last pipeline stage has, on every rank of the pipeline."""
        last = self.stages[-1].place
        told = [None if value is None else (value.shape, value.dtype)]
        dist.broadcast_object_list(told, group=self.group, group_src=last, device=device)
        assert told[0] is not None
        if dist.get_group_rank(self.group, dist.get_rank()) != last or value is None:
            value = torch.empty(told[0][0], dtype=told[0][1], device=device)
        value = value.contiguous()
        dist.broadcast(value, group=self.group, group_src=last)
        return value


def _with_experts(config: ModelConfig) -> list[int]:
    return [layer for layer in range(config.num_hidden_layers) if config.has_experts(layer)]


def _over_all(per_layer: dict[int, RouterStats], config: ModelConfig, device: torch.device) -> RouterStats | None:
    """The sums of all layers with experts, zeros for those that are not in ``per_layer``; None for a dense model."""
    if config.moe is None:
        return None
    zero, zero_E = torch.zeros((), device=device), torch.zeros(config.moe.num_experts, device=device)
    nothing = RouterStats(zero, zero, zero_E, zero_E, zero)
    found: Iterable[RouterStats] = (per_layer.get(layer, nothing) for layer in _with_experts(config))
    return over_layers(list(found))
