"""The collectives of one training step on one rank, as data: operation, axis, number of calls, bytes.

For replicate and shard they are those of a real step, padding included (``tests/cost/test_collectives.py``); for the
other axes they follow the published algorithms named below, of which only those of experts were counted in a traced
step. Times are in ``cost/layout/network.py``.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from smalti.config.parallel import Context, DispatchMode
from smalti.config.run import RunConfig
from smalti.cost.axes import Layout, layout_of
from smalti.cost.batch import rows_per_rank, split, usual_microbatch
from smalti.cost.memory.head import Head, resolved_tile_bytes
from smalti.cost.units import FORMAT_BYTES, Unit, keeps_gathered, units

Op = Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all", "send_recv"]
Axis = Literal["replicate", "shard", "sequence", "tensor", "pipeline", "expert", "expert_shard", "world"]
When = Literal["forward", "backward", "step"]

VOTES = 4
"""Values that ranks vote on in each step (``train/loop.py``)."""


@dataclass(frozen=True)
class Collective:
    """Calls of one kind in one step on one rank."""

    op: Op
    """Name of the collective in torch."""
    axis: Axis
    """Along which ranks: see ``group``."""
    count: int
    """Calls in a step."""
    bytes: int
    """Bytes of the larger buffer of one call, as in NCCL's tests: output of a gather, input of a reduction."""
    when: When
    """Phase of the step."""
    overlaps: bool
    """True if it can run while the rank computes; otherwise the rank waits."""
    what: str
    """The data that is sent."""

    @property
    def total_bytes(self) -> int:
        """Bytes of all calls in a step."""
        return self.count * self.bytes


@dataclass(frozen=True)
class Group:
    """Ranks of one axis: ``size`` of them, ``stride`` ranks apart."""

    size: int
    stride: int


