"""Family ``llama``: dense, RMSNorm, gated MLP, grouped queries. Checked: transformers 5.23 (``modeling_llama.py``)."""

from typing import Any

from smalti.config.model import ModelConfig
from smalti.model.zoo.family import Family, Json, Rule, build_config, need, read_activation, read_rope_theta, same

_PARTS = ("attention.q_proj", "attention.k_proj", "attention.v_proj", "attention.o_proj")
_MLP = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")


def config_to_huggingface(config: ModelConfig) -> Json:
    """``LlamaConfig``. ``rope_theta`` is repeated at the top for older readers."""
    return {
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
        "attention_bias": config.attention_bias,
        "attention_dropout": 0.0,
        "mlp_bias": config.mlp_bias,
        "tie_word_embeddings": config.tie_word_embeddings,
    }


def config_from_huggingface(raw: Json) -> ModelConfig:
    """Our config of a ``config.json``; absent keys take the defaults of ``LlamaConfig``."""
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
        "attention_bias": bool(raw.get("attention_bias")),
        "mlp_bias": bool(raw.get("mlp_bias")),
        "tie_word_embeddings": raw.get("tie_word_embeddings", False),
        "initializer_range": raw.get("initializer_range", 0.02),
    }
    return build_config(fields)


def rules(config: ModelConfig) -> list[Rule]:
    """Names alone: every tensor is stored as ours are."""
    found = [same("embed.weight", "model.embed_tokens.weight"), same("norm.weight", "model.norm.weight")]
    if not config.tie_word_embeddings:
        found.append(same("lm_head.weight", "lm_head.weight"))
    for layer in range(config.num_hidden_layers):
        ours, theirs = f"blocks.{layer}.", f"model.layers.{layer}."
        found.append(same(f"{ours}attention_norm.weight", f"{theirs}input_layernorm.weight"))
        found.append(same(f"{ours}mlp_norm.weight", f"{theirs}post_attention_layernorm.weight"))
        for parts, has_bias in ((_PARTS, config.attention_bias), (_MLP, config.mlp_bias)):
            for part in parts:
                other = theirs + part.replace("attention.", "self_attn.")
                found += [
                    same(f"{ours}{part}.{kind}", f"{other}.{kind}") for kind in ("weight", "bias")[: 1 + has_bias]
                ]
    return found


FAMILY = Family("llama", "LlamaForCausalLM", config_to_huggingface, config_from_huggingface, rules)
