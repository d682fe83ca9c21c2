"""Activations of a block in the forward and backward pass of a microbatch, tensor by tensor.

They are the tensors of ``smalti/model`` in an eager step that grow with the tokens, in the order of allocation and
release; ``bench/plan_memory.py`` compares them with a real step on a CPU. On CUDA, norms and attention are torch's
fused kernels; savings of ``torch.compile`` are not counted. Names are those of the code; ``x1`` is the residual stream
after attention.
"""

from smalti.config.model import ModelConfig
from smalti.cost.memory.adapters import dequantized_bytes, low_rank_bytes
from smalti.cost.memory.attention import AttentionTape
from smalti.cost.memory.experts import experts, experts_backward
from smalti.cost.memory.norm import Norms
from smalti.cost.memory.tape import MicrobatchShape, Tape


class BlockTape:
    """A block on a tape: ``forward``, then ``backward``.

    The axes ``tensor`` and ``sequence`` follow Korthikanti et al. 2022 (arXiv 2205.05198, section 4: norms and the
    residual stream are split too); memory with them was not measured.
    """

    def __init__(self, model: ModelConfig, layer: int, shape: MicrobatchShape) -> None:
        self.model, self.shape, self.layer = model, shape, layer
        self.norms, self.attention = Norms(model, shape), AttentionTape(model, layer, shape)
        self.c = shape.compute_bytes
        self.row = self.attention.row
        """Bytes of a tensor like the residual stream, split over the tensor axis."""
        self.whole_row = self.attention.whole_row
        """Bytes of the same tensor as the input of a matrix."""

    def forward(self, tape: Tape) -> None:
        """Record the forward pass, from the input ``x`` to the output ``x2``, which is the next block's ``x``."""
        pre = self.model.norm_placement == "pre"
        tape.new("x", self.row)
        if self.shape.adapter is not None:
            tape.new("low", low_rank_bytes(self.model, self.shape.adapter, self.layer, self.shape))
            tape.save("low")
            tape.drop("low")
            tape.new("dequantized", dequantized_bytes(self.model, self.shape.adapter, self.layer, self.shape))
        if pre:
            self.norms.forward(tape, "norm1", "x", self.row)
        self.attention.forward(tape, "norm1.out" if pre else "x")
        if not pre:
            self.norms.forward(tape, "norm1", "o", self.row)
        tape.new("x1", self.row)
        if pre:
            self.norms.forward(tape, "norm2", "x1", self.row)
        tape.drop("norm1.out")
        self._mlp(tape, "norm2.out" if pre else "x1")
        tape.drop("o")
        if not pre:
            self.norms.forward(tape, "norm2", "down", self.row)
        tape.new("x2", self.row)
        tape.drop("down", "norm2.out", "x1", "x", "x2", "dequantized")

    def backward(self, tape: Tape) -> None:
        """Record the backward pass, from the gradient of the output, ``g``; gradients of weights (``w.`` ...) stay."""
        pre = self.model.norm_placement == "pre"
        if self.shape.adapter is not None:
            tape.new("dequantized", dequantized_bytes(self.model, self.shape.adapter, self.layer, self.shape))
        if not pre:
            tape.new("d.down", self.row)
            self.norms.backward(tape, "norm2", self.row)
            tape.used("down")
        self._mlp_backward(tape, "d.mlp")
        tape.drop("d.down")
        tape.used("norm2.out" if pre else "x1")
        if pre:
            self.norms.backward(tape, "norm2", self.row)
        tape.drop("d.mlp")
        tape.used("x1")
        if not pre:
            tape.new("d.o", self.row)
            self.norms.backward(tape, "norm1", self.row)
            tape.used("o")
        self.attention.backward(tape, "d.attention")
        tape.drop("d.o")
        tape.used("norm1.out" if pre else "x")
        if pre:
            self.norms.backward(tape, "norm1", self.row)
        tape.drop("d.attention", "dequantized")
        tape.used("x", "low")

    def embedding_norm(self) -> float:
        """Return the bytes that the norm of the embedding saves for backward."""
        tape = Tape()
        tape.new("x", self.row)
        self.norms.forward(tape, "embedding", "x", self.row)
        tape.drop("x", "embedding.out")
        return sum(tape.alive.values())

    def last_norm(self, tape: Tape) -> None:
        """Record the norm after the last block; ``last.out`` is the input of the loss."""
        tape.new("x", self.row)
        self.norms.forward(tape, "last", "x", self.row)

    def last_norm_backward(self, tape: Tape) -> None:
        """Record its backward pass, from the gradient of the loss, ``d.hidden``."""
        self.norms.backward(tape, "last", self.row)
        tape.used("x")

    def _mlp(self, tape: Tape, read: str) -> None:
        tape.save(read)
        if self.model.moe is not None and self.model.has_experts(self.layer):
            experts(tape, self.model, self.shape)
            if self.model.moe.num_shared_experts:
                self._plain(tape, self.model.moe.num_shared_experts * self.model.expert_width, "shared.")
                with tape.during(joined=self.row):
                    tape.drop("shared.down")
            return
        self._plain(tape, self.model.intermediate_size, "")

    def _plain(self, tape: Tape, width: int, name: str) -> None:
        inner = self.shape.tokens * width * self.c / self.shape.tensor
        tape.new(f"{name}up", inner)
        if self.model.gated:
            tape.new(f"{name}gate", inner)
            tape.new(f"{name}act", inner)
        tape.new(f"{name}product", inner)
        tape.new(f"{name}down", self.row)
        names = [f"{name}{part}" for part in ("up", "gate", "act", "product")]
        tape.save(*names)
        tape.drop(*names)

    def _mlp_backward(self, tape: Tape, out: str) -> None:
        if self.model.moe is None or not self.model.has_experts(self.layer):
            self._plain_backward(tape, self.model.intermediate_size, "", out)
            return
        shared = self.model.moe.num_shared_experts * self.model.expert_width
        if shared:
            self._plain_backward(tape, shared, "shared.", "d.shared")
        experts_backward(tape, self.model, self.shape)
        tape.new(out, self.whole_row)
        tape.drop("d.shared")

    def _plain_backward(self, tape: Tape, width: int, name: str, out: str) -> None:
        inner = self.shape.tokens * width * self.c / self.shape.tensor
        matrix = self.model.hidden_size * width * self.c / self.shape.tensor
        tape.new("d.product", inner)
        tape.new(f"w.{name}down", matrix)
        tape.used(f"{name}product")
        if self.model.gated:
            tape.new("d.act", inner)
            tape.new("d.up", inner)
            tape.drop("d.product")
            tape.used(f"{name}act", f"{name}up")
            tape.new("d.gate", inner)
            tape.drop("d.act")
            tape.used(f"{name}gate")
            tape.new(out, self.whole_row)
            tape.new(f"w.{name}gate", matrix)
            tape.drop("d.gate")
            with tape.during(another=self.whole_row):
                tape.new(f"w.{name}up", matrix)
            tape.drop("d.up")
            return
        tape.new("d.up", inner)
        tape.drop("d.product")
        tape.used(f"{name}up")
        tape.new(out, self.whole_row)
        tape.new(f"w.{name}up", matrix)
        tape.drop("d.up")
