"""The moments of a training step and what one rank holds in each: the peak is the largest.

Promises: what ``smalti/train/step.py`` does under FSDP2, in its order: weights are gathered block after block, each
block keeps what its backward pass needs, the loss forms its tiles, and on the way back each block's gradients are made
in the compute format, laid into one buffer and reduced to a shard. A moment is told as parts that add up. Says nothing
of what an allocator loses (``plan/memory/rank.py`` adds that), and lets no two streams overlap.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from smalti.config.model import ModelConfig
from smalti.plan.memory.activations import BlockTape
from smalti.plan.memory.head import Head
from smalti.plan.memory.tape import Pass, Tape
from smalti.plan.params import count
from smalti.plan.units import KEEP_GATHERED_BYTES, Part, units


@dataclass(frozen=True)
class Parts:
    """Bytes that are alive at one time."""

    weights: float = 0
    """Master weights, this rank's share."""
    gradients: float = 0
    """Reduced gradients, this rank's share, and those in the compute format that wait to be reduced."""
    moments: float = 0
    """Of the optimizer, this rank's share."""
    gathered: float = 0
    """Whole weights in the compute format; a router's in fp32."""
    buffers: float = 0
    """What a collective reads and writes; alone on a mesh of one rank, the same copies without a collective."""
    activations: float = 0
    """Kept for the backward pass."""
    logits: float = 0
    """A tile of logits and what is made of it."""
    temporary: float = 0
    """What one operator after another takes and gives back."""
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
class Moment:
    """A phase (``forward``, ``loss``, ``backward``, ``reduce``, ``optimizer``) and what is alive in it."""

    phase: str
    parts: Parts


@dataclass(frozen=True)
class Rank:
    """What a rank holds of the model and how it steps, beside the shape of a microbatch."""

    shards: int = 1
    """Ranks that share weights, gradients and moments."""
    reduce_bytes: int = 4
    """Of a gradient that is being reduced."""
    moments: int = 2
    """Of the optimizer, in fp32."""
    makes_updates: bool = False
    """The optimizer makes the updates of all its weights before it applies them (Lion)."""
    recompute: bool = False
    """Blocks keep only their input and run again in the backward pass."""
    microbatches: int = 1
    """Of a step; from the second on the gradients of the first are there."""
    in_flight: int = 1
    """Microbatches whose activations are held at one time, on a pipeline."""
    layers: range | None = None
    """Blocks of this rank's pipeline stage; None: all."""
    chunk_bytes: int = 2**28
    """``train.loss.chunk_bytes``."""
    step_tokens: float = 0
    """Of this rank in one step."""


def moments(model: ModelConfig, shape: Pass, rank: Rank) -> list[Moment]:
    """The fullest moments of one step, in its order."""
    return list(_Step(model, shape, rank).run())


def kept_bytes(model: ModelConfig, shape: Pass, *, recompute: bool) -> float:
    """What all blocks keep of one microbatch; where they run again, their inputs and the fullest block."""
    step = _Step(model, shape, Rank(recompute=recompute))
    kept = sum(step._block(layer).kept for layer in step.layers)
    if recompute:
        whole = _Step(model, shape, Rank())
        kept += max(whole._block(layer).kept for layer in whole.layers)
    return kept


@dataclass(frozen=True)
class _Block:
    """A block in figures: what it keeps, and what it holds at its fullest on the way forward and back."""

    kept: float
    forward: Parts
    backward: Parts