def group(layout: Layout, axis: Axis) -> Group:
    """Return the ranks of a group along an axis. Numbered from the innermost: tensor, sequence, shard, replicate,
    pipeline.

    ``shard`` is shard x sequence, the ranks that weights are spread over; an expert axis is the inner part of it and
    ``expert_shard`` the rest.
    """
    tensor, shards = layout.tensor, layout.weight_shards
    match axis:
        case "tensor":
            return Group(tensor, 1)
        case "sequence":
            return Group(layout.sequence, tensor)
        case "expert":
            return Group(layout.expert, tensor)
        case "expert_shard":
            return Group(shards // layout.expert, tensor * layout.expert)
        case "shard":
            return Group(shards, tensor)
        case "replicate":
            return Group(layout.replicate, tensor * shards)
        case "pipeline":
            return Group(layout.pipeline, tensor * shards * layout.replicate)
        case "world":
            return Group(layout.world_size, 1)


@dataclass(frozen=True)
class Cut:
    """The split of a global batch for one rank."""

    tokens: int
    """Tokens of a rank in one forward pass, on average: rows x seq_len / sequence ranks."""
    microbatches: int
    """Microbatches per rank and step; the last rank may have fewer."""
    seq_len: int
    """Tokens of a row."""
    rows: int
    """Most rows in one forward pass, of the ranks of a sequence axis together."""


def cut(
    config: RunConfig, layout: Layout, microbatch_tokens: int | None = None, *, batch: tuple[int, int] | None = None
) -> Cut:
    """Split a batch (tokens, seq_len), by default the last of the run.

    ``microbatch_tokens``: of whole rows; None: the config's.
    """
    tokens, seq_len = batch or config.batches_and_lengths[-1]
    microbatch_tokens = microbatch_tokens or usual_microbatch(config, layout.data_ranks)
    rows = rows_per_rank(tokens, seq_len, layout.data_ranks, microbatch_tokens)
    each = split(rows.per_rank * seq_len, layout.sequence * rows.passes)
    return Cut(each, rows.passes, seq_len, rows.per_microbatch)


def collectives(
    config: RunConfig,
    layout: Layout | None = None,
    microbatch_tokens: int | None = None,
    *,
    dispatch: DispatchMode = "exact",
    context: Context = "ulysses",
    batch: tuple[int, int] | None = None,
    device: str | None = None,
) -> list[Collective]:
    """Return the collectives of one step, except those of a group of one rank.

    dispatch: tokens are sent to their experts in buffers of their size (``exact``; bytes for evenly used experts) or of
    the worst case (``static``). context: algorithm of a sequence axis. batch: as for ``cut``. device: ``cpu``, or any
    GPU; None: the config's, and for auto the CPU.
    """
    config = config.on(device or ("cuda" if config.train.parallel.device == "cuda" else "cpu"))
    layout = layout or layout_of(config)
    plan = _Plan(config, layout, cut(config, layout, microbatch_tokens, batch=batch), dispatch, context)
    return [collective for collective in plan.all() if group(layout, collective.axis).size > 1]


def metric_bytes(config: RunConfig) -> int:
    """Return the bytes of the one reduction of a step, in fp64: squared norm, loss, weight, and the loss's sums."""
    model, numbers = config.model, 4 + bool(config.train.loss.z_loss_coef)
    if model.moe is not None:
        layers = sum(model.has_experts(layer) for layer in range(model.num_hidden_layers))
        numbers += layers * (model.moe.num_experts + 1) + 2 + bool(model.moe.global_balance_loss_coef)
    return 8 * numbers


@dataclass(frozen=True)
class _Plan:
    """The collectives of one step, by kind."""

    config: RunConfig
    layout: Layout
    cut: Cut
    dispatch: DispatchMode
    context: Context

    @property
    def compute(self) -> int:
        return FORMAT_BYTES[self.config.train.precision.compute]

    @property
    def layers(self) -> int:
        """Layers of one pipeline stage."""
        return -(-self.config.model.num_hidden_layers // self.layout.pipeline)

    @property
    def recomputes(self) -> bool:
        return self.config.train.parallel.activation_checkpointing == "full"

    def all(self) -> Iterator[Collective]:
        for unit in units(self.config.model):
            yield from self.sharded(unit)
        yield from self.tensor()
        yield from self.sequence()
        yield from self.expert()
        yield from self.pipeline()
        yield Collective("all_reduce", "world", 1, metric_bytes(self.config), "step", False, "gradient norm, metrics")
        yield Collective("all_reduce", "world", 1, VOTES * 4, "step", True, "votes, between CPUs")

    # ---- weights and gradients: FSDP2 and HSDP ----------------------------------------------------------------------

    def sharded(self, unit: Unit) -> Iterator[Collective]:
        """Yield FSDP's: gather before forward and before backward, then reduce-scatter (Zhao et al. 2023, arXiv
        2304.11277).

        They are per microbatch; in a pipeline once a step, because its stages keep weights and accumulate gradients.
        """
        layout, expert = self.layout, self.layout.expert > 1 and unit.name == "expert block"
        shards, tensor = layout.weight_shards, layout.tensor
        if layout.pipeline > 1 and unit.name == "root":  # the first stage has the embedding, the last the head
            unit = Unit("root", 1, (max(unit.parts, key=lambda part: part.rows * part.width),))
        dense = unit.elements(shards, tensor=tensor, experts=False if expert else None)
        yield from self._gathers(unit, "shard", shards, dense)
        if expert:
            expert_elements = unit.elements(1, tensor=tensor, experts=True) // layout.expert
            yield from self._gathers(unit, "expert_shard", shards // layout.expert, expert_elements)

    def _gathers(self, unit: Unit, axis: Axis, shards: int, elements: int) -> Iterator[Collective]:
        precision, in_full = self.config.train.precision, unit.full_precision
        gathered = elements * (4 if in_full else self.compute)
        reduced = elements * (4 if in_full else FORMAT_BYTES[precision.reduce])
        count = -(-unit.count // self.layout.pipeline) * (1 if self.layout.pipeline > 1 else self.cut.microbatches)
        name = f"{unit.name}: {'experts' if axis == 'expert_shard' else 'weights'}"
        yield Collective("all_gather", axis, count, gathered, "forward", True, name)
        if self.regathers and not in_full:
            yield Collective("all_gather", axis, count, gathered, "backward", True, name)
        yield Collective("reduce_scatter", axis, count, reduced, "backward", True, f"{name}' gradients")
        yield Collective("all_reduce", "replicate", count, reduced // shards, "backward", True, f"{name}' gradients")

    @cached_property
    def regathers(self) -> bool:
        """True if weights are gathered again for the backward pass."""
        return not keeps_gathered(self.config.model, self.compute, stage=self.layout.pipeline > 1)

    # ---- activations ------------------------------------------------------------------------------------------------

    def _repeated(
        self, op: Op, axis: Axis, count: int, nbytes: int, what: str, *, overlaps: bool
    ) -> Iterator[Collective]:
        """Yield a collective in forward, in backward, and in the forward that full recomputation repeats."""
        yield Collective(op, axis, count, nbytes, "forward", overlaps, what)
        yield Collective(op, axis, count * (2 if self.recomputes else 1), nbytes, "backward", overlaps, what)

    def tensor(self) -> Iterator[Collective]:
        """Yield those of tensor parallelism (Korthikanti et al. 2022, arXiv 2205.05198, fig. 5).

        Norms are computed on slices of the row; attention, MLP, embedding and head gather their input and
        reduce-scatter their output; the vocabulary of the loss is split. Gradients of parameters that are not split are
        summed once a step (``distributed/parallel/tensor.py``). Bytes of the loss are those where the head reads all
        tokens, as on a GPU: on a CPU it leaves out those outside the loss.
        """
        model, times = self.config.model, self.cut.microbatches
        row = self.cut.tokens * model.hidden_size * self.compute
        calls, again = 2 * self.layers * times, self.recomputes
        not_again = calls // 2 if again and model.norm_placement == "pre" else 0  # the last collective of a block
        yield from self._repeated("all_gather", "tensor", calls, row, "block: activations", overlaps=False)
        back = calls * (1 + again) - not_again
        yield Collective("reduce_scatter", "tensor", calls, row, "forward", False, "block: activations")
        yield Collective("reduce_scatter", "tensor", back, row, "backward", False, "block: activations")
        yield Collective("all_gather", "tensor", times, row, "forward", False, "head: activations")
        yield Collective("reduce_scatter", "tensor", times, row, "backward", False, "head: activations")
        yield Collective("reduce_scatter", "tensor", times, row, "forward", False, "embedding: activations")
        yield Collective("all_gather", "tensor", times, row, "backward", False, "embedding: activations")
        yield from self._split_loss()
        if model.qk_norm == "full":  # a mean over the heads of all ranks, for query and key
            yield from self._repeated("all_reduce", "tensor", calls, self.cut.tokens * 4, "qk_norm", overlaps=False)
        whole = sum(
            -(-unit.count // self.layout.pipeline) * -(-part.rows // self.layout.weight_shards) * part.width
            for unit in units(model)
            for part in unit.parts
            if part.tensor == "none"
        )
        yield Collective("all_reduce", "tensor", 1, 4 * whole, "step", False, "gradients of norms, biases, routers")

    def _split_loss(self) -> Iterator[Collective]:
        """Yield the gathers of each rank's log-partition and target logit, tile by tile (``Head.cut``)."""
        model, ranks = self.config.model, self.layout.tensor
        if model.num_labels:  # every rank has the scores
            return
        loss, soft_cap = self.config.train.loss, model.final_logit_softcapping is not None
        head = Head(self.cut.tokens, model.hidden_size, model.vocab_size // ranks, self.compute, soft_cap,
                    resolved_tile_bytes(loss))  # fmt: skip
        tokens = int(head.cut()[0])
        for count, of_tile in ((self.cut.tokens // tokens, tokens), (1, self.cut.tokens % tokens)):
            if count and of_tile:
                times = count * self.cut.microbatches
                yield Collective("all_gather", "tensor", times, ranks * of_tile * 8, "forward", False, "loss: sums")

    def sequence(self) -> Iterator[Collective]:
        """Yield those of a sequence axis; routers' counts are those of whole rows.

        Ulysses (Jacobs et al. 2023, arXiv 2309.14509): all-to-all between slices of a row and heads, before and after
        attention. Ring (Liu et al. 2023, arXiv 2310.01889): keys and values are passed on, and their gradients in fp32,
        as often as the window of a layer needs.
        """
        model, ranks, times = self.config.model, self.layout.sequence, self.cut.microbatches
        width = self.cut.tokens * model.width_per_head
        heads, kv = -(-model.num_attention_heads // self.layout.tensor), -(-model.kv_heads // self.layout.tensor)
        calls = self.layers * times
        yield from self._of_rows()
        if self.context == "ulysses":
            into = width * (heads + 2 * max(kv, ranks)) * self.compute
            yield from self._repeated("all_to_all", "sequence", calls, into, "query, key, value", overlaps=False)
            out = width * heads * self.compute
            yield from self._repeated("all_to_all", "sequence", calls, out, "attention's output", overlaps=False)
            return
        pair = 2 * width * kv
        windows = [model.window(layer) for layer in range(model.num_hidden_layers)]
        turns = sum(len(ring_turns(self.cut.seq_len, ranks, window)) for window in windows)
        hops = -(-turns // self.layout.pipeline) * times
        yield from self._repeated("send_recv", "sequence", hops, pair * self.compute, "key, value", overlaps=True)
        yield Collective("send_recv", "sequence", hops, pair * 4, "backward", True, "gradients of key, value")

    def _of_rows(self) -> Iterator[Collective]:
        """Yield sums over the tokens of a row and the maximum over a batch."""
        model, times, ranks = self.config.model, self.cut.microbatches, self.layout.sequence
        if model.moe is not None:
            layers = sum(model.has_experts(layer) for layer in range(model.num_hidden_layers))
            rows = max(1, self.cut.tokens * ranks // self.cut.seq_len)
            calls, nbytes = -(-layers // self.layout.pipeline) * times, rows * (model.moe.num_experts + 1) * 4
            what = "tokens of each row by expert"
            yield Collective("all_reduce", "sequence", calls, nbytes, "forward", False, what)
            if self.recomputes:
                yield Collective("all_reduce", "sequence", calls, nbytes, "backward", False, what)
        if model.rope_scaling is not None and model.rope_scaling.rope_type in ("dynamic", "longrope"):
            yield Collective("all_reduce", "sequence", times, 8, "forward", False, "longest position")

    def expert(self) -> Iterator[Collective]:
        """Yield the exchange of tokens with their experts (Lepikhin et al. 2020, arXiv 2006.16668), counts first.

        Each token is sent once per chosen expert; static buffers have the size that the fullest rank could need.
        """
        moe, ranks, times = self.config.model.moe, self.layout.expert, self.cut.microbatches
        if moe is None:
            return
        kinds = [unit for unit in units(self.config.model) if unit.name == "expert block"]
        calls = -(-kinds[0].count // self.layout.pipeline) * times
        chosen = moe.num_experts_per_tok
        slots = chosen if self.dispatch == "exact" else ranks * min(chosen, -(-moe.num_experts // ranks))
        rows = self.cut.tokens * slots * self.config.model.hidden_size * self.compute
        for when in ("forward", "backward") if self.recomputes else ("forward",):
            yield Collective("all_to_all", "expert", calls, 8 * moe.num_experts, when, False, "counts of tokens")
        yield from self._repeated("all_to_all", "expert", calls, rows, "dispatch", overlaps=False)
        yield from self._repeated("all_to_all", "expert", calls, rows, "combine", overlaps=False)

    def pipeline(self) -> Iterator[Collective]:
        """Yield 1F1B's: each microbatch's activations and their gradients (Narayanan et al. 2021, arXiv 2104.04473)."""
        row = self.cut.tokens * self.config.model.hidden_size * self.compute // self.layout.tensor
        for when in ("forward", "backward"):
            yield Collective(
                "send_recv", "pipeline", self.cut.microbatches, row, when, True, "activations between stages"
            )


def ring_turns(seq_len: int, ranks: int, window: int | None) -> list[int]:
    """Return the turns s >= 1 of a ring in which a rank attends to chunks of the rank s places before it.

    Of 2 ``ranks`` chunks of a row, rank r holds the r-th and the r-th from the end. Without a window it is every turn.
    """
    chunk = seq_len // (2 * ranks)

    def held(place: int) -> tuple[int, int]:
        return place, 2 * ranks - 1 - place

    def sees(query: int, key: int) -> bool:
        return key <= query and (window is None or key == query or (query - key - 1) * chunk + 1 < window)

    return [
        turn
        for turn in range(1, ranks)
        if any(
            sees(query, key) for place in range(ranks) for query in held(place) for key in held((place - turn) % ranks)
        )
    ]
