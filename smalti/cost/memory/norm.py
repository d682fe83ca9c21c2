"""Memory of a norm in the forward and backward pass.

The tensors are those of torch's operators in an eager step (torch 2.13): LayerNorm is one kernel everywhere, RMSNorm
one on CUDA; on a CPU RMSNorm consists of plain operators in fp32, each with its tensor.
"""

from smalti.config.model import ModelConfig
from smalti.cost.memory.tape import MicrobatchShape, Tape


class Norms:
    """The norms of a model, on a tape."""

    def __init__(self, model: ModelConfig, shape: MicrobatchShape) -> None:
        self.c = shape.compute_bytes
        self.is_fused = shape.device == "cuda" or model.norm == "layernorm"

    def forward(self, tape: Tape, name: str, read: str, size: float) -> None:
        """Record the forward pass; ``size``: bytes of the input, in the compute format.

        A fused norm saves its input; RMSNorm on a CPU saves its input and the quotient by the root, both in fp32.
        """
        wide = size * 4 / self.c
        if self.is_fused:
            tape.new(f"{name}.out", size)
            tape.save(read)
            return
        if self.c == 2:
            tape.new(f"{name}.in32", wide)
        with tape.during(rms_square=wide):
            pass
        tape.new(f"{name}.unit", wide)
        with tape.during(rms_scaled=wide if self.c == 2 else 0):
            tape.new(f"{name}.out", size)
        tape.save(f"{name}.in32" if self.c == 2 else read)
        if not tape.frozen:  # it is the factor of the gradient of the norm's weight
            tape.save(f"{name}.unit")
        tape.drop(f"{name}.in32", f"{name}.unit")

    def backward(self, tape: Tape, name: str, size: float) -> None:
        """Record the backward pass; the gradient of the input replaces that of the output."""
        wide = size * 4 / self.c
        if self.is_fused:
            with tape.during(d_norm=size):
                pass
            return
        if self.c == 2:
            tape.new("rms.grad32", wide)
        tape.new("rms.d.unit", wide)
        with tape.during(rms_d_scale=wide):
            pass
        tape.drop("rms.grad32")
        tape.used(f"{name}.unit")
        tape.new("rms.d.in32", wide)
        with tape.during(rms_d_root=wide):
            pass
        tape.drop("rms.d.unit")
        with tape.during(rms_d_square=wide, rms_power=wide, rms_twice=wide, rms_product=wide):
            pass
        tape.used(f"{name}.in32")
        with tape.during(rms_d_in=size if self.c == 2 else 0):
            pass
        tape.drop("rms.d.in32")
