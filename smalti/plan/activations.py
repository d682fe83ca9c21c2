"""What one block holds while a microbatch goes through it, forward and backward, tensor by tensor.

Promises: the tensors of ``smalti/model`` in an eager step, in the order in which they come and go, as far as they grow
with the tokens; so the most that is alive inside a block is known for any shape. Counted against a real step on a CPU
(``bench/plan_memory.py``). On CUDA norms and attention are torch's fused kernels; what ``torch.compile`` saves beyond
is not reckoned. Under axes ``tensor`` and ``sequence`` it follows Korthikanti et al. 2022 (arXiv 2205.05198, section 4:
norms and the residual stream are split too), which no run here has measured.

Names of tensors are those of the code, in one letter-case: ``q k v`` projections, ``qs`` the scaled query, ``x1`` the
residual after attention.
"""

from dataclasses import dataclass
from typing import Literal

from smalti.config.model import ModelConfig
from smalti.plan.expert_activations import experts, experts_backward
from smalti.plan.tape import Tape

LONGEST_KEPT_TOKENS = 1024
BLOCK_TOKENS = 128
LONGEST_MASKED_TOKENS = 256
"""Rows up to the first keep their attention probabilities on a CPU, in blocks of the second; packed rows up to the
third go through one mask: ``model/blocks/attention`` (a test holds them equal)."""


@dataclass(frozen=True)
class Pass:
    """One microbatch on one rank."""

    rows: int
    """Sequences."""
    seq_len: int
    """Tokens of each."""
    compute_bytes: int
    """Of an activation: 2 or 4."""
    device: Literal["cpu", "cuda"]
    documents: bool = False
    """Rows are packed, and attention stays inside documents."""
    tensor: int = 1
    """Ranks that share each matrix."""
    sequence: int = 1
    """Ranks that share each row."""
    expert: int = 1
    """Ranks that share the experts."""

    @property
    def tokens(self) -> float:
        """On this rank, outside attention."""
        return self.rows * self.seq_len / self.sequence


