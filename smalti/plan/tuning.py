"""Memory of tuning an existing model on one of several devices: full, LoRA, QLoRA, and DPO with either.

Trainable parameters, frozen weights and optimizer state are exact; activations are those of
``cost/memory/activations.py``, an upper estimate where weights are frozen. All weights are sharded evenly (FSDP,
FSDP-QLoRA). The peaks of all parts are added (a test compares with ``cost/memory/snapshots.py``). Driver, NCCL and
allocator are assumed as in ``cost/memory/per_rank.py``. Optimizer pages in host memory are not counted.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Literal, get_args

from smalti.base.errors import UserError, nearest
from smalti.config.adapter import Quantization
from smalti.config.model import ModelConfig
from smalti.config.train import LossConfig
from smalti.cost.memory.activations import BlockTape
from smalti.cost.memory.per_rank import Assumed
from smalti.cost.memory.tape import MicrobatchShape, Tape
from smalti.cost.weights import Weight, weights
from smalti.plan.serving.formats import SCHEMES, Scheme

Method = Literal["full", "lora", "qlora", "dpo", "dpo-lora"]

METHODS: tuple[str, ...] = get_args(Method)

ALL_LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""Names for ``all-linear``: every matrix of attention and of the MLPs, also of each expert (QLoRA, section 4)."""

STORED: dict[Quantization, Scheme] = {
    "nf4": Scheme(4, 64, 32, "blocks of 64 with an fp32 scale: 4.5 bits"),
    "nf4_double": Scheme(4, 64, 8 + 64 / 256, "blocks of 64, their 8-bit scales in blocks of 256: 4.129 bits"),
    "int8": Scheme(8, 64, 32, "blocks of 64 with an fp32 scale: 8.5 bits"),
}
"""Frozen matrices of QLoRA, as ``adapter.quantize`` stores them."""

RANK = 16
"""Default rank of adapters."""

STATE_BYTES = 16
"""Bytes of a trained parameter in mixed precision with Adam: fp32 master, gradient and two moments (ZeRO, Rajbhandari
et al. 2020, section 3.1, counts 16 too, with 16-bit weights and gradients beside fp32 masters)."""

LOGITS_BYTES = LossConfig().tile_bytes("cuda")
"""Assumption: bytes of logits at one time, the default of ``train.loss.chunk_bytes`` on a GPU."""


@dataclass(frozen=True)
class Tuning:
    """Options of tuning. A field that the method does not use must be absent."""

    method: Method
    seq_len: int
    microbatch: int = 1
    """Rows of one forward pass on a device; with DPO pairs, of two rows each."""
    rank: int | None = None
    targets: tuple[str, ...] = ()
    """Matrices that get an adapter; absent: ``ALL_LINEAR``."""
    recompute: bool = True
    """True if each layer saves only its input and is computed again in the backward pass."""
    quantize: Quantization | None = None
    """How QLoRA stores frozen matrices; absent: ``nf4``, as recipe ``qlora``."""

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            close = nearest(str(self.method), METHODS)
            raise UserError(
                f"method = '{self.method}' is not known",
                allowed=", ".join(METHODS),
                hint=f"did you mean {close}?" if close else None,
            )
        if not self.adapts and (self.rank is not None or self.targets):
            raise UserError(
                f"rank and targets have no effect with method '{self.method}': it has no adapters",
                allowed="lora, qlora, dpo-lora",
                hint="leave them out, or choose one of these",
            )
        if self.quantize is not None and self.method != "qlora":
            raise UserError(
                f"quantize has no effect with method '{self.method}': its frozen weights are in bf16",
                allowed="qlora",
                hint="leave it out, or choose qlora",
            )
        for name, most in (("seq_len", 10**9), ("microbatch", 10**6), ("rank", 10**6)):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or not 1 <= value <= most):
                raise UserError(f"{name} = {value} is not valid", allowed=f"a whole number from 1 to {most:,}")

    @property
    def adapts(self) -> bool:
        """True if adapters are trained and the rest is frozen."""
        return self.method in ("lora", "qlora", "dpo-lora")

    @property
    def scheme(self) -> Scheme:
        """The format of frozen matrices, and of those that are gathered."""
        return STORED[self.quantize or "nf4"] if self.method == "qlora" else SCHEMES["bf16"]

    @property
    def rows(self) -> int:
        """Rows of tokens in one forward pass."""
        return self.microbatch * (2 if self.method.startswith("dpo") else 1)


