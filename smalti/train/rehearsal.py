"""Traces one step of one rank in this process, for any number of ranks: counts bytes and collectives without storage.

Model, optimizer, loss and step are built by ``train/job.py`` on a fake process group, and run on fake tensors. Experts
are used evenly; every row is full and one document. Operators are those of a CPU; for CUDA, attention saves what fused
kernels save, but norms save a little more than fused ones.
"""

import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.distributed.tensor import DTensor, Replicate
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from smalti.base.errors import UserError
from smalti.config.model import ModelConfig
from smalti.config.run import RunConfig
from smalti.cost.axes import Layout, layout_of
from smalti.cost.batch import usual_microbatch
from smalti.cost.layout.collectives import VOTES
from smalti.distributed.group import mesh as meshes
from smalti.distributed.group.mesh import Mesh
from smalti.distributed.parallel import expert, fsdp, sequence
from smalti.distributed.parallel.dtensors import local
from smalti.distributed.parallel.ring import Ring
from smalti.distributed.parallel.ulysses import Ulysses
from smalti.distributed.trace.live_bytes import LiveBytes, Storage
from smalti.distributed.trace.traffic import Call, Total, Traffic
from smalti.model.blocks.attention.choice import windows_of
from smalti.model.blocks.attention.scores import ALL_HEADS, Attend, HeadPart, scores_of
from smalti.model.blocks.attention.sdpa import Fused
from smalti.model.decoder import Decoder
from smalti.train import job
from smalti.train.batches import Microbatch
from smalti.train.loss import LanguageLoss
from smalti.train.sharded_model import sharded
from smalti.train.step import Loss, Metrics, TrainState, one_by_one, train_step

PARTS = ("parameters", "gradients", "optimizer", "activations", "logits", "buffers", "batch")
"""The categories of bytes."""
_CPU = torch.device("cpu")
_OF_WEIGHTS = ("shard", "expert_shard", "replicate")
"""Axes of the collectives of weights and gradients."""


@dataclass(frozen=True)
class Rehearsal:
    """Memory and collectives of one step of one rank."""

    rank: int
    layout: Layout
    params: int
    """Parameters of the whole model."""
    microbatch_tokens: int
    """Tokens in a microbatch, in whole rows."""
    bytes_per_rank: dict[str, int]
    """Bytes by category (``PARTS``). Parameters, gradients and optimizer: this rank's share. Activations: tensors that
    the forward passes save for the backward pass. Logits: a tile and tensors computed from it. Buffers: gathered
    weights, inputs and outputs of collectives of weights and gradients, and the module's buffers. The last three are
    maxima, which need not be at the same moment.
    """
    peak_bytes: int
    """Most bytes alive at one moment."""
    peak_parts: dict[str, int]
    """Bytes at that moment by category, with all tensors of operators as activations."""
    collectives: tuple[Total, ...]
    """Collectives of one step, largest first."""
    checkpoint_bytes: int
    """Bytes of a checkpoint that this rank writes: its shards, divided by the number of ranks with the same ones."""


