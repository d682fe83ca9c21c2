"""Snapshots of the memory of one rank during a training step, of which the largest is the peak.

They follow ``smalti/train/step.py`` under FSDP2: weights are gathered block by block, activations saved, the loss
computed in tiles, and gradients copied into a buffer and reduced to a shard. A pipeline stage keeps whole weights and
accumulates whole gradients until its last microbatch. Overlapping streams are not modelled; ``cost/memory/per_rank.py``
adds fragmentation.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from smalti.config.adapter import AdapterConfig
from smalti.config.model import ModelConfig
from smalti.cost.memory.activations import BlockTape
from smalti.cost.memory.adapters import layer_of
from smalti.cost.memory.head import Head
from smalti.cost.memory.tape import MicrobatchShape, Tape
from smalti.cost.units import KEEP_GATHERED_BYTES, Part, keeps_gathered, units


@dataclass(frozen=True)
class Parts:
    """Bytes that are alive at one time."""

    weights: float = 0
    """Master weights, this rank's share."""
    gradients: float = 0
    """Reduced gradients, this rank's share, and whole ones that wait to be reduced."""
    moments: float = 0
    """Moments of the optimizer, this rank's share."""
    gathered: float = 0
    """Whole weights in the compute format; a router's in fp32."""
    buffers: float = 0
    """Buffers of collectives; on one rank, the same copies without a collective."""
    activations: float = 0
    """Activations saved for the backward pass."""
    logits: float = 0
    """A tile of logits and its derived tensors."""
    temporary: float = 0
    """Temporary tensors of operators."""
    batch: float = 0
    """Tokens, targets and positions of the step; masks and the rotary table of the microbatch."""

    @property
    def total(self) -> float:
        """Bytes of all parts."""
        return float(sum(vars(self).values()))

    def __add__(self, other: "Parts") -> "Parts":
        others = vars(other)
        return Parts(**{name: size + others[name] for name, size in vars(self).items()})


@dataclass(frozen=True)
class Snapshot:
    """A phase (``forward``, ``loss``, ``backward``, ``reduce``, ``optimizer``) and the memory in use."""

    phase: str
    parts: Parts


@dataclass(frozen=True)
class Rank:
    """The share of the model on a rank and the settings of its step."""

    shards: int = 1
    """Ranks that share weights, gradients and moments."""
    reduce_bytes: int = 4
    """Bytes of a number of a gradient that is being reduced."""
    moments: int = 2
    """Number of the optimizer's moments, in fp32."""
    makes_updates: bool = False
    """True if the optimizer computes the updates of all weights before it applies them (Lion)."""
    recompute: bool = False
    """True if blocks save only their input and are recomputed in the backward pass."""
    microbatches: int = 1
    """Microbatches of a step; from the second on, gradients of the first exist."""
    in_flight: int = 1
    """Microbatches whose activations are held at one time, on a pipeline."""
    layers: range | None = None
    """Blocks of this rank's pipeline stage; None: all."""
    chunk_bytes: int = 2**28
    """``train.loss.chunk_bytes``."""
    step_tokens: float = 0
    """Tokens of this rank in one step."""


def step_snapshots(
    model: ModelConfig, shape: MicrobatchShape, rank: Rank, *, every_layer: bool = False
) -> list[Snapshot]:
    """Return the snapshots of one step in order.

    Of equal consecutive layers only the first and last two are included, because memory changes linearly between them;
    with ``every_layer`` all.
    """
    return list(_Step(model, shape, rank, every_layer=every_layer).run())


@dataclass(frozen=True)
class _Block:
    """Bytes of a block: saved activations, and the peaks of its forward and backward pass."""

    saved: float
    forward: Parts
    backward: Parts