@dataclass(frozen=True)
class TuningMemory:
    """Bytes on one of ``devices``."""

    devices: int
    trainable_params: int
    """Trainable parameters of the whole model."""
    state_bytes: int
    """fp32 masters, gradients and moments of the trained parameters."""
    frozen_bytes: int
    """Base model of adapters: in bf16, or its matrices quantised and the rest in bf16."""
    reference_bytes: int
    """Reference model of DPO in bf16; 0 with adapters, whose reference is the base model."""
    gathered_bytes: int
    """Gathered weights at one time in the compute format: embedding, head and two blocks of what is sharded or cast; if
    trained, also a block of fp32 gradients that are being summed over the devices; with QLoRA the largest dequantised
    matrix."""
    activations_bytes: int
    """Tensors that one microbatch saves for the backward pass, and the peak inside a block."""
    logits_bytes: int
    """Logits at one time, in chunks."""
    reduced_bytes: int
    """Gradients of embedding and head while they are summed over the devices, in bf16 and in fp32, at the end of the
    backward pass, when the three above are freed."""

    @property
    def passing_bytes(self) -> int:
        """Temporary memory of a step: the larger of its two peaks."""
        return max(self.gathered_bytes + self.activations_bytes + self.logits_bytes, self.reduced_bytes)

    @property
    def tensors_bytes(self) -> int:
        """Permanent and temporary memory."""
        return self.state_bytes + self.frozen_bytes + self.reference_bytes + self.passing_bytes

    @property
    def reserved_bytes(self) -> int:
        """Context and communicator, as ``cost/memory/per_rank.py`` assumes."""
        assumed = Assumed()
        return round(assumed.context_bytes + assumed.communicator_bytes * (self.devices > 1))

    @property
    def fragmentation_bytes(self) -> int:
        """Fragmentation of the allocator, as assumed there."""
        return round(Assumed().fragmentation_frac * self.tensors_bytes)

    @property
    def total_bytes(self) -> int:
        """Memory that the device needs."""
        return self.tensors_bytes + self.reserved_bytes + self.fragmentation_bytes

    def to_json(self) -> dict[str, int]:
        """Return a JSON object with the parts and their sums."""
        sums = ("tensors_bytes", "reserved_bytes", "fragmentation_bytes", "total_bytes")
        return {**asdict(self), **{name: getattr(self, name) for name in sums}}


def lora_params(model: ModelConfig, rank: int, targets: Sequence[str]) -> int:
    """Return the parameters of adapters: rank x (inputs + outputs) for each matrix, each expert's too.

    Hu et al. 2021, LoRA (arXiv 2106.09685), section 4.1: W + B A, with A of rank x inputs and B of outputs x rank.
    """
    return sum(rank * (weight.rows + weight.columns) * weight.count for weight in _targeted(model, targets))