class BlockTape:
    """One block on a tape: ``forward`` then ``backward``."""

    def __init__(self, model: ModelConfig, layer: int, shape: Pass) -> None:
        self.model, self.shape, self.layer = model, shape, layer
        c, n, t = shape.compute_bytes, shape.tokens, shape.tensor
        self.c = c
        self.row = n / t * model.hidden_size * c
        """A tensor like the residual stream, split over the tensor axis."""
        self.whole_row = n * model.hidden_size * c
        """The same where a matrix reads it."""
        width = model.width_per_head
        self.q, self.kv = (n * heads * width * c / t for heads in (model.num_attention_heads, model.kv_heads))
        self.qw = model.hidden_size * model.num_attention_heads * width * c / t
        self.kvw = model.hidden_size * model.kv_heads * width * c / t
        self._attended: list[str] = []
        self.fused_norm = shape.device == "cuda" or model.norm == "layernorm"
        self.norm_keeps_input = self.fused_norm or c == 4

    def forward(self, tape: Tape) -> None:
        """From the block's input ``x`` to its output ``x2``, which is the next block's ``x``."""
        pre = self.model.norm_placement == "pre"
        tape.new("x", self.row)
        if pre:
            self._norm(tape, "norm1", "x", self.row)
        self._attend(tape, "norm1.out" if pre else "x")
        if not pre:
            self._norm(tape, "norm1", "o", self.row)
        tape.new("x1", self.row)
        if pre:
            self._norm(tape, "norm2", "x1", self.row)
        tape.drop("norm1.out")
        self._mlp(tape, "norm2.out" if pre else "x1")
        tape.drop("o")
        if not pre:
            self._norm(tape, "norm2", "down", self.row)
        tape.new("x2", self.row)
        tape.drop("down", "norm2.out", "x1", "x", "x2")

    def backward(self, tape: Tape) -> None:
        """From the gradient of the output, ``g``, to that of the input; gradients of weights stay, as ``w.``..."""
        pre = self.model.norm_placement == "pre"
        if not pre:
            tape.new("d.down", self.row)
            self._norm_backward(tape, "norm2", self.row)
            tape.used("down")
        self._mlp_backward(tape, "d.mlp")
        tape.drop("d.down")
        tape.used("norm2.out" if pre else "x1")
        if pre:
            self._norm_backward(tape, "norm2", self.row)
        tape.drop("d.mlp")
        tape.used("x1")
        if not pre:
            tape.new("d.o", self.row)
            self._norm_backward(tape, "norm1", self.row)
            tape.used("o")
        self._attend_backward(tape, "d.attention")
        tape.drop("d.o")
        tape.used("norm1.out" if pre else "x")
        if pre:
            self._norm_backward(tape, "norm1", self.row)
        tape.drop("d.attention")
        tape.used("x")

    def last_norm(self, tape: Tape) -> None:
        """The norm behind the last block; ``last.out`` is what the loss reads."""
        tape.new("x", self.row)
        self._norm(tape, "last", "x", self.row)

    def last_norm_backward(self, tape: Tape) -> None:
        """From the gradient that the loss has left, ``d.hidden``."""
        self._norm_backward(tape, "last", self.row)
        tape.used("x")

    @property
    def mask_bytes(self) -> float:
        """What is added to scores on a CPU: one strip for all blocks of queries, or for packed rows all of it; and for
        each block of short documents its own."""
        model, shape, window = self.model, self.shape, self.model.window(self.layer)
        if self._is_fused():
            return 0.0
        if model.position == "alibi":
            heads, size = model.num_attention_heads / shape.tensor, 4
        else:
            heads, size = 1, 4 if model.attn_logit_softcapping else self.c
        if shape.documents and shape.seq_len <= LONGEST_MASKED_TOKENS:
            return shape.rows * heads * shape.seq_len**2 * size
        past = 0 if model.position != "alibi" else shape.seq_len
        past = past if window is None else min(shape.seq_len, window + BLOCK_TOKENS)
        own = shape.rows * shape.seq_len * BLOCK_TOKENS * heads * size if shape.documents else 0
        return BLOCK_TOKENS * (past + BLOCK_TOKENS) * heads * size + own

    # ---- norms -------------------------------------------------------------------------------------------------------

    def _norm(self, tape: Tape, name: str, read: str, size: float) -> None:
        """``size``: of what is normed, in the compute format. A fused norm keeps what it reads; RMSNorm on a CPU is
        made of plain operators, and keeps its input and what is divided by the root, both in fp32."""
        wide = size * 4 / self.c
        if self.fused_norm:
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
        tape.save(f"{name}.unit", f"{name}.in32" if self.c == 2 else read)
        tape.drop(f"{name}.in32", f"{name}.unit")

    def _norm_backward(self, tape: Tape, name: str, size: float) -> None:
        """The gradient of what was normed takes the place of that of the norm's output."""
        wide = size * 4 / self.c
        if self.fused_norm:
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

    # ---- attention ---------------------------------------------------------------------------------------------------

    def _attend(self, tape: Tape, read: str) -> None:
        tape.new("q", self.q)
        tape.new("k", self.kv)
        tape.new("v", self.kv)
        tape.save(read)
        names = ["q", "k", "v"]
        if self.model.qk_norm:
            for name in names[:2]:
                self._norm(tape, f"{name}norm", name, self.q if name == "q" else self.kv)
            tape.drop("q", "k")
            names[:2] = ["qnorm.out", "knorm.out"]
        if self.model.clip_qkv:
            clipped = ["q.clipped", "k.clipped", "v.clipped"]
            for name, size in zip(clipped, (self.q, self.kv, self.kv), strict=True):
                tape.new(name, size)
            tape.save(*names)
            tape.drop(*names)
            names = clipped
        if self.model.position == "rope":
            for name, size in (("q.turned", self.q), ("k.turned", self.kv)):
                tape.new(name, size)
                with tape.during(swapped=size):
                    pass
            tape.drop(*names[:2])
            names[:2] = ["q.turned", "k.turned"]
        self._kernel(tape, names)
        tape.drop(*names)
        tape.new("o", self.row)
        tape.save("mixed")
        tape.drop("mixed")

    def _attend_backward(self, tape: Tape, out: str) -> None:
        tape.new("d.mixed", self.q)
        tape.new("w.o", self.qw)
        tape.used("mixed")
        self._kernel_backward(tape)
        tape.drop("d.mixed")
        if self.model.position == "rope":
            for name, size in (("k", self.kv), ("q", self.q)):
                tape.new(f"d.{name}.turned", size)
                with tape.during(swapped=size):
                    pass
                tape.drop(f"d.{name}")
                tape.new(f"d.{name}", size)
                tape.drop(f"d.{name}.turned")
        if self.model.clip_qkv:
            with tape.during(unclipped=self.q):
                pass
            tape.used("q", "k", "v", "qnorm.out", "knorm.out")
        if self.model.qk_norm:
            for name, size in (("k", self.kv), ("q", self.q)):
                self._norm_backward(tape, f"{name}norm", size)
                tape.used(name)
        tape.new(out, self.whole_row)
        tape.new("w.v", self.kvw)
        tape.drop("d.v")
        for name, size in (("k", self.kvw), ("q", self.qw)):
            with tape.during(another=self.whole_row):
                tape.new(f"w.{name}", size)
            tape.drop(f"d.{name}")

    # ---- the kernel that attends -------------------------------------------------------------------------------------

    def _spans(self) -> list[tuple[int, int]]:
        """(queries, keys) of each block on a CPU: rows as they are, whatever documents they hold."""
        tokens, window, found = self.shape.seq_len, self.model.window(self.layer), []
        for begin in range(0, tokens, BLOCK_TOKENS):
            queries = min(BLOCK_TOKENS, tokens - begin)
            first = 0 if window is None else max(0, begin - window + 1)
            found.append((queries, begin + queries - first))
        return found

    def _is_fused(self) -> bool:
        """Torch's fused kernel: on CUDA, and for long plain rows on a CPU."""
        model, tokens = self.model, self.shape.seq_len
        window = model.window(self.layer)
        plain = (window is None or window >= tokens) and model.position != "alibi" and not model.attn_logit_softcapping
        return self.shape.device == "cuda" or (plain and not self.shape.documents and tokens > LONGEST_KEPT_TOKENS)

    def _keeps_scores(self) -> bool:
        return self.shape.seq_len <= LONGEST_KEPT_TOKENS and not self.model.attn_logit_softcapping

    def _span_bytes(self, queries: int, keys: int) -> float:
        """A score of each query and key, in the compute format."""
        return self.q / self.model.width_per_head * queries / self.shape.seq_len * keys

    def _kernel(self, tape: Tape, names: list[str]) -> None:
        if self._is_fused():
            tape.new("mixed", self.q)
            tape.new("partition", self.q / self.model.width_per_head * 4 / self.c)
            tape.save(*names, "mixed", "partition")
            tape.drop("partition")
            self._attended = names
            return
        tape.new("k.rows", self.kv)
        tape.new("v.rows", self.kv)
        tape.new("qs", self.q)
        tape.save("k.rows", "v.rows", "qs")
        tape.new("mixed", self.q)
        for index, (queries, keys) in enumerate(self._spans()):
            size, wide = self._span_bytes(queries, keys), 4 / self.c if self._is_bent() else 1
            tape.new("score", size * wide)
            if self._is_bent():
                tape.new("bent", size * wide)
            tape.new(f"probability.{index}", size)
            tape.drop("score", "bent")
            with tape.during(mixed_span=self.q * queries / self.shape.seq_len):
                pass
            if self._keeps_scores():
                tape.save(f"probability.{index}")
            tape.drop(f"probability.{index}")
        tape.drop("k.rows", "v.rows", "qs")

    def _is_bent(self) -> bool:
        """Scores go through fp32."""
        return self.model.position == "alibi" or self.model.attn_logit_softcapping is not None

    def _kernel_backward(self, tape: Tape) -> None:
        tape.new("d.q", self.q)
        if self._is_fused():
            tape.new("d.k", self.kv)
            tape.new("d.v", self.kv)
            tape.used("partition", *self._attended)
            return
        wide = self.kv * 4 / self.c
        tape.new("d.k32" if self.c == 2 else "d.k", wide)
        tape.new("d.v32" if self.c == 2 else "d.v", wide)
        for queries, keys in self._spans():
            size = self._span_bytes(queries, keys)
            if not self._keeps_scores():
                tape.new("score", size * (4 / self.c if self._is_bent() else 1))
                tape.new("again", size)
                tape.drop("score")
            with tape.during(d_probability=size, d_score=size):
                pass
            tape.drop("again")
        if self.c == 2:
            tape.new("d.k", self.kv)
            tape.new("d.v", self.kv)
            tape.drop("d.k32", "d.v32")
        tape.used("qs", "k.rows", "v.rows", *(f"probability.{index}" for index in range(len(self._spans()))))

    # ---- the MLP -----------------------------------------------------------------------------------------------------

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
        names = [f"{name}{one}" for one in ("up", "gate", "act", "product")]
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
