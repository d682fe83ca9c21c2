"""Memory of a layer of experts in the forward and backward pass: ``smalti/model/blocks/moe``, tensor by tensor.

Counted are sorted rows, gate, up and output of each slot (a token at one of its experts), the router in fp32, and
indices in int64. Routing is dropless, so the sizes do not depend on the load if one rank holds all experts; with an
axis ``expert`` the load is assumed to be even.
"""

from smalti.config.model import ModelConfig
from smalti.cost.memory.tape import MicrobatchShape, Tape

_CPU_ROWS, _CPU_ROWS_AT_LEAST = 32, 128


def row_multiple(slots: float, experts: int, device: str, compute_bytes: int) -> int:
    """Return the number to a multiple of which the rows of each expert are padded; 1: not at all.

    In bf16 on a CPU, oneDNN compiles a kernel for each new number of rows, which takes 0.5 ms and 0.9 MB, and keeps the
    last 1,024. Where experts have few rows on average there are few such numbers, and padding would cost more.
    """
    return _CPU_ROWS if device == "cpu" and compute_bytes == 2 and slots >= _CPU_ROWS_AT_LEAST * experts else 1


def experts(tape: Tape, model: ModelConfig, shape: MicrobatchShape) -> None:
    """Record the forward pass, from the norm's output to ``down``.

    With an axis ``expert`` (``smalti/distributed/parallel/dispatch.py``, exact) the received and the returned rows are
    saved instead of the experts' output. ``torch.compile`` saves the sorted rows and the product of gate and up too,
    which eager code recomputes: measured on an H100 (docs/concepts/train/benchmarks-gpu.md). With an axis ``expert`` it
    does not, because ``Dispatch.forward`` is not compiled (``torch.compiler.disable``).
    """
    moe, n, c = model.moe, shape.tokens, shape.compute_bytes
    assert moe is not None
    k, e, hidden = moe.num_experts_per_tok, moe.num_experts, model.hidden_size
    slots, spread = _slots(model, shape), shape.expert > 1
    inner, rows = slots * model.expert_width * c / shape.tensor, slots * hidden * c
    with tape.during(read32=n * hidden * 4 if c == 2 else 0):
        tape.new("router.logits", n * e * 4)
    tape.new("router.score", n * e * 4)
    tape.new("router.choice", n * k * 8)
    tape.new("router.weight", n * k * 4 * 2)
    tape.new("slots", slots * 8 * (4 if spread else 2))
    if spread:
        with tape.during(sent=rows):
            tape.new("arrived", rows)
    tape.new("rows", rows)
    tape.new("up", inner)
    if model.gated:
        tape.new("gate", inner)
        if tape.frozen:
            tape.new("act", inner)
    tape.new("product", inner)
    tape.new("y", rows)
    tape.save("up", "gate", "slots", "router.choice", "router.weight", "router.logits", "router.score")
    if (shape.compiled and not spread) or tape.frozen:
        tape.save("rows", "product", "act")  # adapters: the inputs of their matrices (smalti/model/adapters/lora.py)
    if spread:
        tape.new("unsorted", rows)
        tape.drop("rows", "product", "y")
        tape.new("returned", rows)
        tape.drop("unsorted")
    tape.new("down", n * hidden * c)
    tape.save("arrived", "returned" if spread else "y")
    tape.drop("rows", "product", "act", "up", "gate", "y", "slots", "arrived", "returned")
    with tape.during(balance=n * e * 4 * 3):
        pass
    tape.drop("router.choice", "router.weight", "router.logits", "router.score")


def experts_backward(tape: Tape, model: ModelConfig, shape: MicrobatchShape) -> None:
    """Record the backward pass, after which the gradients of the weights are left."""
    moe, n, c = model.moe, shape.tokens, shape.compute_bytes
    assert moe is not None
    e, hidden = moe.num_experts, model.hidden_size
    slots = _slots(model, shape)
    inner, rows = slots * model.expert_width * c / shape.tensor, slots * hidden * c
    matrix = hidden * model.expert_width * e * c / shape.tensor / shape.expert
    tape.new("index", slots * 8)
    with tape.during(d_rows=rows, d_weight=rows):
        pass
    tape.new("d.y", rows)
    if shape.expert > 1:
        tape.new("d.arrived", rows)
        tape.drop("d.y")
        tape.new("d.y", rows)
    out = rows if shape.expert > 1 else n * hidden * c
    if "rows" not in tape.alive:
        tape.new("rows", rows)
    tape.new("d.product", inner)
    tape.new("active", inner)
    with tape.during(again=inner if model.gated else 0):
        tape.new("w.down", matrix)
    if model.gated:
        tape.new("d.gate", inner)
    with tape.during(d_in=rows):
        tape.new("d.out", out)
    tape.new("w.up", matrix)
    if model.gated:
        with tape.during(d_in=rows, another=out):
            pass
        tape.new("w.gate", matrix)
    tape.drop("index", "d.y", "rows", "d.product", "active", "d.gate", "d.arrived", "d.out")
    tape.used(
        "rows", "product", "act", "up", "gate", "y", "slots", "arrived", "returned", "router.choice", "router.weight"
    )
    if shape.expert > 1:
        with tape.during(left=rows, returning=rows):
            pass
    with tape.during(balance=n * e * 4 * 2):
        pass
    tape.used("router.logits", "router.score")


def _slots(model: ModelConfig, shape: MicrobatchShape) -> float:
    """Return the rows of all experts, padding included."""
    assert model.moe is not None
    slots, experts = shape.tokens * model.moe.num_experts_per_tok, model.moe.num_experts
    multiple = row_multiple(slots, experts, shape.device, shape.compute_bytes) if shape.expert == 1 else 1
    return slots + experts * (multiple - 1)
