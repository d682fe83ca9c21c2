"""Every weight tensor of a model by name, kind and shape, for quantisation, adapters and sharding.

The tensors, names and shapes are those that ``smalti.model.decoder.Decoder`` registers (a test compares them
on the meta device), and their sizes add up to ``params.count``.
"""

from dataclasses import dataclass
from typing import Literal

from smalti.config.model import ModelConfig

Kind = Literal["embedding", "head", "attention", "mlp", "expert", "router", "norm", "bias"]

KINDS: tuple[Kind, ...] = ("embedding", "head", "attention", "mlp", "expert", "router", "norm", "bias")
"""All kinds in the order of output. ``mlp``: dense MLPs and shared experts; ``expert``: routed experts."""


@dataclass(frozen=True)
class Weight:
    """A tensor: ``count`` matrices of ``rows`` outputs x ``columns`` inputs (a norm or bias is one row)."""

    name: str
    """Name within its layer: ``q_proj`` ... ``down_proj``, ``router``, ``attention_norm``, ``q_proj.bias`` ..."""
    kind: Kind
    layer: int | None
    """None: before the first block or after the last."""
    rows: int
    columns: int
    count: int = 1
    """Experts that have such a matrix."""

    @property
    def params(self) -> int:
        """Number of scalars."""
        return self.rows * self.columns * self.count


def weights(model: ModelConfig) -> list[Weight]:
    """Return all tensors, the embedding first and the head last; a tied head is not listed."""
    hidden, vocab = model.hidden_size, model.vocab_size
    result = [Weight("embed", "embedding", None, vocab, hidden)]
    if model.embedding_norm:
        result.append(Weight("embedding_norm", "norm", None, 1, hidden))
    for layer in range(model.num_hidden_layers):
        result += _block(model, layer)
    result.append(Weight("norm", "norm", None, 1, hidden))
    if model.num_labels:
        result.append(Weight("score", "head", None, model.num_labels, hidden))
    elif not model.tie_word_embeddings:
        result.append(Weight("lm_head", "head", None, vocab, hidden))
    return result


def _block(model: ModelConfig, layer: int) -> list[Weight]:
    hidden, width = model.hidden_size, model.width_per_head
    query, key = model.num_attention_heads * width, model.kv_heads * width
    shapes = {"q_proj": (query, hidden), "k_proj": (key, hidden), "v_proj": (key, hidden), "o_proj": (hidden, query)}
    tensors = [Weight(name, "attention", layer, *shape) for name, shape in shapes.items()]
    if model.attention_bias:
        tensors += [Weight(f"{name}.bias", "bias", layer, 1, rows) for name, (rows, _) in shapes.items()]
    if model.qk_norm:
        of_query, of_key = (query, key) if model.qk_norm == "full" else (width, width)
        tensors += [Weight("q_norm", "norm", layer, 1, of_query), Weight("k_norm", "norm", layer, 1, of_key)]
    tensors += [Weight(name, "norm", layer, 1, hidden) for name in ("attention_norm", "mlp_norm")]
    if model.moe is None or not model.has_experts(layer):
        return tensors + _mlp(model, layer, "mlp", model.intermediate_size, bias=model.mlp_bias)
    tensors.append(Weight("router", "router", layer, model.moe.num_experts, hidden))
    if model.moe.num_shared_experts:
        tensors += _mlp(model, layer, "mlp", model.moe.num_shared_experts * model.expert_width)
    return tensors + _mlp(model, layer, "expert", model.expert_width, count=model.moe.num_experts)


def _mlp(model: ModelConfig, layer: int, kind: Kind, inner: int, *, count: int = 1, bias: bool = False) -> list[Weight]:
    hidden = model.hidden_size
    shapes = {"gate_proj": (inner, hidden)} if model.gated else {}
    shapes |= {"up_proj": (inner, hidden), "down_proj": (hidden, inner)}
    tensors = [Weight(name, kind, layer, *shape, count) for name, shape in shapes.items()]
    return tensors + [Weight(f"{name}.bias", "bias", layer, 1, rows) for name, (rows, _) in shapes.items() if bias]
