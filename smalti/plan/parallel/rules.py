"""What a model, a batch and nodes of devices allow: the kinds of layout that are possible, and why others are not.

Promises: a layout that is yielded can be laid; a size that is left out has its reason in ``Rules.reasons``. Nothing is
said of memory or speed. Tried are weights sharded inside a node or over whole nodes, tensor ranks inside a node, and a
sequence axis only where rows have ``LONG_ROW_TOKENS``, ranks outnumber rows, or it is asked for.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from smalti.base.errors import UserError
from smalti.config.hardware import Hardware
from smalti.config.model import ModelConfig
from smalti.config.run import RunConfig
from smalti.plan.layout import Layout

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
    def in_trainer(self) -> bool:
        """``smalti train`` lays it today: replicate and shard alone."""
        return self == Kind()

    def __str__(self) -> str:
        return " x ".join(f"{axis} {getattr(self, axis)}" for axis in AXES if getattr(self, axis) > 1) or "data alone"


def check_gpus(gpus: int, hardware: Hardware) -> None:
    """UserError unless so many devices fill whole nodes, or are a part of one."""
    node = hardware.devices_per_node
    if not 1 <= gpus <= MOST_GPUS:
        raise UserError(f"{gpus} devices cannot be", allowed=f"1 to {MOST_GPUS:,}")
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

    def __init__(self, config: RunConfig, hardware: Hardware, gpus: int) -> None:
        self.model, self.hardware, self.gpus = config.model, hardware, gpus
        batch, self.seq_len = config.batches_and_lengths[-1]
        self.rows = batch // self.seq_len
        self.reasons: dict[str, str] = {}
        """What is not possible -> why."""

    def kinds(self, *, split_rows: bool = False) -> Iterator[Kind]:
        """Kinds that the model allows. ``split_rows``: with every sequence axis that it allows."""
        node = min(self.gpus, self.hardware.devices_per_node)
        tensors = self._allowed("tensor", divisors(node), lambda size: _against_tensor(self.model, size))
        stages = self._allowed("pipeline", divisors(self.gpus, 64), lambda size: _against_pipeline(self.model, size))
        experts = divisors(self.model.moe.num_experts) if self.model.moe else [1]
        for tensor in tensors:
            for pipeline in stages:
                if self.gpus % (tensor * pipeline):
                    continue
                for sequence in self._sequences(tensor, self.gpus // (tensor * pipeline), split_rows):
                    for expert in experts:
                        yield Kind(tensor, pipeline, sequence, expert)

    def shards(self, kind: Kind) -> Iterator[tuple[int, int]]:
        """(replicate, shard) of the layouts of a kind, from few shards to many."""
        if self.gpus % kind.ways:
            return
        ranks, node = self.gpus // kind.ways, self.hardware.devices_per_node
        if ranks > self.rows:
            self.reasons.setdefault(f"{ranks:,} ranks with rows of their own", f"a batch has {self.rows:,} rows")
            return
        for shard in divisors(ranks):
            width, weights = shard * kind.sequence * kind.tensor, shard * kind.sequence
            whole = width % node == 0 if width > node else self.gpus < node or node % width == 0
            if whole and weights % kind.expert == 0 and self._even(kind, weights // kind.expert):
                yield ranks // shard, shard

    def _even(self, kind: Kind, shards: int) -> bool:
        """Experts on an axis of their own are cut along their width, which FSDP2 cuts into equal parts only."""
        return kind.expert == 1 or self.model.expert_width % (shards * kind.tensor) == 0

    def _sequences(self, tensor: int, ranks: int, split_rows: bool) -> Iterator[int]:
        for sequence in divisors(ranks, 1024):
            if sequence > 1 and sequence & (sequence - 1):
                continue
            why = _against_sequence(self.model, self.seq_len, tensor, sequence)
            if why is not None:
                self.reasons.setdefault(f"sequence {sequence}", why)
                continue
            yield sequence
            if not split_rows and self.seq_len < LONG_ROW_TOKENS and ranks // sequence <= self.rows:
                return

    def _allowed(self, axis: str, sizes: list[int], against: Callable[[int], str | None]) -> list[int]:
        found = []
        for size in sizes:
            why = against(size)
            if why is None:
                found.append(size)
            else:
                self.reasons.setdefault(f"{axis} {size}", why)
        return found


def divisors(number: int, most: int | None = None) -> list[int]:
    """Rising; up to ``most``."""
    small = [n for n in range(1, int(number**0.5) + 1) if number % n == 0]
    found = sorted({*small, *(number // n for n in small)})
    return [n for n in found if most is None or n <= most]


def _against_tensor(model: ModelConfig, size: int) -> str | None:
    for name, whole in (
        ("query heads", model.num_attention_heads),
        ("key-value heads", model.kv_heads),
        ("columns of an MLP", model.expert_width if model.moe else model.intermediate_size),
    ):
        if whole % size:
            return f"{whole:,} {name} are not a multiple"
    return None


def _against_pipeline(model: ModelConfig, size: int) -> str | None:
    return f"{model.num_hidden_layers} layers are not a multiple" if model.num_hidden_layers % size else None


def _against_sequence(model: ModelConfig, seq_len: int, tensor: int, size: int) -> str | None:
    heads, kv_heads = model.num_attention_heads // tensor, model.kv_heads // tensor
    if heads % size:
        return f"{heads} query heads on a rank are not a multiple"
    if kv_heads % size and size % kv_heads:
        return f"{kv_heads} key-value heads on a rank cannot be spread over them"
    return f"rows of {seq_len:,} tokens are not a multiple" if seq_len % size else None