class _Step:
    def __init__(self, model: ModelConfig, shape: Pass, rank: Rank) -> None:
        self.model, self.shape, self.rank, self.c = model, shape, rank, shape.compute_bytes
        self.layers = rank.layers if rank.layers is not None else range(model.num_hidden_layers)
        self.is_first, self.is_last = 0 in self.layers, model.num_hidden_layers - 1 in self.layers
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
        self.own = self.root / rank.shards + sum(self.share[model.has_experts(layer)] for layer in self.layers)
        # dist/fsdp.py asks before anything is sharded
        small = count(model).total * self.c <= KEEP_GATHERED_BYTES
        self.keeps_gathered = small or rank.layers is not None  # a pipeline stage gathers once a step, and keeps
        self._kinds: dict[tuple[int | None, bool], _Block] = {}

    def run(self) -> Iterator[Moment]:
        """Forward, loss, backward with reductions, and the update."""
        rank, own = self.rank, self.own * 4
        base = Parts(weights=own, moments=own * rank.moments, batch=self._batch())
        steady = base
        if self.is_first and self.model.embedding_norm:
            base = base + Parts(activations=BlockTape(self.model, 0, self.shape).embedding_norm() * rank.in_flight)
        full = Parts(gradients=own)
        later = full if rank.microbatches > 1 else Parts()
        yield from self._forward(base + later)
        kept = sum(self._block(layer).kept for layer in self.layers)
        gathered = self.root * self.c + sum(map(self._whole, self.layers)) * self.keeps_gathered
        start = base + later + Parts(gathered=gathered)
        waiting = 0.0
        if self.is_last:
            yield from self._loss(start + Parts(activations=kept * rank.in_flight))
            waiting = self.table * self.c
        yield from self._backward(base + later, kept * rank.in_flight, waiting)
        yield Moment("optimizer", steady + full + Parts(temporary=own if rank.makes_updates else 0))

    def _forward(self, base: Parts) -> Iterator[Moment]:
        gathered, kept, before = self.root * self.c, 0.0, self._copied(self.root)
        for layer in self.layers:
            weights, block = self.block[self.model.has_experts(layer)], self._block(layer)
            gathered = (gathered if self.keeps_gathered else self.root * self.c) + self._whole(layer)
            collects = Parts(gathered=gathered, activations=kept, buffers=before + self._copied(weights))
            yield Moment("forward", base + collects)
            before = self._last_copied(layer)
            yield Moment("forward", base + block.forward + Parts(gathered=gathered, activations=kept, buffers=before))
            kept += block.kept * self.rank.in_flight

    def _loss(self, base: Parts) -> Iterator[Moment]:
        """The last norm, the tiles of the loss, and the way back through the norm."""
        tape, block = Tape(), BlockTape(self.model, 0, self.shape)
        block.last_norm(tape)
        Head(
            self.shape.tokens, self.model.hidden_size, self.model.vocab_size / self.shape.tensor, self.c,
            bool(self.model.final_logit_softcapping), self.rank.chunk_bytes,
        ).forward(tape)  # fmt: skip
        copied = Parts(buffers=self._last_copied(self.layers[-1]))
        yield Moment("loss", base + copied + _parts(tape.at_most, tape.saved))
        tape.drop("x", "last.out")
        kept = set(tape.saved)
        tape.begin()
        block.last_norm_backward(tape)
        yield Moment("backward", base + _parts(tape.at_most, kept))

    def _backward(self, base: Parts, kept: float, waiting: float) -> Iterator[Moment]:
        """Block after block from the last; each is reduced when its gradients are there. ``waiting``: gradients of
        embedding and head, reduced at the end."""
        rank, c, row = self.rank, self.c, Parts(temporary=self.row)
        gathered = self.root * c + sum(map(self._whole, self.layers)) * self.keeps_gathered
        own, pending = 0.0, 0.0
        for layer in reversed(self.layers):
            block, weights = self._block(layer), self.block[self.model.has_experts(layer)]
            kept -= block.kept
            passing = gathered if self.keeps_gathered else self.root * c + self._whole(layer)
            ahead = 0.0 if self.keeps_gathered or layer == self.layers[0] else self._collects(weights)
            held = Parts(gathered=passing, gradients=waiting + own, activations=kept, buffers=pending + ahead)
            yield Moment("backward", base + block.backward + held)
            gathered -= self._whole(layer) if self.keeps_gathered else 0.0
            still = base + row + Parts(gathered=gathered, activations=kept, gradients=waiting + own)
            share, last = self.share[self.model.has_experts(layer)], self.last_of[self.model.has_experts(layer)]
            yield from (Moment("reduce", still + parts) for parts in self._reduced(weights, share, last))
            pending = weights * rank.reduce_bytes
            own += 0.0 if rank.microbatches > 1 else share * 4
        if self.is_first:
            tied = self.model.tie_word_embeddings and self.is_last  # both gradients of the table, and their sum
            made = Parts(gradients=waiting + own + self.table * c * (1 + tied), gathered=gathered, buffers=pending)
            yield Moment("backward", base + row + made)
        reduced = base + Parts(gradients=own)
        last = 0.0 if self.model.tie_word_embeddings else self.table * c
        yield from (
            Moment("reduce", reduced + parts) for parts in self._reduced(self.root, self.root / rank.shards, last)
        )

    # ---- figures -----------------------------------------------------------------------------------------------------

    def _reduced(self, weights: float, share: float, last: float) -> Iterator[Parts]:
        """Gradients are laid into a buffer and summed into this rank's share, which is cast where that is not fp32.

        ``last``: bytes of the last gradient, which FSDP2 holds until the sum is there. gloo sums in a copy, which its
        thread may hold a little longer.
        """
        size, alone = self.rank.reduce_bytes, self.rank.shards == 1
        waits = Parts() if alone else Parts(gradients=last)
        yield Parts(gradients=weights * self.c, buffers=weights * size)
        again = weights * size if self.shape.device == "cpu" and not alone else 0.0
        yield waits + Parts(buffers=weights * size + again, gradients=share * size)
        if size != 4:
            yield waits + Parts(buffers=weights * size + again + share * size, gradients=share * 4)

    def _whole(self, layer: int) -> float:
        """Bytes of a block's whole weights."""
        has = self.model.has_experts(layer)
        return self.block[has] * self.c + (self.router * 4 if has else 0)

    def _copied(self, weights: float) -> float:
        """The buffer that an all-gather filled; FSDP2 holds it until the next one is copied out."""
        return 0.0 if self.rank.shards == 1 else weights * self.c

    def _last_copied(self, layer: int) -> float:
        """That of the last all-gather of a block: its router's, where it has one."""
        return self._copied(self.router * 4 / self.c if self.model.has_experts(layer) else self.block[False])

    def _collects(self, weights: float) -> float:
        """What an all-gather holds beside its result: the buffer that it fills, and this rank's cast share."""
        share = weights / self.rank.shards * self.c if self.rank.shards > 1 and self.c != 4 else 0.0
        return self._copied(weights) + share

    def _batch(self) -> float:
        """int64 tokens, targets, positions and numbers of documents of the step; the rotary table of the microbatch,
        and the masks of attention."""
        model, shape = self.model, self.shape
        tokens = self.rank.step_tokens / shape.sequence * 8 * (4 if shape.documents else 3)
        rope = 2 * shape.tokens * model.width_per_head * shape.compute_bytes if model.position == "rope" else 0
        windows = {model.window(layer): layer for layer in self.layers}
        masks = sum(BlockTape(model, layer, shape).attention.mask_bytes for layer in windows.values())
        return tokens + rope + masks

    def _block(self, layer: int) -> _Block:
        kind = (self.model.window(layer), self.model.has_experts(layer))
        if kind not in self._kinds:
            self._kinds[kind] = _passes(BlockTape(self.model, layer, self.shape), recompute=self.rank.recompute)
        return self._kinds[kind]


def _passes(block: BlockTape, *, recompute: bool) -> _Block:
    """Both passes of a block. One that runs again keeps its input, and builds up the rest in the backward pass."""
    tape = Tape(keeps=not recompute)
    block.forward(tape)
    kept = set(tape.saved) or {"x"}
    forward, size = _parts(tape.at_most, kept), sum(tape.alive.values()) or block.row
    if recompute:
        tape = Tape()
        tape.new("g", block.row)
        block.forward(tape)
        kept = {"x"}
    else:
        tape.begin()
        tape.new("g", block.row)
    block.backward(tape)
    return _Block(size, forward, _parts(tape.at_most, kept))


def _parts(at: dict[str, float], kept: set[str]) -> Parts:
    found = Parts()
    for name, size in at.items():
        if name.startswith(("w.", "d.head")):
            found = replace(found, gradients=found.gradients + size)
        elif name.startswith("tile"):
            found = replace(found, logits=found.logits + size)
        elif name in kept:
            found = replace(found, activations=found.activations + size)
        else:
            found = replace(found, temporary=found.temporary + size)
    return found


def _elements(part: Part) -> int:
    return part.rows * part.width
