"""Peak bytes on one rank while training, and what the device needs besides.

The peak is the largest snapshot of a step (``cost/memory/snapshots.py``) in which the optimizer's moments exist; on a
CPU a real step agrees within 5 % (``bench/plan_memory.py``). For a GPU, norms and attention are fused; driver, NCCL and
allocator are assumptions (``Assumed``). The axes tensor, sequence, expert and pipeline follow published formulas.
"""

from dataclasses import asdict, dataclass, replace
from typing import Any

from smalti.config.optimizer import OPTIMIZERS
from smalti.config.run import RunConfig
from smalti.cost.axes import Layout, layout_of
from smalti.cost.batch import rows_per_rank, split, usual_microbatch
from smalti.cost.memory.snapshots import Rank, Snapshot, step_snapshots
from smalti.cost.memory.tape import MicrobatchShape
from smalti.cost.units import FORMAT_BYTES

PEER_COPIES = 2
"""Copies of the state in shared memory at a time (``train.checkpoint.peer_copies``): the newest, and one that is being
written. With ``train.checkpoint.peer_node`` one more, which is being sent."""

PEER_COPIES_OF_NODES = 6
"""The same of ranks on several nodes, in parts of a node: the newest, one that is being written, and of two older
copies (the one that is on two nodes, and the one that is being fetched) the node's own part and that of the node
before. After a loss also the whole state, from which the ranks resume."""


def peer_copies(config: RunConfig) -> int:
    """Return the number of copies of the state in shared memory at a time; with ``train.nodes`` of a node's part."""
    section, nodes = config.train.checkpoint, config.train.nodes
    if section.peer_copies is None:
        return 0
    return PEER_COPIES + (section.peer_node is not None) if nodes is None else PEER_COPIES_OF_NODES + nodes.count


@dataclass(frozen=True)
class Assumed:
    """Assumed memory of a GPU besides tensors, from published figures, not measured here; each can be replaced."""

    context_bytes: float = 0.75e9
    """The CUDA context and the kernels that are loaded: 723 MiB for one small tensor
    (discuss.pytorch.org/t/what-is-the-reason-for-pytorchs-gpu-memory-floor/73021)."""
    communicator_bytes: float = 1.6e9
    """NCCL's buffers for each communicator: 1.6 GB for one, about 6 GB for three or more (github.com/NVIDIA/nccl issue
    864). One communicator for each axis that is larger than 1."""
    fragmentation_frac: float = 0.15
    """Share of the tensors' bytes that PyTorch's allocator loses between blocks: 15 % on average, up to 33 %, over
    eight language models on an A100 (GMLake, arXiv 2401.08156); less with ``expandable_segments``."""


