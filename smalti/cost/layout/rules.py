"""The rules of layouts: which ones a model, a batch and nodes of devices allow, and why others are not possible.

Each ``why_not_`` function has the rule of one axis. The planner, the check before a run (``cost/layout/possible.py``)
and ``smalti/distributed`` use the same ones. Memory and speed are not considered.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, NoReturn

from smalti.base.errors import UserError
from smalti.config.adapter import BLOCK, GROUP
from smalti.config.hardware import Hardware
from smalti.config.model import ModelConfig
from smalti.config.parallel import Context, PipelineSchedule
from smalti.config.run import RunConfig
from smalti.cost.axes import Layout

LONG_ROW_TOKENS = 32_768
"""Rows of at least this length are split over a sequence axis even if they fit."""

MAX_GPUS = 1_000_000
"""Largest number of devices of a request."""

AXES = ("tensor", "pipeline", "sequence", "expert")
"""Axes other than replicate and shard, in the order in which they are tried."""


@dataclass(frozen=True)
class Kind:
    """The axes of a layout other than replicate and shard."""

    tensor: int = 1
    pipeline: int = 1
    sequence: int = 1
    expert: int = 1

    def layout(self, replicate: int, shard: int) -> Layout:
        """Return a layout of this kind."""
        return Layout(replicate, shard, self.sequence, self.tensor, self.pipeline, self.expert)

    @property
    def ways(self) -> int:
        """Ranks that share a row of tokens or its layers."""
        return self.tensor * self.pipeline * self.sequence

    @property
    def data_alone(self) -> bool:
        """True if only replicate and shard are used."""
        return self == Kind()

    def __str__(self) -> str:
        return " x ".join(f"{axis} {getattr(self, axis)}" for axis in AXES if getattr(self, axis) > 1) or "data alone"


def check_gpus(gpus: int, hardware: Hardware) -> None:
    """Raise UserError unless so many devices fill whole nodes, or are part of one."""
    node = hardware.devices_per_node
    if not 1 <= gpus <= MAX_GPUS:
        raise UserError(f"a layout cannot have {gpus} devices", allowed=f"1 to {MAX_GPUS:,}")
    if gpus > node and hardware.network_bytes_per_s is None:
        raise UserError(
            f"{gpus:,} devices: no network between nodes of {hardware.title} is known",
            allowed=f"1 to {node}",
            hint=f"smalti plan hardware {hardware.name} --json > mine.yaml, add network_bytes_per_s and its source, "
            "--gpu mine.yaml",
        )
    if gpus > node and gpus % node:
        below = gpus // node * node
        raise UserError(
            f"{gpus:,} devices are not whole nodes: {hardware.title} has {node} in one",
            allowed=f"up to {node}, or a multiple of it",
            hint=f"the nearest are {below:,} and {below + node:,}",
        )


class Rules:
    """The layouts that are possible for one run on so many devices.

    Tried are weights sharded inside a node or over whole nodes, tensor ranks inside a node, and a sequence axis only if
    rows have ``LONG_ROW_TOKENS``, ranks outnumber rows, or its size is fixed.
    """

    def __init__(
        self, config: RunConfig, hardware: Hardware, gpus: int, *, fixed: Mapping[str, int] | None = None
    ) -> None:
        """``fixed``: axis -> the only size that it may have."""
        self.config, self.model, self.hardware, self.gpus = config, config.model, hardware, gpus
        self.parallel, self.fixed = config.train.parallel, dict(fixed or {})
        batch, self.seq_len = config.batches_and_lengths[-1]
        self.rows = batch // self.seq_len
        self.fewest_rows = min(batch // seq_len for batch, seq_len in config.batches_and_lengths)
        self.reasons: dict[str, str] = {}
        """Sizes and axes that are not tried -> why."""

    def kinds(self, *, split_rows: bool = False) -> Iterator[Kind]:
        """Yield the kinds that the model allows. ``split_rows``: with every sequence axis that it allows."""
        node = min(self.gpus, self.hardware.devices_per_node)
        schedule, model = self.parallel.pipeline_schedule, self.model
        tensors = self._allowed(
            "tensor",
            divisors(node),
            lambda size: (
                why_not_tensor(model, size)
                or why_not_slices(self.seq_len, size)
                or why_not_adapter(self.config, "tensor", size)
            ),
        )
        stages = self._allowed(
            "pipeline",
            divisors(self.gpus, 64),
            lambda size: (
                _uneven(model, size, schedule)
                or why_not_pipeline(model, size, schedule)
                or why_not_adapter(self.config, "pipeline", size)
            ),
        )
        experts = self._allowed(
            "expert",
            divisors(model.moe.num_experts) if model.moe else [1],
            lambda size: why_not_adapter(self.config, "expert", size),
        )
        for tensor in tensors:
            for pipeline in stages:
                if self.gpus % (tensor * pipeline):
                    continue
                for sequence in self._sequences(tensor, self.gpus // (tensor * pipeline), split_rows):
                    for expert in experts:
                        if sequence % expert == 0 or expert % sequence == 0:
                            yield Kind(tensor, pipeline, sequence, expert)

    def shards(self, kind: Kind) -> Iterator[tuple[int, int]]:
        """Yield (replicate, shard) of the layouts of a kind, from few shards to many."""
        if self.gpus % kind.ways:
            return
        ranks, node = self.gpus // kind.ways, self.hardware.devices_per_node
        if ranks > self.rows:
            self.reasons.setdefault(f"{ranks:,} ranks with rows of their own", f"a batch has {self.rows:,} rows")
            return
        if why_not_few_rows(-(-self.fewest_rows // ranks), kind.pipeline):
            return
        for shard in divisors(ranks):
            width, weights = shard * kind.sequence * kind.tensor, shard * kind.sequence
            whole = width % node == 0 if width > node else self.gpus < node or node % width == 0
            wanted = self.fixed.get("shard", shard) == shard and self.fixed.get("replicate", ranks // shard) == (
                ranks // shard
            )
            if (
                wanted
                and (whole or "shard" in self.fixed)
                and not why_not_expert(self.model, kind.expert, weights, kind.tensor)
                and not why_not_adapter(self.config, "expert", kind.expert, weights)
            ):
                yield ranks // shard, shard

    def _sequences(self, tensor: int, ranks: int, split_rows: bool) -> Iterator[int]:
        fixed = self.fixed.get("sequence")
        for sequence in self._fixed_or("sequence", divisors(ranks, 1024)):
            if sequence > 1 and sequence & (sequence - 1) and fixed is None:
                continue
            why = why_not_sequence(self.model, self.seq_len, sequence, tensor=tensor, context=self.parallel.context)
            why = why or why_not_slices(self.seq_len // sequence, tensor)
            if why is not None:
                self.reasons.setdefault(f"sequence {sequence}", why)
                continue
            yield sequence
            if not split_rows and self.seq_len < LONG_ROW_TOKENS and ranks // sequence <= self.rows:
                return

    def _allowed(self, axis: str, sizes: list[int], why_not: Callable[[int], str | None]) -> list[int]:
        possible = []
        for size in self._fixed_or(axis, sizes):
            why = why_not(size)
            if why is None:
                possible.append(size)
            else:
                self.reasons.setdefault(f"{axis} {size}", why)
        return possible

    def _fixed_or(self, axis: str, sizes: list[int]) -> list[int]:
        return [size for size in sizes if self.fixed.get(axis, size) == size]


def refuse(layout: Layout, axis: str, why: str, possible: Iterable[int], hint: str | None = None) -> NoReturn:
    """Raise UserError that ``axis`` cannot have its size, with the possible ones; ``hint`` None: the nearest of
    them."""
    size, sizes = getattr(layout, axis), sorted(possible)
    nearest = min(sizes, key=lambda other: (max(other, size) / min(other, size), -other))
    raise UserError(
        f"train.parallel.{axis}={size} is not possible: {why}",
        allowed=f"over {layout.world_size} ranks, {axis} {', '.join(map(str, sizes))}",
        hint=hint or f"train.parallel.{axis}={nearest}",
    )


def require(
    layout: Layout, axis: str, why_not: Callable[[int], str | None], sizes: Iterable[int], hint: str | None = None
) -> None:
    """``refuse`` the size of ``axis`` if ``why_not`` returns a reason; ``sizes``: candidates for possible sizes."""
    why = why_not(getattr(layout, axis))
    if why is not None:
        refuse(layout, axis, why, [size for size in sizes if why_not(size) is None], hint)


def divisors(number: int, most: int | None = None) -> list[int]:
    """Return the divisors of ``number`` up to ``most``, in ascending order."""
    small = [n for n in range(1, int(number**0.5) + 1) if number % n == 0]
    every = sorted({*small, *(number // n for n in small)})
    return [n for n in every if most is None or n <= most]


def why_not_tensor(model: ModelConfig, size: int) -> str | None:
    """Return why ``size`` ranks cannot share each matrix, or None."""
    dense = model.moe is None or bool(model.moe.mlp_only_layers)
    widths = [("columns of an expert", model.expert_width)] if model.moe else []
    widths += [("columns of an MLP", model.intermediate_size)] if dense else []
    heads = [("query heads", model.num_attention_heads), ("key-value heads", model.kv_heads)]
    for name, whole in (*heads, *widths, ("tokens of the vocabulary", model.vocab_size)):
        if whole % size:
            return f"{whole:,} {name} are not a multiple"
    return None


def why_not_slices(tokens: int, tensor: int) -> str | None:
    """Return why the ``tokens`` of a row on a rank cannot be split over tensor ranks, or None.

    The norms between matrices are computed on such slices (Korthikanti et al. 2022).
    """
    return f"{tokens:,} tokens of a row on a rank are not a multiple" if tokens % tensor else None


def why_not_pipeline(model: ModelConfig, size: int, schedule: PipelineSchedule = "1f1b") -> str | None:
    """Return why ``size`` pipeline ranks cannot share the layers, or None.

    Interleaved and zero-bubble schedules give each rank two pipeline stages; zero bubble arranges them as a V, so that
    the first rank has the last one too.
    """
    layers, stages = model.num_hidden_layers, stage_count(size, schedule)
    if model.num_labels and size > 1:
        return "the loss of a reward model needs it in one piece"
    if layers < stages:
        return f"{layers} layers are fewer than its {stages} pipeline stages"
    if model.tie_word_embeddings and size > 1 and schedule != "zero_bubble":
        why = "the embedding is the head too (tie_word_embeddings), and they would be on different ranks"
        together = layers >= stage_count(size, "zero_bubble")
        return why + "; pipeline_schedule=zero_bubble keeps both on one rank" * together
    return None


def why_not_few_rows(rows: int, pipeline: int) -> str | None:
    """Return why a pipeline cannot run a step in which a rank has so many rows, or None."""
    if rows >= pipeline:
        return None
    return (
        f"a rank has {rows} {'row' if rows == 1 else 'rows'} in a step, fewer than pipeline ranks, so some would idle"
    )


def _uneven(model: ModelConfig, size: int, schedule: PipelineSchedule) -> str | None:
    """Return why the planner leaves out ``size`` pipeline ranks, or None.

    A run may have pipeline stages of unequal size, but the largest slows down all ranks.
    """
    layers, stages = model.num_hidden_layers, stage_count(size, schedule)
    if layers % stages == 0:
        return None
    return f"{layers} layers are not a multiple" + (
        f" of {stages}, two pipeline stages on each rank" if stages != size else ""
    )


def stage_count(size: int, schedule: PipelineSchedule) -> int:
    """Return the number of pipeline stages of ``size`` ranks."""
    return size if schedule == "1f1b" or size == 1 else 2 * size


def stage_layers(layers: int, count: int) -> list[range]:
    """Return the layers of each of ``count`` pipeline stages; if they do not divide, earlier stages have one more."""
    ends = [-(-layers * index // count) for index in range(count + 1)]
    return [range(start, end) for start, end in pairwise(ends)]


def why_not_sequence(
    model: ModelConfig, seq_len: int, size: int, *, tensor: int = 1, context: Context = "ulysses"
) -> str | None:
    """Return why ``size`` ranks cannot share a row, or None.

    Ulysses gives each rank some of a tensor rank's heads; a ring gives it two chunks of the row.
    """
    if size == 1:
        return None
    if context == "ring":
        return f"rows of {seq_len:,} tokens are not a multiple of {2 * size}, two chunks a rank" if (
            seq_len % (2 * size)
        ) else None  # fmt: skip
    heads, kv_heads = model.num_attention_heads // tensor, model.kv_heads // tensor
    if heads % size:
        return f"{heads} query heads on a rank are not a multiple"
    if kv_heads % size and size % kv_heads:
        return f"{kv_heads} key-value heads on a rank cannot be spread over them"
    return f"rows of {seq_len:,} tokens are not a multiple" if seq_len % size else None


def why_not_expert(model: ModelConfig, size: int, shards: int, tensor: int = 1) -> str | None:
    """Return why ``size`` of the ``shards`` ranks that share weights (shard x sequence) cannot share the experts, or
    None.

    The experts of a rank are split along their width over the other ranks, by FSDP2 into equal parts only.
    """
    if size == 1:
        return None
    if model.moe is None:
        return "the model has no experts"
    if model.moe.num_experts % size:
        return f"{model.moe.num_experts} experts are not a multiple"
    if shards % size:
        return f"shard x sequence = {shards} ranks are not a multiple"
    parts = shards // size * tensor
    if model.expert_width % parts:
        return f"{model.expert_width:,} columns of an expert are not a multiple of {parts}, the ranks that share it"
    return None


def why_not_adapter(
    config: RunConfig, axis: Literal["tensor", "pipeline", "expert"], size: int, shards: int = 1
) -> str | None:
    """Return why adapters, or the quantised matrices beside them, cannot be split over ``size`` ranks, or None.

    ``shards``: the ranks that share weights (shard x sequence), of which ``expert`` is a part.
    """
    model, adapter = config.model, config.adapter
    if adapter is None or size == 1:
        return None
    if axis == "pipeline":
        count = stage_count(size, config.train.parallel.pipeline_schedule)
        adapted = {layer for layer, names in adapter.paths(model).items() if names}
        stages = stage_layers(model.num_hidden_layers, count)
        empty = next((stage for stage in stages if adapted.isdisjoint(stage)), None)
        return None if empty is None else f"layers {empty[0]} to {empty[-1]} would be a stage without adapters"
    others = max(1, shards // size)
    if axis == "expert" and model.hidden_size % others and adapter.rank % others:
        return f"{others} ranks cannot share an adapter of an expert, {adapter.rank} x {model.hidden_size}"
    if adapter.quantize is None:
        return None
    if adapter.quantize == "nf4_double":
        return f"the scales that nf4_double quantises together ({GROUP}) would be on several ranks; nf4 can be split"
    rows = {"hidden_size": model.hidden_size}
    if axis == "tensor":  # matrices that are split along their inputs
        shared = model.moe.num_shared_experts if model.moe else 0
        rows["heads"] = model.num_attention_heads * model.width_per_head // size
        if model.moe is None or model.moe.mlp_only_layers:
            rows["intermediate_size"] = model.intermediate_size // size
        if shared:
            rows["shared experts"] = shared * model.expert_width // size
    name = next((name for name, width in rows.items() if width % BLOCK), None)
    return (
        name and f"rows of {rows[name]:,} numbers ({name}) are not a multiple of {BLOCK}, a block of {adapter.quantize}"
    )