def rehearse(
    config: RunConfig,
    layout: Layout | None = None,
    microbatch_tokens: int | None = None,
    *,
    rank: int | None = None,
    cuda: bool | None = None,
    document_tokens: int | None = None,
) -> Rehearsal:
    """Trace a step of the last batch size and sequence length of the run.

    layout: default, that of the config. microbatch_tokens: tokens in whole rows; default, those of the config or the
    usual ones. rank: default, the one with the highest peak among the ranks that differ (the first of the first, of a
    middle and of the last pipeline stage). cuda: use the attention of CUDA; default, as in the config. document_tokens:
    length of the documents in packed rows; default, each row is one document.
    """
    cuda = config.train.parallel.device == "cuda" if cuda is None else cuda
    layout = layout or layout_of(config)
    config = config.on("cuda" if cuda else "cpu")
    tokens = microbatch_tokens or usual_microbatch(config, layout.data_ranks)
    each = layout.world_size // layout.pipeline
    places = {place * each for place in (0, layout.pipeline // 2, layout.pipeline - 1)} if rank is None else {rank}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Slicing a flattened dim")  # of torch, about distributed/group/mesh.py
        rehearsals = [_of_rank(config, layout, place, tokens, document_tokens, cuda=cuda) for place in sorted(places)]
    return max(rehearsals, key=lambda rehearsal: rehearsal.peak_bytes)


def _of_rank(
    config: RunConfig, layout: Layout, rank: int, tokens: int, document_tokens: int | None, *, cuda: bool
) -> Rehearsal:
    if dist.is_initialized():
        raise UserError("a rehearsal needs its own process group, but this process already has one")
    dist.init_process_group("fake", rank=rank, world_size=layout.world_size, store=FakeStore())
    try:
        mesh = meshes.build(_CPU, layout)
        # On the meta device first: FSDP2 cannot shard fake tensors.
        model = sharded(config, None, mesh, torch.device("meta"), resumes=True)
        expert.assume_even_load(model)
        _set_kernels(model, document_tokens, cuda=cuda)
        rows = _rows(config, layout, tokens)
        with FakeTensorMode(allow_non_fake_inputs=True):
            fsdp.allocate(model, _CPU)
            loss = LanguageLoss(config.model, config.train.loss)
            state = job.state_of(config, model, loss, mesh, _CPU)
            microbatches = [_microbatch(config, mesh, number) for number in rows]
            return _traced(config, mesh, state, loss, microbatches, tokens)
    finally:
        dist.destroy_process_group()


def _traced(
    config: RunConfig, mesh: Mesh, state: TrainState, loss: LanguageLoss, microbatches: list[Microbatch], tokens: int
) -> Rehearsal:
    live = LiveBytes(fake=True)
    forward_ends: list[int] = []
    named = _Categories(live)
    traffic = Traffic(mesh, see=named.collective)
    if state.forward_backward is one_by_one:
        state.forward_backward, microbatches = _counted_once(microbatches, traffic)
    _warm(state)
    if mesh.layout.pipeline > 1:  # the first step also sets the schedule up
        with _FakeValues():
            train_step(state, microbatches, loss)
    with live, traffic, _FakeValues():
        named.before(state, microbatches)
        dist.all_reduce(torch.zeros(VOTES, dtype=torch.int32))  # the vote of the loop
        train_step(state, microbatches, _with_phases(loss, live, forward_ends))
        named.after(state)
    peaks, peak, at_peak, left = _figures(live, forward_ends)
    whole = {name: peaks.get(name, 0) for name in PARTS}
    tensors = job.tensors_of(state).values()
    with torch.device("meta"):
        params = sum(parameter.numel() for parameter in Decoder(config.model).parameters())
    return Rehearsal(
        rank=dist.get_rank(),
        layout=mesh.layout,
        params=params,
        microbatch_tokens=tokens,
        bytes_per_rank={**whole, "activations": left},
        peak_bytes=peak,
        peak_parts=at_peak,
        collectives=tuple(traffic.totals()),
        checkpoint_bytes=round(sum(_written(tensor, mesh.layout) for tensor in tensors)),
    )


def _warm(state: TrainState) -> None:
    """Run one update first: DTensor derives the sharding of each operator once, with fake tensors of the whole size."""
    for group in state.optimizer.param_groups:
        group["lr"] = state.lr(state.step) * group.get("lr_frac", 1.0)
    for parameter in state.model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    state.optimizer.step()
    state.optimizer.zero_grad(set_to_none=True)


def _written(tensor: Tensor, layout: Layout) -> float:
    """Return the bytes of a rank's part of a tensor, divided by the ranks of its pipeline stage with the same part."""
    copies = layout.world_size // layout.pipeline
    if isinstance(tensor, DTensor):
        for size, place in zip(tensor.device_mesh.shape, tensor.placements, strict=True):
            copies //= 1 if isinstance(place, Replicate) else size
    return local(tensor).numel() * tensor.element_size() / copies


# ---- microbatches ---------------------------------------------------------------------------------------------------


def _rows(config: RunConfig, layout: Layout, tokens: int) -> list[int]:
    """Return the rows of each microbatch of the rank with the most rows."""
    batch, seq_len = config.batches_and_lengths[-1]
    rows = -(-(batch // seq_len) // layout.data_ranks)
    each = max(1, tokens // seq_len)
    return [min(each, rows - first) for first in range(0, rows, each)]


def _microbatch(config: RunConfig, mesh: Mesh, rows: int) -> Microbatch:
    _, seq_len = config.batches_and_lengths[-1]
    own_part = sequence.own_part(mesh, context=config.train.parallel.context)
    whole = torch.zeros((rows, seq_len), dtype=torch.int64)
    documents = torch.zeros((rows, seq_len), dtype=torch.int64) if config.data.mask_documents else None
    return Microbatch(own_part(whole), own_part(torch.zeros_like(whole)), own_part(torch.zeros_like(whole)), documents)


def _documents(like_ST: Tensor, document_tokens: int | None) -> Tensor:
    """Return the document numbers of each row, as a real tensor."""
    along = torch.arange(like_ST.shape[1]).expand(like_ST.shape)
    return torch.zeros_like(along) if document_tokens is None else along // document_tokens


def _counted_once(microbatches: list[Microbatch], traffic: Traffic) -> tuple[Any, list[Microbatch]]:
    """Return a ``forward_backward`` that counts all microbatches, and those to trace: the first two of equal shape.

    The second also counts for those of the same shape after it.
    """
    traced, times = list[Microbatch](), list[int]()
    for place, microbatch in enumerate(microbatches):
        if place > 1 and microbatch.inputs.shape == traced[-1].inputs.shape:
            times[-1] += 1
        else:
            traced.append(microbatch)
            times.append(1)

    def forward_backward(state: TrainState, of_step: Sequence[Any], loss: Loss) -> list[Metrics]:
        sums: list[Metrics] = []
        for microbatch, number in zip(of_step, times, strict=True):
            with traffic.times(number):
                sums += one_by_one(state, [microbatch], loss)
        return sums

    return forward_backward, traced


# ---- kernels --------------------------------------------------------------------------------------------------------


def _set_kernels(model: nn.Module, document_tokens: int | None, *, cuda: bool) -> None:
    """Build attention kernels from real rows, as they read the starts of documents; ``cuda``: those of ``_fused``."""
    assert isinstance(model, Decoder)
    build = model.hooks.kernels_of
    if cuda and isinstance(build, Ulysses):
        build.kernels_of = _fused
    elif cuda and not isinstance(build, Ring):  # Ring is the same on every device
        build = _fused

    def on_real_rows(
        config: ModelConfig, like_BTD: Tensor, documents_BT: Tensor | None, n_documents: int | None
    ) -> dict[int | None, Attend]:
        with unset_fake_temporarily():
            like = torch.empty((), dtype=like_BTD.dtype).expand(like_BTD.shape)
            real = None if documents_BT is None else _documents(documents_BT, document_tokens)
            return build(config, like, real, None)

    model.hooks = replace(model.hooks, kernels_of=on_real_rows)


def _fused(
    config: ModelConfig,
    like_BTD: Tensor,
    documents_BT: Tensor | None,
    n_documents: int | None = None,
    *,
    part: HeadPart = ALL_HEADS,
) -> dict[int | None, Attend]:
    """Return ``kernels_of`` that saves for the backward pass what CUDA's fused kernels save."""
    scale = scores_of(config, like_BTD.device, part).scale
    return {window: Fused(scale) for window in windows_of(config)}


# ---- counting -------------------------------------------------------------------------------------------------------


class _FakeValues(TorchDispatchMode):
    """Dispatch mode that returns a value when a fake tensor is read: 0, with which checks pass; 1 for int32, in which
    torch's pipeline stages vote on whether all of them know their shapes."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default and isinstance(args[0], FakeTensor):  # the most common of all
            return args[0].fake_device
        if func is torch.ops.aten._local_scalar_dense.default:
            return {torch.bool: False, torch.int32: 1}.get(args[0].dtype, 0)
        if func is torch.ops.aten._grouped_mm.default and args[0].dtype == torch.float32:
            return _grouped_mm(*args)  # CPUs support fp32, but torch's shape rule only bf16
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        return func(*args, **(kwargs or {}))


def _grouped_mm(left: Tensor, right: Tensor, ends: Tensor, *_: Any) -> Tensor:
    """Return an empty tensor of the result's shape: rows of groups by matrices, or a matrix for each group."""
    shape = (left.shape[0], right.shape[-1]) if right.dim() == 3 else (ends.shape[0], left.shape[0], right.shape[-1])
    return left.new_empty(shape)


class _Categories:
    """Assigns categories to storages."""

    def __init__(self, live: LiveBytes) -> None:
        self._live = live

    def before(self, state: TrainState, microbatches: Sequence[Microbatch]) -> None:
        """Assign categories to all storages that exist before a step."""
        for parameter in state.model.parameters():
            self._live.name(parameter, "parameters")
            for value in state.optimizer.state[parameter].values():
                self._live.name(value, "optimizer")
        for buffer in state.model.buffers():
            self._live.name(buffer, "buffers")
        for tensor in tree_leaves([tuple(microbatch) for microbatch in microbatches]):
            if isinstance(tensor, Tensor):
                self._live.name(tensor, "batch")

    def after(self, state: TrainState) -> None:
        """Assign a category to the gradients of a step."""
        for parameter in state.model.parameters():
            if parameter.grad is not None:
                self._live.name(parameter.grad, "gradients")

    def collective(self, call: Call, tensors: Sequence[Tensor]) -> None:
        """Assign a category to the tensors of a collective of weights or gradients."""
        if call.axis in _OF_WEIGHTS:
            for tensor in tensors:
                self._live.name(tensor, "buffers", again=False)


def _with_phases(loss: LanguageLoss, live: LiveBytes, forward_ends: list[int]) -> Loss:
    """Return the loss with its head as a separate phase; it appends the moment of each forward pass's end."""

    def phased(head: Callable[..., Any]) -> Callable[..., Any]:
        def in_phase(*args: Any, **kwargs: Any) -> Any:
            with live.phase("head"):
                result = head(*args, **kwargs)
            live.rename_phase("head", "forward")
            return result

        return in_phase

    def called(model: nn.Module, microbatch: Microbatch) -> Any:
        def with_head(*args: Any, head: Any, **rest: Any) -> Any:
            return model(*args, head=phased(head), **rest)

        result = loss(with_head, microbatch)  # type: ignore[arg-type]
        forward_ends.append(live.moment)
        return result

    return called


def _kind(storage: Storage) -> str:
    if storage.kind:
        return storage.kind
    if storage.is_resized:  # only gathered weights of FSDP2 are
        return "buffers"
    return "logits" if storage.phase == "head" else "activations"


def _figures(live: LiveBytes, forward_ends: Sequence[int]) -> tuple[dict[str, int], int, dict[str, int], int]:
    """Return the maximum of each category, the peak, its categories, and the most activations after a forward pass."""
    current = Counter[str]()
    peaks: dict[str, int] = {}
    total = peak = left = 0
    at_peak: dict[str, int] = {}
    ends = set(forward_ends)
    for place, (_, storage, change) in enumerate(live.events(), start=1):
        kind = _kind(storage)
        current[kind] += change
        total += change
        peaks[kind] = max(peaks.get(kind, 0), current[kind])
        if total > peak:
            peak, at_peak = total, dict(current)
        if place in ends:
            left = max(left, current["activations"])
    return peaks, peak, {name: at_peak.get(name, 0) for name in PARTS}, left
