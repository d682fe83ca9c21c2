"""Family ``mpt``: ALiBi, LayerNorm without bias, plain MLP of 4 widths, clipped projections.

Checked: transformers 5.23, whose ``MptForCausalLM`` implements only part of ``MptConfig``, and less of LLM Foundry's
``MPTConfig``; options that it does not implement are refused by name.
"""

from smalti.config.model import ModelConfig
from smalti.model.zoo.family import Family
from smalti.model.zoo.fields import Fields, Json
from smalti.model.zoo.tensor_names import Rule, joined, same

_OUTER = {"embed.weight": "transformer.wte.weight", "norm.weight": "transformer.norm_f.weight"}
_INNER = {
    "attention_norm.weight": "norm_1.weight",
    "attention.o_proj.weight": "attn.out_proj.weight",
    "mlp_norm.weight": "norm_2.weight",
    "mlp.up_proj.weight": "ffn.up_proj.weight",
    "mlp.down_proj.weight": "ffn.down_proj.weight",
}
_PARTS = ("attention.q_proj.weight", "attention.k_proj.weight", "attention.v_proj.weight")
_IGNORED = "transformers does not implement it"


def config_to_huggingface(config: ModelConfig) -> Json:
    """Return the fields of ``MptConfig``."""
    return {
        "vocab_size": config.vocab_size,
        "d_model": config.hidden_size,
        "n_heads": config.num_attention_heads,
        "n_layers": config.num_hidden_layers,
        "expansion_ratio": 4,
        "max_seq_len": config.max_position_embeddings,
        "resid_pdrop": 0.0,
        "emb_pdrop": 0.0,
        "layer_norm_epsilon": config.norm_eps,
        "learned_pos_emb": False,
        "no_bias": True,
        "norm_type": "low_precision_layernorm",
        "initializer_range": config.initializer_range,
        "tie_word_embeddings": config.tie_word_embeddings,
        "attn_config": {
            "attn_type": "multihead_attention",
            "attn_pdrop": 0,
            "clip_qkv": config.clip_qkv,
            "softmax_scale": config.attention_multiplier,
            "prefix_lm": False,
            "qk_ln": False,
            "attn_uses_sequence_id": False,
            "alibi": True,
            "alibi_bias_max": 8,
        },
    }


def config_from_huggingface(raw: Json) -> ModelConfig:
    """Our config of a ``config.json``; absent keys take the defaults of ``MptConfig``."""
    fields = Fields(raw)
    hidden, heads = fields.take("d_model", int), fields.take("n_heads", int)
    norm_eps = fields.take("layer_norm_epsilon", float, 1e-5)
    converted = {
        "family": "mpt",
        "vocab_size": fields.take("vocab_size", int),
        "hidden_size": hidden,
        "intermediate_size": 4 * hidden,
        "num_hidden_layers": fields.take("n_layers", int),
        "num_attention_heads": heads,
        "max_position_embeddings": fields.take("max_seq_len", int, 2048),
        "norm": "layernorm",
        "norm_eps": norm_eps,
        "activation": "gelu",
        "gated": False,
        "position": "alibi",
        "initializer_range": fields.take("initializer_range", float, 0.02),
        "tie_word_embeddings": fields.take("tie_word_embeddings", bool, True),
        **_attention(fields.section("attn_config"), heads),
    }
    fields.only("expansion_ratio", (4,), _IGNORED)
    fields.only("no_bias", (True,), "the family has no biases")
    fields.only("logit_scale", (None,), _IGNORED)
    fields.only("norm_type", ("low_precision_layernorm", "layernorm"), _IGNORED)
    fields.only("embedding_fraction", (1,), _IGNORED)
    fields.only("norm_eps", (norm_eps,), "layer_norm_epsilon has another value")
    for key in ("learned_pos_emb", "init_device", "init_config"):  # no effect with ALiBi or after training
        fields.ignore(key)
    for key in ("fc_type", "use_pad_tok_in_ffn"):  # another implementation of the same function
        fields.ignore(key)
    mlp = fields.section("ffn_config")
    mlp.only("ffn_type", ("mptmlp",), _IGNORED)
    mlp.ignore("fc_type")
    mlp.finish()
    return fields.build(converted)


def _attention(section: Fields, heads: int) -> Json:
    clip, scale = section.take("clip_qkv", float, None), section.take("softmax_scale", float, None)
    section.only("attn_type", ("multihead_attention",), _IGNORED)
    section.only("alibi", (True,), _IGNORED)
    section.only("alibi_bias_max", (8,), _IGNORED)
    section.only("qk_ln", (False,), _IGNORED)
    section.only("prefix_lm", (False,), _IGNORED)
    section.only("qk_gn", (False,), _IGNORED)
    section.only("fused_qkv", (True,), "the family has one tensor for query, key and value")
    section.only("kv_n_heads", (None, heads), _IGNORED)
    section.only("sliding_window_size", (-1,), _IGNORED)
    section.only("flex_attn_mod_list", ([],), _IGNORED)
    section.only("rope", (False,), _IGNORED)
    for key in ("rope_theta", "rope_impl", "rope_dail_config", "rope_hf_config"):  # no effect without rope
        section.ignore(key)
    for key in ("attn_impl", "attn_uses_sequence_id"):  # implementation; documents come with the batch
        section.ignore(key)
    section.finish()
    return {"clip_qkv": clip or None, "attention_multiplier": scale}


def rules(config: ModelConfig) -> list[Rule]:
    """Return all rules: query, key and value are joined along the rows."""
    width = config.hidden_size
    rules = [same(ours, theirs) for ours, theirs in _OUTER.items()]
    if not config.tie_word_embeddings:
        rules.append(same("lm_head.weight", "lm_head.weight"))
    for layer in range(config.num_hidden_layers):
        ours, theirs = f"blocks.{layer}.", f"transformer.blocks.{layer}."
        rules.append(joined(tuple(ours + part for part in _PARTS), f"{theirs}attn.Wqkv.weight", (width,) * 3))
        rules += [same(ours + name, theirs + other) for name, other in _INNER.items()]
    return rules


FAMILY = Family("mpt", "MptForCausalLM", config_to_huggingface, config_from_huggingface, rules)
