"""Memory of attention in the forward and backward pass: ``smalti/model/blocks/attention``, tensor by tensor.

Covers projections, their norms, clipping and rotation, and the kernel: torch's fused one on CUDA and for long plain
rows on a CPU, matrix products over spans otherwise (``choice.py``). Documents of packed rows are counted as whole rows,
an upper bound. Names are those of the code: ``qs`` is the scaled query, ``mixed`` the kernel's output.
"""

from smalti.config.model import ModelConfig
from smalti.cost.memory.norm import Norms
from smalti.cost.memory.tape import MicrobatchShape, Tape

LONGEST_KEPT_TOKENS = 1024
BLOCK_TOKENS = 128
LONGEST_MASKED_TOKENS = 256
"""On a CPU, rows up to the first length save their attention probabilities, in blocks of the second; packed rows up to
the third use one mask, as in ``model/blocks/attention`` (a test compares them)."""


class AttentionTape:
    """Attention of one layer on a tape."""

    def __init__(self, model: ModelConfig, layer: int, shape: MicrobatchShape) -> None:
        self.model, self.layer, self.shape, self.norms = model, layer, shape, Norms(model, shape)
        c, n, t, width = shape.compute_bytes, shape.tokens, shape.tensor, model.width_per_head
        self.c = c
        self.row = n / t * model.hidden_size * c
        self.whole_row = n * model.hidden_size * c
        self.q, self.kv = (n * heads * width * c / t for heads in (model.num_attention_heads, model.kv_heads))
        self.qw, self.kvw = (
            model.hidden_size * heads * width * c / t for heads in (model.num_attention_heads, model.kv_heads)
        )
        self._attended: list[str] = []

    @property
    def mask_bytes(self) -> float:
        """Bytes of the bias of the scores on a CPU: one strip for all blocks of queries, and one more for each block of
        short documents; or a mask over whole packed rows."""
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
        of_documents = shape.rows * shape.seq_len * BLOCK_TOKENS * heads * size if shape.documents else 0
        return BLOCK_TOKENS * (past + BLOCK_TOKENS) * heads * size + of_documents

    def forward(self, tape: Tape, read: str) -> None:
        tape.new("q", self.q)
        tape.new("k", self.kv)
        tape.new("v", self.kv)
        tape.save(read)
        names = ["q", "k", "v"]
        if self.model.qk_norm:
            for name in names[:2]:
                self.norms.forward(tape, f"{name}norm", name, self.q if name == "q" else self.kv)
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

    def backward(self, tape: Tape, out: str) -> None:
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
                self.norms.backward(tape, f"{name}norm", size)
                tape.used(name)
        tape.new(out, self.whole_row)
        tape.new("w.v", self.kvw)
        tape.drop("d.v")
        for name, size in (("k", self.kvw), ("q", self.qw)):
            with tape.during(another=self.whole_row):
                tape.new(f"w.{name}", size)
            tape.drop(f"d.{name}")

    def _spans(self) -> list[tuple[int, int]]:
        """Return (queries, keys) of each block on a CPU, for whole rows whatever their documents."""
        tokens, window, spans = self.shape.seq_len, self.model.window(self.layer), []
        for begin in range(0, tokens, BLOCK_TOKENS):
            queries = min(BLOCK_TOKENS, tokens - begin)
            first = 0 if window is None else max(0, begin - window + 1)
            spans.append((queries, begin + queries - first))
        return spans

    def _is_fused(self) -> bool:
        """Return True for torch's fused kernel: on CUDA, and for long plain rows on a CPU."""
        model, tokens = self.model, self.shape.seq_len
        window = model.window(self.layer)
        plain = (window is None or window >= tokens) and model.position != "alibi" and not model.attn_logit_softcapping
        return self.shape.device == "cuda" or (plain and not self.shape.documents and tokens > LONGEST_KEPT_TOKENS)

    def _keeps_scores(self) -> bool:
        return self.shape.seq_len <= LONGEST_KEPT_TOKENS and not self.model.attn_logit_softcapping

    def _span_bytes(self, queries: int, keys: int) -> float:
        """Return the bytes of the scores of all queries and keys, in the compute format."""
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
            size, wide = self._span_bytes(queries, keys), 4 / self.c if self._scores_in_fp32() else 1
            tape.new("score", size * wide)
            if self._scores_in_fp32():
                tape.new("score.fp32", size * wide)
            tape.new(f"probability.{index}", size)
            tape.drop("score", "score.fp32")
            with tape.during(mixed_span=self.q * queries / self.shape.seq_len):
                pass
            if self._keeps_scores():
                tape.save(f"probability.{index}")
            tape.drop(f"probability.{index}")
        tape.drop("k.rows", "v.rows", "qs")

    def _scores_in_fp32(self) -> bool:
        """Return True if the scores are computed in fp32."""
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
                tape.new("score", size * (4 / self.c if self._scores_in_fp32() else 1))
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