@dataclass(frozen=True)
class Memory:
    """Bytes on one rank. The first fields are whole sizes; they are not all alive at one time."""

    params_bytes: int
    """Master weights, this rank's share."""
    grads_bytes: int
    """Gradients in the master format, this rank's share."""
    moments_bytes: int
    """The moments of the optimizer, this rank's share: two of AdamW, one of Lion; and the average of ``train.ema``."""
    gathered_bytes: int
    """Peak size of the all-gathered (unsharded) weights, in the compute dtype."""
    activations_bytes: int
    """Peak size of the activations saved for the backward pass."""
    logits_bytes: int
    """A tile of logits and its derived tensors, at most about ``train.loss.chunk_bytes``."""
    microbatch_tokens: int
    """The microbatch that the last two are for, before a row is split over ranks."""
    peak: Snapshot
    """The snapshot of the step in which the most bytes are alive."""
    phases: dict[str, int]
    """Phase -> its peak bytes."""
    staging_bytes: int = 0
    """The copy of a checkpoint in host memory, which exists from the first save on."""
    peer_copies_bytes: int = 0
    """The copies of the state in shared memory, in which the ranks of a node hold their parts together."""
    is_staged_on_device: bool = False
    """Whether host memory is the device's memory: on a CPU."""
    reserved_bytes: int = 0
    """Context and communicators of a GPU (``Assumed``)."""
    fragmentation_bytes: int = 0
    """Memory that the allocator of a GPU loses (``Assumed``)."""

    @property
    def tensors_bytes(self) -> int:
        """Return the peak of live tensors, as requested from the allocator."""
        return round(self.peak.parts.total)

    @property
    def total_bytes(self) -> int:
        """Return the memory that the device needs."""
        host_bytes = self.staging_bytes + self.peer_copies_bytes if self.is_staged_on_device else 0
        return self.tensors_bytes + host_bytes + self.reserved_bytes + self.fragmentation_bytes

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object: whole sizes, bytes alive at the peak, the peak of each phase, and the sum."""
        names = [name for name in self.__dataclass_fields__ if name not in ("peak", "phases", "is_staged_on_device")]
        return {
            **{name: getattr(self, name) for name in names},
            "peak_phase": self.peak.phase,
            "peak_bytes": {name: round(size) for name, size in asdict(self.peak.parts).items()},
            "phase_bytes": self.phases,
            "tensors_bytes": self.tensors_bytes,
            "total_bytes": self.total_bytes,
        }


def memory_per_rank(
    config: RunConfig,
    *,
    layout: Layout | None = None,
    microbatch_tokens: int | None = None,
    ranks: int | None = None,
    device: str | None = None,
    assumed: Assumed | None = None,
) -> Memory:
    """Predict the peak bytes of the rank with the most.

    layout: by default that of ``layout_of`` with ``ranks`` (None: the config's). microbatch_tokens: by default the
    trainer's. device: ``cpu`` or ``cuda``; None: the config's, and for auto the CPU.
    """
    layout = layout or layout_of(config, ranks)
    if microbatch_tokens is None:
        microbatch_tokens = usual_microbatch(config, layout.data_ranks)
    kind = device or ("cuda" if config.train.parallel.device == "cuda" else "cpu")
    steps = (
        _snapshots_of_stage(config, layout, batch, seq_len, microbatch_tokens, kind, layers)
        for batch, seq_len in config.batches_and_lengths
        for layers in _stages(config.model.num_hidden_layers, layout.pipeline)
    )
    moments = config.train.moments
    fullest = max(steps, key=lambda step: max(snapshot.parts.total for snapshot in step))
    assumed = assumed or Assumed()
    memory = _as_memory(fullest, microbatch_tokens, layout, assumed, moments=moments, on_gpu=kind == "cuda")
    trained_bytes = memory.params_bytes
    if config.adapter is not None and moments:  # the base is not saved
        trained_bytes = memory.moments_bytes // moments
    staging_bytes = round((trained_bytes + memory.moments_bytes) / layout.replicate)
    peer_copies_bytes = peer_copies(config) * staging_bytes
    return replace(
        memory,
        staging_bytes=staging_bytes,
        peer_copies_bytes=peer_copies_bytes,
        is_staged_on_device=kind == "cpu",
    )


def _stages(layers: int, pipeline: int) -> list[range | None]:
    """Return the layers of the first and the last pipeline stage, which hold embedding and head; [None] without
    pipeline."""
    if pipeline == 1:
        return [None]
    each = split(layers, pipeline)
    return [range(each), range(each * (pipeline - 1), layers)]


def _snapshots_of_stage(
    config: RunConfig, layout: Layout, batch: int, seq_len: int, tokens: int, device: str, layers: range | None
) -> list[Snapshot]:
    """Return the snapshots of one step with this batch, length and pipeline stage."""
    train = config.train
    optimizer = OPTIMIZERS[train.optimizer.name]
    rows = rows_per_rank(batch, seq_len, layout.data_ranks, tokens)
    shape = MicrobatchShape(
        rows.per_microbatch,
        seq_len,
        FORMAT_BYTES[train.precision.compute],
        "cuda" if device == "cuda" else "cpu",
        documents=config.data.mask_documents,
        tensor=layout.tensor,
        sequence=layout.sequence,
        expert=layout.expert,
        adapter=config.adapter,
        compiled=device == "cuda" and train.parallel.compile is not False,
    )
    first = layers is not None and 0 in layers
    rank = Rank(
        shards=layout.weight_shards,
        reduce_bytes=FORMAT_BYTES[train.precision.reduce],
        moments=train.moments,
        makes_updates=optimizer.makes_updates,
        recompute=train.parallel.activation_checkpointing == "full",
        microbatches=rows.passes,
        in_flight=min(layout.pipeline, rows.passes) if first else 1,
        layers=layers,
        chunk_bytes=train.loss.tile_bytes(device),
        step_tokens=rows.per_rank * seq_len,
    )
    return step_snapshots(config.model, shape, rank)


def _as_memory(
    snapshots: list[Snapshot], tokens: int, layout: Layout, assumed: Assumed, *, moments: int, on_gpu: bool
) -> Memory:
    peak = max(snapshots, key=lambda snapshot: snapshot.parts.total)
    phases: dict[str, int] = {}
    for snapshot in snapshots:
        phases[snapshot.phase] = max(phases.get(snapshot.phase, 0), round(snapshot.parts.total))
    axes = (layout.replicate, layout.shard, layout.sequence, layout.tensor, layout.pipeline, layout.expert)
    reserved = assumed.context_bytes + assumed.communicator_bytes * sum(size > 1 for size in axes)

    def peak_of(part: str) -> int:
        sizes: list[float] = [getattr(snapshot.parts, part) for snapshot in snapshots]
        return round(max(sizes))

    weights = peak.parts.weights
    return Memory(
        params_bytes=round(weights),
        grads_bytes=round(peak.parts.moments / moments if moments else weights),
        moments_bytes=round(peak.parts.moments),
        gathered_bytes=peak_of("gathered"),
        activations_bytes=peak_of("activations"),
        logits_bytes=peak_of("logits"),
        microbatch_tokens=tokens,
        peak=peak,
        phases=phases,
        reserved_bytes=round(reserved) if on_gpu else 0,
        fragmentation_bytes=round(peak.parts.total * assumed.fragmentation_frac) if on_gpu else 0,
    )
