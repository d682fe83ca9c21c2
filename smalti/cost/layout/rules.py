"""What a model, a batch and nodes of devices allow: the kinds of layout that are possible, and why others are not.

The ``why_not_`` functions are the rules of one axis each. The planner, the check before a run
(``cost/layout/possible.py``) and ``smalti/distributed``, which applies the axis, use the same ones. Memory and speed
are not considered. ``Rules`` tries weights sharded inside a node or over whole nodes, tensor ranks inside a node, and a
sequence axis only where rows have ``LONG_ROW_TOKENS``, ranks outnumber rows, or it is given.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import NoReturn

from smalti.base.errors import UserError
from smalti.config.hardware import Hardware
from smalti.config.model import ModelConfig
from smalti.config.parallel import Context, PipelineSchedule
from smalti.config.run import RunConfig
from smalti.cost.axes import Layout

LONG_ROW_TOKENS = 32_768
"""From here rows are split over a sequence axis even where they fit."""

MOST_GPUS = 1_000_000
"""More cannot be asked for."""

AXES = ("tensor", "pipeline", "sequence", "expert")
"""Axes beside replicate and shard, in the order in which they are tried."""


@dataclass(frozen=True)
class Kind:
    """What a layout has beside replicate and shard."""

    tensor: int = 1
    pipeline: int = 1
    sequence: int = 1
    expert: int = 1

    def layout(self, replicate: int, shard: int) -> Layout:
        """A layout of this kind."""
        return Layout(replicate, shard, self.sequence, self.tensor, self.pipeline, self.expert)

    @property
    def ways(self) -> int:
        """Ranks that share a row of tokens or its layers."""
        return self.tensor * self.pipeline * self.sequence

    @property
    def data_alone(self) -> bool:
        """Replicate and shard alone."""
        return self == Kind()

    def __str__(self) -> str:
        return " x ".join(f"{axis} {getattr(self, axis)}" for axis in AXES if getattr(self, axis) > 1) or "data alone"


def check_gpus(gpus: int, hardware: Hardware) -> None:
    """UserError unless so many devices fill whole nodes, or are a part of one."""
    node = hardware.devices_per_node
    if not 1 <= gpus <= MOST_GPUS:
        raise UserError(f"a layout cannot have {gpus} devices", allowed=f"1 to {MOST_GPUS:,}")
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
    """The layouts that are possible for one run on so many devices."""

    def __init__(
        self, config: RunConfig, hardware: Hardware, gpus: int, *, given: Mapping[str, int] | None = None
    ) -> None:
        """``given``: axis -> the only size that it may have."""
        self.model, self.hardware, self.gpus = config.model, hardware, gpus
        self.parallel, self.given = config.train.parallel, dict(given or {})
        batch, self.seq_len = config.batches_and_lengths[-1]
        self.rows = batch // self.seq_len
        self.fewest_rows = min(batch // seq_len for batch, seq_len in config.batches_and_lengths)
        self.reasons: dict[str, str] = {}
        """What is not possible -> why."""

    def kinds(self, *, split_rows: bool = False) -> Iterator[Kind]:
        """Kinds that the model allows. ``split_rows``: with every sequence axis that it allows."""
        node = min(self.gpus, self.hardware.devices_per_node)
        schedule, model = self.parallel.pipeline_schedule, self.model
        tensors = self._allowed(
            "tensor", divisors(node), lambda size: why_not_tensor(model, size) or why_not_slices(self.seq_len, size)
        )
        stages = self._allowed(
            "pipeline",
            divisors(self.gpus, 64),
            lambda size: _uneven(model, size, schedule) or why_not_pipeline(model, size, schedule),
        )
        experts = self._of_given("expert", divisors(model.moe.num_experts) if model.moe else [1])
        for tensor in tensors:
            for pipeline in stages:
                if self.gpus % (tensor * pipeline):
                    continue
                for sequence in self._sequences(tensor, self.gpus // (tensor * pipeline), split_rows):
                    for expert in experts:
                        if sequence % expert == 0 or expert % sequence == 0:
                            yield Kind(tensor, pipeline, sequence, expert)

    def shards(self, kind: Kind) -> Iterator[tuple[int, int]]:
        """(replicate, shard) of the layouts of a kind, from few shards to many."""
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
            asked = self.given.get("shard", shard) == shard and self.given.get("replicate", ranks // shard) == (
                ranks // shard
            )
            if (
                asked
                and (whole or "shard" in self.given)
                and not why_not_expert(self.model, kind.expert, weights, kind.tensor)
            ):
                yield ranks // shard, shard

    def _sequences(self, tensor: int, ranks: int, split_rows: bool) -> Iterator[int]:
        given = self.given.get("sequence")
        for sequence in self._of_given("sequence", divisors(ranks, 1024)):
            if sequence > 1 and sequence & (sequence - 1) and given is None:
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
        found = []
        for size in self._of_given(axis, sizes):
            why = why_not(size)
            if why is None:
                found.append(size)
            else:
                self.reasons.setdefault(f"{axis} {size}", why)
        return found

    def _of_given(self, axis: str, sizes: list[int]) -> list[int]:
        return [size for size in sizes if self.given.get(axis, size) == size]


def refuse(layout: Layout, axis: str, why: str, possible: Iterable[int], hint: str | None = None) -> NoReturn:
    """UserError that ``axis`` cannot have its size, with those that it can; ``hint`` absent: the nearest of them."""
    size, sizes = getattr(layout, axis), sorted(possible)
    nearest = min(sizes, key=lambda one: (max(one, size) / min(one, size), -one))
    raise UserError(
        f"train.parallel.{axis}={size} cannot be: {why}",
        allowed=f"over {layout.world_size} ranks, {axis} {', '.join(map(str, sizes))}",
        hint=hint or f"train.parallel.{axis}={nearest}",
    )


def require(
    layout: Layout, axis: str, why_not: Callable[[int], str | None], sizes: Iterable[int], hint: str | None = None
) -> None:
    """``refuse`` the size of ``axis`` where ``why_not`` has a reason; ``sizes``: those that may be possible instead."""
    why = why_not(getattr(layout, axis))
    if why is not None:
        refuse(layout, axis, why, [size for size in sizes if why_not(size) is None], hint)


def divisors(number: int, most: int | None = None) -> list[int]:
    """Rising; up to ``most``."""
    small = [n for n in range(1, int(number**0.5) + 1) if number % n == 0]
    found = sorted({*small, *(number // n for n in small)})
    return [n for n in found if most is None or n <= most]


def why_not_tensor(model: ModelConfig, size: int) -> str | None:
    """Why ``size`` ranks cannot share each matrix; None where they can."""
    dense = model.moe is None or bool(model.moe.mlp_only_layers)
    widths = [("columns of an expert", model.expert_width)] if model.moe else []
    widths += [("columns of an MLP", model.intermediate_size)] if dense else []
    heads = [("query heads", model.num_attention_heads), ("key-value heads", model.kv_heads)]
    for name, whole in (*heads, *widths, ("tokens of the vocabulary", model.vocab_size)):
        if whole % size:
            return f"{whole:,} {name} are not a multiple"
    return None


def why_not_slices(tokens: int, tensor: int) -> str | None:
    """Why the ``tokens`` of a row on a rank cannot be cut for the norms between matrices, a slice for each tensor rank
    (Korthikanti et al. 2022); None where they can."""
    return f"{tokens:,} tokens of a row on a rank are not a multiple" if tokens % tensor else None


def why_not_pipeline(model: ModelConfig, size: int, schedule: PipelineSchedule = "1f1b") -> str | None:
    """Why the layers cannot be spread over ``size`` pipeline ranks; None where they can.

    Interleaved and zero-bubble schedules give each rank two pipeline stages; zero bubble arranges them as a V, so that
    the first rank has the last one too.
    """
    layers, stages = model.num_hidden_layers, stage_count(size, schedule)
    if layers < stages:
        return f"{layers} layers are fewer than its {stages} pipeline stages"
    if model.tie_word_embeddings and size > 1 and schedule != "zero_bubble":
        why = "the embedding is the head too (tie_word_embeddings), and they would lie on different ranks"
        together = layers >= stage_count(size, "zero_bubble")
        return why + "; pipeline_schedule=zero_bubble keeps both on one rank" * together
    return None


def why_not_few_rows(rows: int, pipeline: int) -> str | None:
    """Why a pipeline cannot run a step in which a rank has so many rows; None where it can."""
    if rows >= pipeline:
        return None
    return (
        f"a rank has {rows} {'row' if rows == 1 else 'rows'} in a step, fewer than pipeline ranks, so some would idle"
    )


def _uneven(model: ModelConfig, size: int, schedule: PipelineSchedule) -> str | None:
    """What the planner leaves out beside: the fullest rank would set the pace."""
    layers, stages = model.num_hidden_layers, stage_count(size, schedule)
    if layers % stages == 0:
        return None
    return f"{layers} layers are not a multiple" + (
        f" of {stages}, two pipeline stages on each rank" if stages != size else ""
    )


def stage_count(size: int, schedule: PipelineSchedule) -> int:
    """Pipeline stages of ``size`` ranks."""
    return size if schedule == "1f1b" or size == 1 else 2 * size


def why_not_sequence(
    model: ModelConfig, seq_len: int, size: int, *, tensor: int = 1, context: Context = "ulysses"
) -> str | None:
    """Why ``size`` ranks cannot share a row; None where they can.

    Ulysses gives each rank some of the heads that tensor ranks leave; a ring gives it two chunks of the row.
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
    """Why ``size`` of the ``shards`` ranks that share weights (shard x sequence) cannot share the experts; None where
    they can. The experts of a rank are cut along their width over the other ranks, by FSDP2 into equal parts only."""
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