class _Step:
    def __init__(self, model: ModelConfig, shape: MicrobatchShape, rank: Rank, *, every_layer: bool = False) -> None:
        self.model, self.shape, self.rank, self.c = model, shape, rank, shape.compute_bytes
        self.layers = rank.layers if rank.layers is not None else range(model.num_hidden_layers)
        self.is_first, self.is_last = 0 in self.layers, model.num_hidden_layers - 1 in self.layers
        self.is_stage = rank.layers is not None
        self.included = set(self.layers) if every_layer else _ends(model, self.layers)
        self.row = shape.tokens * model.hidden_size * self.c / shape.tensor
        dense = {unit.name: unit.elements(rank.shards, tensor=shape.tensor, experts=False) for unit in units(model)}
        experts = {unit.name: unit.elements(rank.shards, tensor=shape.tensor, experts=True) for unit in units(model)}
        whole = {name: n + experts[name] / shape.expert for name, n in dense.items()}
        shared = {name: (n + experts[name]) / rank.shards for name, n in dense.items()}
        self.table = -(-model.vocab_size // rank.shards) * rank.shards * model.hidden_size / shape.tensor
        absent = 2 - self.is_first - self.is_last if not model.tie_word_embeddings else 0
        self.root: float = whole["root"] - self.table * absent
        self.router: float = whole.get("router", 0)
        self.block: dict[bool, float] = {False: whole.get("block", 0), True: whole.get("expert block", 0)}
        self.share: dict[bool, float] = {
            False: shared.get("block", 0), True: shared.get("expert block", 0) + self.router / rank.shards
        }  # fmt: skip
        self.last_of = {unit.name == "expert block": _elements(unit.parts[-1]) * self.c / shape.tensor
                        for unit in units(model) if unit.name in ("block", "expert block")}  # fmt: skip
        self.shard_elements = self.root / rank.shards + sum(
            self.share[model.has_experts(layer)] for layer in self.layers
        )
        self.keeps_gathered = keeps_gathered(model, self.c, stage=self.is_stage)
        self.trained = {layer: self.block[model.has_experts(layer)] for layer in self.layers}
        self.trained_share = {layer: self.share[model.has_experts(layer)] for layer in self.layers}
        self.weights_bytes, self.trained_elements = self.shard_elements * 4, self.shard_elements
        if shape.adapter is not None:
            self._freeze(shape.adapter)
        self._kinds: dict[tuple[int | None, bool], _Block] = {}

    def run(self) -> Iterator[Snapshot]:
        """Yield the snapshots of forward, loss, backward with reductions, and the update."""
        rank, shard_bytes = self.rank, self.trained_elements * 4
        base = Parts(weights=self.weights_bytes, moments=shard_bytes * rank.moments, batch=self._batch())
        steady = base
        if self.is_first and self.model.embedding_norm:
            base = base + Parts(activations=BlockTape(self.model, 0, self.shape).embedding_norm() * rank.in_flight)
        full, later = Parts(gradients=shard_bytes), Parts()
        if rank.microbatches > 1:
            later = Parts(gradients=self._elements() * rank.reduce_bytes) if self.is_stage else full
        yield from self._forward(base + later)
        saved = sum(self._block(layer).saved for layer in self.layers)
        gathered = self.root * self.c + sum(map(self._whole, self.layers)) * self.keeps_gathered
        start = base + later + Parts(gathered=gathered)
        table_gradient = 0.0
        if self.is_last:
            yield from self._loss(start + Parts(activations=saved * rank.in_flight))
            table_gradient = 0 if self.is_frozen else self.table * self.c
        yield from self._backward(base + later, saved * rank.in_flight, table_gradient)
        if self.is_stage:
            yield from self._reduced_at_last(base)
        yield Snapshot("optimizer", steady + full + Parts(temporary=shard_bytes if rank.makes_updates else 0))

    def _forward(self, base: Parts) -> Iterator[Snapshot]:
        gathered, saved, before = self.root * self.c, 0.0, self._copied(self.root)
        for layer in self.layers:
            weights, block = self.block[self.model.has_experts(layer)], self._block(layer)
            gathered = (gathered if self.keeps_gathered else self.root * self.c) + self._whole(layer)
            after = self._last_copied(layer)
            if layer in self.included:
                collects = Parts(gathered=gathered, activations=saved, buffers=before + self._copied(weights))
                yield Snapshot("forward", base + collects)
                held = Parts(gathered=gathered, activations=saved, buffers=after)
                yield Snapshot("forward", base + block.forward + held)
            before = after
            saved += block.saved * self.rank.in_flight

    def _loss(self, base: Parts) -> Iterator[Snapshot]:
        """Yield the last norm, the tiles of the loss, and the backward pass of the norm."""
        tape, block = Tape(frozen=self.is_frozen), BlockTape(self.model, 0, self.shape)
        block.last_norm(tape)
        Head(
            self.shape.tokens, self.model.hidden_size,
            self.model.num_labels or self.model.vocab_size / self.shape.tensor, self.c,
            bool(self.model.final_logit_softcapping), self.rank.chunk_bytes, self.is_frozen,
        ).forward(tape)  # fmt: skip
        copied = Parts(buffers=self._last_copied(self.layers[-1]))
        yield Snapshot("loss", base + copied + _parts(tape.at_most, tape.saved))
        tape.drop("x", "last.out")
        saved = set(tape.saved)
        tape.begin()
        block.last_norm_backward(tape)
        yield Snapshot("backward", base + _parts(tape.at_most, saved))

    def _backward(self, base: Parts, saved: float, waiting: float) -> Iterator[Snapshot]:
        """Yield the blocks from the last to the first; gradients of each are then reduced, on a pipeline stage only
        added.

        ``waiting``: gradients of embedding and head, which are reduced at the end.
        """
        rank, c, row = self.rank, self.c, Parts(temporary=self.row)
        gathered = self.root * c + sum(map(self._whole, self.layers)) * self.keeps_gathered
        reduced_bytes, pending = 0.0, 0.0
        for layer in reversed(self.layers):
            has = self.model.has_experts(layer)
            block, weights, share = self._block(layer), self.trained[layer], self.trained_share[layer]
            saved -= block.saved
            passing = gathered if self.keeps_gathered else self.root * c + self._whole(layer)
            gathered -= self._whole(layer) if self.keeps_gathered and not self.is_stage else 0.0
            if layer in self.included:
                prefetched = 0.0 if self.keeps_gathered or layer == self.layers[0] else self._collects(self.block[has])
                held = Parts(
                    gathered=passing, gradients=waiting + reduced_bytes, activations=saved, buffers=pending + prefetched
                )
                yield Snapshot("backward", base + block.backward + held)
                still = base + row + Parts(gathered=gathered, activations=saved, gradients=waiting + reduced_bytes)
                then = (
                    self._added(weights)
                    if self.is_stage
                    else self._reduced(weights, share, 0.0 if self.is_frozen else self.last_of[has])
                )
                phase = "backward" if self.is_stage else "reduce"
                yield from (Snapshot(phase, still + parts) for parts in then)
            pending = 0.0 if self.is_stage else weights * rank.reduce_bytes
            if rank.microbatches == 1:  # otherwise ``base`` has them
                reduced_bytes += self._of_layer(layer) * rank.reduce_bytes if self.is_stage else share * 4
        if self.is_frozen:
            return
        if self.is_first:
            tied = self.model.tie_word_embeddings and self.is_last  # the table has two gradients and their sum
            made = Parts(
                gradients=waiting + reduced_bytes + self.table * c * (1 + tied), gathered=gathered, buffers=pending
            )
            yield Snapshot("backward", base + row + made)
        if self.is_stage:
            still = base + Parts(gradients=reduced_bytes, gathered=gathered)
            yield from (Snapshot("backward", still + parts) for parts in self._added(self.root))
            return
        reduced = base + Parts(gradients=reduced_bytes)
        last = 0.0 if self.model.tie_word_embeddings else self.table * c
        yield from (
            Snapshot("reduce", reduced + parts) for parts in self._reduced(self.root, self.root / rank.shards, last)
        )

    def _added(self, weights: float) -> Iterator[Parts]:
        """Yield the accumulation of a module's gradients by FSDP2 without a reduction, in the format of the reduction.

        Those of the first microbatch are cast to it.
        """
        cast = self.rank.reduce_bytes if self.rank.microbatches == 1 and self.rank.reduce_bytes != self.c else 0
        yield Parts(gradients=weights * (self.c + cast))

    def _reduced_at_last(self, base: Parts) -> Iterator[Snapshot]:
        """Yield the reduction of a stage's whole gradients after the last microbatch, module by module; weights are
        freed."""
        size, reduced_bytes = self.rank.reduce_bytes, 0.0
        whole = self._elements() * size
        gathered = self.root * self.c + sum(map(self._whole, self.layers))
        root = self.root * (not self.is_frozen)
        for layer in reversed([-1, *self.layers]):
            weights = root if layer < 0 else self._of_layer(layer)
            share = root / self.rank.shards if layer < 0 else self.trained_share[layer]
            gathered -= self.root * self.c if layer < 0 else self._whole(layer)
            held = base + Parts(gathered=gathered, gradients=whole + reduced_bytes)
            whole -= weights * size
            yield Snapshot("reduce", held + Parts(buffers=weights * size))
            after = base + Parts(gathered=gathered, gradients=whole + reduced_bytes)
            yield from (Snapshot("reduce", after + parts) for parts in self._summed(weights, share, 0.0))
            reduced_bytes += share * 4

    @property
    def is_frozen(self) -> bool:
        """True if adapters are trained, and no other weight."""
        return self.shape.adapter is not None

    def _freeze(self, adapter: AdapterConfig) -> None:
        """Set the sizes of a run that trains adapters: frozen weights in the compute format or in fewer bits."""
        model, shards, tensor, expert = self.model, self.rank.shards, self.shape.tensor, self.shape.expert
        of = {layer: layer_of(model, adapter, layer, self.c, shards, tensor, expert) for layer in self.layers}
        self.block = {False: 0.0, True: 0.0}
        for layer, size in of.items():
            has = model.has_experts(layer)
            self.block[has] = max(self.block[has], size.gathered_frozen_bytes / self.c + size.gathered_adapters)
            self.trained[layer], self.trained_share[layer] = size.gathered_adapters, size.adapters / shards
        self.trained_elements = sum(self.trained_share.values())
        routers = sum(model.has_experts(layer) for layer in self.layers) * self.router
        kept = self.root * self.c + routers * 4 + sum(size.frozen_bytes for size in of.values())
        self.weights_bytes = kept / shards + self.trained_elements * 4
        whole = self.root + sum(size.frozen_bytes / self.c + size.adapters for size in of.values())
        self.keeps_gathered = self.is_stage or whole * tensor * self.c <= KEEP_GATHERED_BYTES

    # ---- figures -----------------------------------------------------------------------------------------------------

    def _reduced(self, weights: float, share: float, last: float) -> Iterator[Parts]:
        """Yield the copy of gradients into a buffer and their sum into this rank's share, which is cast to fp32.

        ``last``: bytes of the last gradient, which FSDP2 holds until the sum is complete.
        """
        yield Parts(gradients=weights * self.c, buffers=weights * self.rank.reduce_bytes)
        yield from self._summed(weights, share, last)

    def _summed(self, weights: float, share: float, last: float) -> Iterator[Parts]:
        """Yield the reduction itself. gloo sums in a copy, which its thread may hold a little longer."""
        size, alone = self.rank.reduce_bytes, self.rank.shards == 1
        waits = Parts() if alone else Parts(gradients=last)
        again = weights * size if self.shape.device == "cpu" and not alone else 0.0
        yield waits + Parts(buffers=weights * size + again, gradients=share * size)
        if size != 4:
            yield waits + Parts(buffers=weights * size + again + share * size, gradients=share * 4)

    def _whole(self, layer: int) -> float:
        """Return the bytes of a block's whole weights."""
        has = self.model.has_experts(layer)
        return self.block[has] * self.c + (self.router * 4 if has else 0)

    def _of_layer(self, layer: int) -> float:
        """Return the elements of a block's trained weights, including the router's."""
        return self.trained[layer] + self.router * (self.model.has_experts(layer) and not self.is_frozen)

    def _elements(self) -> float:
        """Return the number of unsharded trained weights of this rank's layers."""
        return self.root * (not self.is_frozen) + sum(map(self._of_layer, self.layers))

    def _copied(self, weights: float) -> float:
        """Return the bytes of an all-gather's buffer, which FSDP2 holds until the next one is copied out."""
        return 0.0 if self.rank.shards == 1 else weights * self.c

    def _last_copied(self, layer: int) -> float:
        """Return the bytes of the buffer of a block's last all-gather (the router's, if the block has one)."""
        return self._copied(self.router * 4 / self.c if self.model.has_experts(layer) else self.block[False])

    def _collects(self, weights: float) -> float:
        """Return the bytes of an all-gather besides its result: its buffer, and this rank's cast share."""
        share = weights / self.rank.shards * self.c if self.rank.shards > 1 and self.c != 4 else 0.0
        return self._copied(weights) + share

    def _batch(self) -> float:
        """Return the bytes of the step's int64 tokens, targets, positions and numbers of documents, and of the
        microbatch's rotary table and attention masks."""
        model, shape = self.model, self.shape
        tokens = self.rank.step_tokens / shape.sequence * 8 * (4 if shape.documents else 3)
        rope = 2 * shape.tokens * model.width_per_head * shape.compute_bytes if model.position == "rope" else 0
        windows = {model.window(layer): layer for layer in self.layers}
        masks = sum(BlockTape(model, layer, shape).attention.mask_bytes for layer in windows.values())
        return tokens + rope + masks

    def _block(self, layer: int) -> _Block:
        kind = (self.model.window(layer), self.model.has_experts(layer))
        if kind not in self._kinds:
            self._kinds[kind] = _passes(self.model, layer, self.shape, self.rank.recompute)
        return self._kinds[kind]


def _ends(model: ModelConfig, layers: range) -> set[int]:
    """Return the first and last two of each run of equal layers."""
    kinds = [(model.window(layer), model.has_experts(layer)) for layer in layers]
    ends: set[int] = set()
    start = 0
    for end in range(1, len(kinds) + 1):
        if end == len(kinds) or kinds[end] != kinds[start]:
            ends |= {layers[start], layers[min(start + 1, end - 1)], layers[max(start, end - 2)], layers[end - 1]}
            start = end
    return ends


@lru_cache(maxsize=256)
def _passes(model: ModelConfig, layer: int, shape: MicrobatchShape, recompute: bool) -> _Block:
    """Return both passes of a block; one that is recomputed saves its input and allocates the rest in backward."""
    block = BlockTape(model, layer, shape)
    frozen = shape.adapter is not None
    tape = Tape(keeps=not recompute, frozen=frozen)
    block.forward(tape)
    saved = set(tape.saved) or {"x"}
    forward, size = _parts(tape.at_most, saved), sum(tape.alive.values()) or block.row
    if recompute:
        tape = Tape(frozen=frozen)
        tape.new("g", block.row)
        block.forward(tape)
        saved = {"x"}
    else:
        tape.begin()
        tape.new("g", block.row)
    block.backward(tape)
    return _Block(size, forward, _parts(tape.at_most, saved))


def _parts(at: dict[str, float], saved: set[str]) -> Parts:
    sums = {"gradients": 0.0, "logits": 0.0, "activations": 0.0, "temporary": 0.0}
    for name, size in at.items():
        if name.startswith(("w.", "d.head")):
            part = "gradients"
        elif name.startswith("tile"):
            part = "logits"
        else:
            part = "activations" if name in saved else "temporary"
        sums[part] += size
    return Parts(**sums)


def _elements(part: Part) -> int:
    return part.rows * part.width
