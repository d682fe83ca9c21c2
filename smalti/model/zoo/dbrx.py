"""Family ``dbrx``: MoE, LayerNorm without bias, clipped and fused query/key/value.

Checked against transformers 5.23 (``modeling_dbrx.py``). It needs the rotary base twice: in ``rope_parameters``, which
it uses, and in ``attn_config``. The hub's DBRX folders have it in ``attn_config`` only: we read it there, transformers
uses 10000. Not stored in a DBRX folder, and read as their defaults:
``moe.z_loss_coef``, ``moe.router_initializer_range``, ``moe.router_lr_frac``, ``moe.kernel``.
"""

from smalti.config.model import ModelConfig
from smalti.model.zoo.family import Family
from smalti.model.zoo.fields import (
    LARGEST_LAYERS,
    Fields,
    Json,
    activation_to_huggingface,
    rope_from_huggingface,
    rope_to_huggingface,
)
from smalti.model.zoo.tensor_names import Rule, joined, same

_NO_CLIP = 65504.0
"""Written for an absent ``clip_qkv``, on which transformers fails: the largest float16. Read back as absent."""
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
    """Return the fields of ``DbrxConfig``."""
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
            "ffn_act_fn": {"name": activation_to_huggingface(config)},
            "ffn_hidden_size": config.intermediate_size,
            "moe_num_experts": config.moe.num_experts,
            "moe_top_k": config.moe.num_experts_per_tok,
            "moe_jitter_eps": None,
            "moe_loss_weight": config.moe.balance_loss_coef,
            "moe_normalize_expert_weights": config.moe.norm_topk_p if config.moe.norm_topk_prob else None,
        },
        **rope_to_huggingface(config),
        "initializer_range": config.initializer_range,
        "tie_word_embeddings": False,
    }


def config_from_huggingface(raw: Json) -> ModelConfig:
    """Our config of a ``config.json``; absent keys take the defaults of ``DbrxConfig``."""
    fields = Fields(raw)
    hidden, longest = fields.take("d_model", int), fields.take("max_seq_len", int, 2048)
    attention = _attention(fields.section("attn_config"))
    theta, kv_heads = attention.pop("rope_theta"), attention["num_key_value_heads"]
    rope = rope_from_huggingface(fields, theta or 10_000.0, longest)
    if theta not in (None, rope["rope_theta"]):
        raise fields.refusal("attn_config", f"two bases for the rotary frequencies: {theta} and {rope['rope_theta']}")
    if fields.take("num_key_value_heads", int, kv_heads) != kv_heads:
        raise fields.refusal("num_key_value_heads", f"attn_config.kv_n_heads={kv_heads} says otherwise")
    fields.ignore("router_aux_loss_coef")  # the hub's folders repeat moe_loss_weight
    return fields.build(
        {
            "family": "dbrx",
            "vocab_size": fields.take("vocab_size", int),
            "hidden_size": hidden,
            "num_hidden_layers": fields.take("n_layers", int, maximum=LARGEST_LAYERS),
            "num_attention_heads": fields.take("n_heads", int),
            "max_position_embeddings": longest,
            "norm": "layernorm",
            "tie_word_embeddings": fields.take("tie_word_embeddings", bool, False),
            "initializer_range": fields.take("initializer_range", float, 0.02),
            **rope,
            **attention,
            **_ffn(fields.section("ffn_config"), hidden),
        }
    )


def _attention(section: Fields) -> Json:
    section.ignore("tie_word_embeddings")  # every section of an older folder repeats the defaults of all configs
    clip = section.take("clip_qkv", float, None)
    converted = {
        "num_key_value_heads": section.take("kv_n_heads", int, 1),
        "rope_theta": section.take("rope_theta", float, None),
        "clip_qkv": None if clip is None or clip >= _NO_CLIP else clip,
    }
    section.finish()
    return converted


def _ffn(section: Fields, hidden: int) -> Json:
    section.ignore("tie_word_embeddings")
    function = section.section("ffn_act_fn")
    power = section.take("moe_normalize_expert_weights", float, 1.0)
    converted = {
        "intermediate_size": section.take("ffn_hidden_size", int, 3584),
        "activation": function.activation("name", "silu"),
        "moe": {
            "num_experts": section.take("moe_num_experts", int, 4),
            "num_experts_per_tok": section.take("moe_top_k", int, 1),
            "balance_loss_coef": section.take("moe_loss_weight", float, 0.01),
            "norm_topk_prob": power is not None,
            "norm_topk_p": 1.0 if power is None else power,
        },
    }
    section.only("hidden_size", (hidden,), "d_model has another value")
    section.only("moe_jitter_eps", (None, 0), "our router adds no noise")
    section.only("uniform_expert_assignment", (False,), "our router chooses by its scores")
    function.finish()
    section.finish()
    return converted


def rules(config: ModelConfig) -> list[Rule]:
    """Return all rules: query, key and value are joined along the rows; experts [E, F, D] are [E * F, D] (a view)."""
    query, key_value = (heads * config.width_per_head for heads in (config.num_attention_heads, config.kv_heads))
    rules = [same(ours, theirs) for ours, theirs in _OUTER.items()]
    for layer in range(config.num_hidden_layers):
        ours, theirs = f"blocks.{layer}.", f"transformer.blocks.{layer}."
        rules.append(joined(tuple(ours + part for part in _PARTS), theirs + _FUSED, (query, key_value, key_value)))
        rules += [same(ours + name, theirs + other) for name, other in _INNER.items()]
        rules += [_flat(config, ours + name, theirs + other) for name, other in _EXPERTS.items()]
    return rules


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
