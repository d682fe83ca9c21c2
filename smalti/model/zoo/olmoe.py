"""Family ``olmoe``: experts in every layer; query and key are normalised over all heads, then clipped with the values.

Checked: transformers 5.23. Not stored in its folders, and read as their defaults:
``moe.z_loss_coef``, ``moe.router_initializer_range``, ``moe.router_lr_frac``, ``moe.kernel``.
"""

from smalti.config.model import ModelConfig
from smalti.model.zoo.family import Family
from smalti.model.zoo.fields import Fields, Json, shape_from_huggingface, shape_to_huggingface
from smalti.model.zoo.moe import moe_from_huggingface, moe_rules, moe_to_huggingface


def config_to_huggingface(config: ModelConfig) -> Json:
    """Return the fields of ``OlmoeConfig``."""
    assert config.moe is not None
    return {
        **shape_to_huggingface(config),
        **moe_to_huggingface(config, "num_experts"),
        "attention_bias": config.attention_bias,
        "clip_qkv": config.clip_qkv,
        "norm_topk_prob": config.moe.norm_topk_prob,
    }


def config_from_huggingface(raw: Json) -> ModelConfig:
    """Our config of a ``config.json``; absent keys take the defaults of ``OlmoeConfig``."""
    fields = Fields(raw)
    moe = moe_from_huggingface(fields, experts=64, per_token=8, loss_coef=0.01)
    return fields.build(
        {
            "family": "olmoe",
            **shape_from_huggingface(fields, max_positions=4096, norm_eps=1e-5),
            "head_dim": fields.take("head_dim", int, None),
            "attention_bias": fields.take("attention_bias", bool, False),
            "qk_norm": "full",
            "clip_qkv": fields.take("clip_qkv", float, None),
            "moe": {**moe, "norm_topk_prob": fields.take("norm_topk_prob", bool, False)},
        }
    )


FAMILY = Family("olmoe", "OlmoeForCausalLM", config_to_huggingface, config_from_huggingface, moe_rules)
