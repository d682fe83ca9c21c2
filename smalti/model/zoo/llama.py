"""Family ``llama``: dense, RMSNorm, gated MLP, grouped queries. Checked: transformers 5.23 (``modeling_llama.py``)."""

from typing import Any

from smalti.config.model import ModelConfig
from smalti.model.zoo.family import Family, Json, Weights, build_config, need, read_activation, read_rope_theta
from smalti.model.zoo.family import refuse_unless as refuse

_OUTER = {"embed.weight": "model.embed_tokens.weight", "norm.weight": "model.norm.weight"}
_INNER = {
    "attention_norm": "input_layernorm",
    "attention": "self_attn",
    "mlp_norm": "post_attention_layernorm",
    "mlp": "mlp",
}


def config_to_huggingface(config: ModelConfig, *, bos_id: int | None, eos_id: int | None, dtype: str) -> Json:
    """The ``config.json`` of ``LlamaForCausalLM``. ``rope_theta`` is repeated at the top for older readers."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.width_per_head,
        "hidden_act": config.activation,
        "max_position_embeddings": config.max_position_embeddings,
        "initializer_range": config.initializer_range,
        "rms_norm_eps": config.norm_eps,
        "rope_parameters": {"rope_theta": config.rope_theta, "rope_type": "default"},
        "rope_theta": config.rope_theta,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "mlp_bias": False,
        "tie_word_embeddings": config.tie_word_embeddings,
        "bos_token_id": bos_id,
        "eos_token_id": eos_id,
        "use_cache": True,
        "dtype": dtype,
    }


def config_from_huggingface(raw: Json) -> ModelConfig:
    """Our config of a ``config.json``; absent keys take the defaults of ``LlamaConfig``."""
    refuse(raw, "attention_bias", (False, None), "our projections have no bias")
    refuse(raw, "mlp_bias", (False, None), "our projections have no bias")
    hidden, heads = need(raw, "hidden_size"), need(raw, "num_attention_heads")
    head_dim = raw.get("head_dim")
    fields: dict[str, Any] = {
        "family": "llama",
        "vocab_size": need(raw, "vocab_size"),
        "hidden_size": hidden,
        "intermediate_size": need(raw, "intermediate_size"),
        "num_hidden_layers": need(raw, "num_hidden_layers"),
        "num_attention_heads": heads,
        "num_key_value_heads": raw.get("num_key_value_heads"),
        "head_dim": None if head_dim is None or head_dim * heads == hidden else head_dim,
        "max_position_embeddings": raw.get("max_position_embeddings", 2048),
        "norm_eps": raw.get("rms_norm_eps", 1e-6),
        "activation": read_activation(raw.get("hidden_act", "silu")),
        "rope_theta": read_rope_theta(raw, raw.get("rope_theta")),
        "tie_word_embeddings": raw.get("tie_word_embeddings", False),
        "initializer_range": raw.get("initializer_range", 0.02),
    }
    return build_config(fields)


def weights_to_huggingface(config: ModelConfig, weights: Weights) -> Weights:
    """Our names to theirs; the tensors are the same objects."""
    return {_to_theirs(name): tensor for name, tensor in weights.items()}


def weights_from_huggingface(config: ModelConfig, weights: Weights) -> Weights:
    """Their names to ours; the tensors are the same objects."""
    return {_to_ours(name): tensor for name, tensor in weights.items()}


def _to_theirs(name: str) -> str:
    if not name.startswith("blocks."):
        return _OUTER.get(name, name)
    _, layer, part, rest = name.split(".", 3)
    return f"model.layers.{layer}.{_INNER[part]}.{rest}"


def _to_ours(name: str) -> str:
    if not name.startswith("model.layers."):
        return {theirs: ours for ours, theirs in _OUTER.items()}.get(name, name)
    _, _, layer, part, rest = name.split(".", 4)
    return f"blocks.{layer}.{ {theirs: ours for ours, theirs in _INNER.items()}[part] }.{rest}"


FAMILY = Family(
    "llama", config_to_huggingface, config_from_huggingface, weights_to_huggingface, weights_from_huggingface
)