class Tuned:
    """A model and a method of tuning it; sizes are computed once for any number of devices."""

    def __init__(self, model: ModelConfig, tuning: Tuning) -> None:
        if tuning.seq_len > model.max_position_embeddings:
            raise UserError(
                f"seq_len = {tuning.seq_len} is more than the model supports",
                allowed=f"up to max_position_embeddings = {model.max_position_embeddings}",
                hint="a shorter row, or a model with a larger max_position_embeddings",
            )
        self.model, self.tuning = model, tuning
        self.rank = tuning.rank or RANK
        self.targets = check_targets(model, tuning.targets or ALL_LINEAR)
        widest = max(min(weight.rows, weight.columns) for weight in _targeted(model, self.targets))
        if tuning.rank is not None and tuning.rank > widest:
            raise UserError(
                f"rank = {self.rank} is more than any of these matrices has: {', '.join(self.targets)}",
                allowed=f"up to {widest:,}",
            )
        tensors = weights(model)
        self.params = sum(weight.params for weight in tensors)
        self.trainable = lora_params(model, self.rank, self.targets) if tuning.adapts else self.params
        self.frozen = sum(tuning.scheme.bytes_of(weight) for weight in tensors) if tuning.adapts else 0
        self.reference = 2 * self.params if tuning.method == "dpo" else 0
        self._largest = max(
            (weight.params for weight in tensors if weight.kind in ("attention", "mlp", "expert")), default=0
        )
        self._block = max(_by_layer(model, tensors, SCHEMES["bf16"])) // 2
        self._whole = _whole_bytes(model, tensors, tuning.scheme)
        self._root = sum(weight.params for weight in tensors if weight.layer is None)
        self._activations, self._logits = self._of_a_step()

    def on(self, devices: int) -> TuningMemory:
        """Return the memory on one of ``devices``."""
        tuning = self.tuning
        cast = not tuning.adapts  # fp32 masters are cast to bf16 when gathered, on one device too
        gathered = (self._whole if devices > 1 or cast else 0) + (4 * self._block if cast else 0)
        return TuningMemory(
            devices=devices,
            trainable_params=self.trainable,
            state_bytes=-(-STATE_BYTES * self.trainable // devices),
            frozen_bytes=-(-self.frozen // devices),
            reference_bytes=-(-self.reference // devices),
            gathered_bytes=gathered + (2 * self._largest if tuning.method == "qlora" else 0),
            activations_bytes=self._activations,
            logits_bytes=self._logits,
            reduced_bytes=0 if tuning.adapts else (2 + 4) * self._root,
        )

    def fewest(self, memory_bytes: float, most: int | None = None) -> TuningMemory | None:
        """Return the memory on the fewest devices that fit, up to ``most``; None if no number fits, because some memory
        is not sharded."""
        on_one, on_two = self.on(1), self.on(2)
        if on_one.total_bytes <= memory_bytes:
            return on_one
        left = (memory_bytes - on_two.reserved_bytes) / (1 + Assumed().fragmentation_frac) - on_two.passing_bytes
        parts = (STATE_BYTES * self.trainable, self.frozen, self.reference)
        if left <= len(parts) + 1:
            return None
        devices = max(2, math.ceil(sum(parts) / left))
        while self.on(devices).total_bytes > memory_bytes:  # rounding up of each part
            devices += 1
        return self.on(devices) if most is None or devices <= most else None

    def _of_a_step(self) -> tuple[int, int]:
        model, tuning = self.model, self.tuning
        tokens = tuning.rows * tuning.seq_len
        activations = _activation_bytes(model, tuning, trains_matrices=not tuning.adapts)
        if tuning.adapts:
            ranks = [0] * model.num_hidden_layers
            for weight in _targeted(model, self.targets):
                chosen = model.moe.num_experts_per_tok if weight.kind == "expert" and model.moe else 1
                ranks[weight.layer or 0] += self.rank * chosen
            activations += 2 * tokens * (max(ranks) if tuning.recompute else sum(ranks))
        return activations, min(LOGITS_BYTES, 10 * tokens * model.vocab_size)


def _activation_bytes(model: ModelConfig, tuning: Tuning, *, trains_matrices: bool) -> int:
    """Return the bytes that all blocks save plus the peak inside one, on a GPU in bf16.

    With recomputation each block saves only its input. Gradients of matrices count in the peak if they are trained.
    """
    shape = MicrobatchShape(tuning.rows, tuning.seq_len, compute_bytes=2, device="cuda")
    kinds: dict[tuple[int | None, bool], tuple[float, float]] = {}
    saved = peak = 0.0
    for layer in range(model.num_hidden_layers):
        kind = (model.window(layer), model.has_experts(layer))
        if kind not in kinds:
            block, tape = BlockTape(model, layer, shape), Tape()
            block.forward(tape)
            size = sum(tape.alive.values())
            if not tuning.recompute:
                tape.begin()
            tape.new("g", block.row)
            block.backward(tape)
            gradients = 0.0 if trains_matrices else sum(
                size for name, size in tape.at_most.items() if name.startswith("w.")
            )  # fmt: skip
            kinds[kind] = (block.row if tuning.recompute else size, tape.most_bytes - gradients)
        saved += kinds[kind][0]
        peak = max(peak, kinds[kind][1] - kinds[kind][0])
    return math.ceil(saved + peak)


def check_targets(model: ModelConfig, targets: Sequence[str]) -> tuple[str, ...]:
    """Return the names of the matrices, each once. Raises UserError for one that the model does not have."""
    available = [name for name in ALL_LINEAR if model.gated or name != "gate_proj"]
    selected: list[str] = []
    for name in targets:
        names = available if name == "all-linear" else [name]
        if not set(names) <= set(available) and tuple(targets) != ALL_LINEAR:
            close = nearest(name, available)
            raise UserError(
                f"targets = '{name}' is not a matrix of this model",
                allowed=", ".join(("all-linear", *available)),
                hint=f"did you mean {close}?" if close else None,
            )
        selected += [each for each in names if each in available and each not in selected]
    return tuple(selected)


def _targeted(model: ModelConfig, targets: Sequence[str]) -> list[Weight]:
    return [
        weight for weight in weights(model) if weight.name in targets and weight.kind in ("attention", "mlp", "expert")
    ]


def _whole_bytes(model: ModelConfig, tensors: list[Weight], scheme: Scheme) -> int:
    """Return the bytes of embedding, head and the two largest blocks, as they are gathered."""
    outer = sum(scheme.bytes_of(weight) for weight in tensors if weight.layer is None)
    return outer + sum(sorted(_by_layer(model, tensors, scheme))[-2:])


def _by_layer(model: ModelConfig, tensors: list[Weight], scheme: Scheme) -> list[int]:
    layers = [0] * model.num_hidden_layers
    for weight in tensors:
        if weight.layer is not None:
            layers[weight.layer] += scheme.bytes_of(weight)
    return layers
