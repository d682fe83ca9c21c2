"""Family ``dbrx``: mixture of experts, LayerNorm without bias, clipped and fused query/key/value.

Checked against transformers 5.23 (``modeling_dbrx.py``), whose reader has three peculiarities:

* it wants the rotary base twice, in ``rope_parameters`` (which it uses) and in ``attn_config`` (which must exist);
* it fails on an absent ``clip_qkv``, so absent is written as 65504, the largest float16, and read back as absent;
* the hub's own DBRX folders give the base in ``attn_config`` only: we read it there, transformers falls back to 10000.

Not carried by a DBRX folder: ``moe.z_loss_coef`` and ``moe.kernel`` come back as their defaults.
"""

from typing import Any

from smalti.base.errors import DataError
from smalti.config.model import ModelConfig
from smalti.model.zoo.family import (
    Family,
    Json,
    Rule,
    build_config,
    joined,
    need,
    read_activation,
    read_rope_theta,
    same,
)
from smalti.model.zoo.family import refuse_unless as refuse

_NO_CLIP = 65504.0
_OUTER = {
    "embed.weight": "transformer.wte.weight",
    "norm.weight": "transformer.norm_f.weight",
    "lm_head.weight": "lm_head.weight",
}
_INNER = {
    "attention_norm.weight": "norm_attn_norm.norm_1.weight",
    "attention.o_proj.weight": "norm_attn_norm.attn.out_proj.weight",
    "mlp_norm.weight": "norm_attn_norm.norm_2.weight",
    "mlp.router.weight": "ffn.router.layer.weight",
}
_EXPERTS = {
    "mlp.experts.gate_proj": "ffn.experts.mlp.w1",
    "mlp.experts.up_proj": "ffn.experts.mlp.v1",
    "mlp.experts.down_proj": "ffn.experts.mlp.w2",
}
_FUSED = "norm_attn_norm.attn.Wqkv.weight"
_PARTS = ("attention.q_proj.weight", "attention.k_proj.weight", "attention.v_proj.weight")


def config_to_huggingface(config: ModelConfig) -> Json:
    """``DbrxConfig``."""
    assert config.moe is not None
    return {
        "d_model": config.hidden_size,
        "n_heads": config.num_attention_heads,
        "n_layers": config.num_hidden_layers,
        "max_seq_len": config.max_position_embeddings,
        "vocab_size": config.vocab_size,
        "resid_pdrop": 0.0,
        "emb_pdrop": 0.0,
        "attn_config": {
            "attn_pdrop": 0.0,
            "clip_qkv": _NO_CLIP if config.clip_qkv is None else config.clip_qkv,
            "kv_n_heads": config.kv_heads,
            "rope_theta": config.rope_theta,
        },
        "ffn_config": {
            "ffn_act_fn": {"name": config.activation},
            "ffn_hidden_size": config.intermediate_size,
            "moe_num_experts": config.moe.num_experts,
            "moe_top_k": config.moe.num_experts_per_tok,
            "moe_jitter_eps": None,
            "moe_loss_weight": config.moe.balance_loss_coef,
            "moe_normalize_expert_weights": 1.0,
        },
        "rope_parameters": {"rope_theta": config.rope_theta, "rope_type": "default"},
        "initializer_range": config.initializer_range,
        "tie_word_embeddings": False,
    }


def config_from_huggingface(raw: Json) -> ModelConfig:
    """Our config of a ``config.json``; absent keys take the defaults of ``DbrxConfig``."""
    attention, ffn = need(raw, "attn_config"), need(raw, "ffn_config")
    if ffn.get("moe_normalize_expert_weights", 1.0) != 1.0:
        raise DataError(
            f"config.json has moe_normalize_expert_weights={ffn['moe_normalize_expert_weights']}: "
            "our router divides the chosen weights by their sum",
            allowed="1.0",
        )
    refuse(ffn, "moe_jitter_eps", (None, 0.0), "our router adds no jitter")
    clip = attention.get("clip_qkv")
    fields: dict[str, Any] = {
        "family": "dbrx",
        "vocab_size": need(raw, "vocab_size"),
        "hidden_size": need(raw, "d_model"),
        "intermediate_size": need(ffn, "ffn_hidden_size"),
        "num_hidden_layers": need(raw, "n_layers"),
        "num_attention_heads": need(raw, "n_heads"),
        "num_key_value_heads": attention.get("kv_n_heads", 1),
        "max_position_embeddings": raw.get("max_seq_len", 2048),
        "norm": "layernorm",
        "activation": read_activation((ffn.get("ffn_act_fn") or {"name": "silu"})["name"]),
        "rope_theta": read_rope_theta(raw, attention.get("rope_theta")),
        "clip_qkv": None if clip is None or clip >= _NO_CLIP else clip,
        "tie_word_embeddings": raw.get("tie_word_embeddings", False),
        "initializer_range": raw.get("initializer_range", 0.02),
        "moe": {
            "num_experts": ffn.get("moe_num_experts", 4),
            "num_experts_per_tok": ffn.get("moe_top_k", 1),
            "balance_loss_coef": ffn.get("moe_loss_weight", 0.01),
        },
    }
    return build_config(fields)


def rules(config: ModelConfig) -> list[Rule]:
    """Query, key and value are joined along the rows; experts [E, F, D] are [E * F, D] (a view)."""
    query, key_value = (heads * config.width_per_head for heads in (config.num_attention_heads, config.kv_heads))
    found = [same(ours, theirs) for ours, theirs in _OUTER.items()]
    for layer in range(config.num_hidden_layers):
        ours, theirs = f"blocks.{layer}.", f"transformer.blocks.{layer}."
        found.append(joined(tuple(ours + part for part in _PARTS), theirs + _FUSED, (query, key_value, key_value)))
        found += [same(ours + name, theirs + other) for name, other in _INNER.items()]
        found += [_flat(config, ours + name, theirs + other) for name, other in _EXPERTS.items()]
    return found


def _flat(config: ModelConfig, ours: str, theirs: str) -> Rule:
    assert config.moe is not None
    experts = config.moe.num_experts
    return Rule(
        (ours,),
        (theirs,),
        lambda tensors: [tensors[0].flatten(0, 1)],
        lambda tensors: [tensors[0].unflatten(0, (experts, -1))],
    )


FAMILY = Family("dbrx", "DbrxForCausalLM", config_to_huggingface, config_from_huggingface, rules)
