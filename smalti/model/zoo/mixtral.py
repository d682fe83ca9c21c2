"""Family ``mixtral``: Mistral with experts in every layer, router weights divided by their sum.

Checked: transformers 5.23. Not stored in its folders, and read as their defaults:
``moe.z_loss_coef``, ``moe.router_initializer_range``, ``moe.router_lr_frac``, ``moe.kernel``.
"""

from smalti.config.model import ModelConfig
from smalti.model.zoo.family import Family
from smalti.model.zoo.fields import Fields, Json, shape_from_huggingface, shape_to_huggingface
from smalti.model.zoo.moe import moe_from_huggingface, moe_rules, moe_to_huggingface
from smalti.model.zoo.tensor_names import Rule


def config_to_huggingface(config: ModelConfig) -> Json:
    """Return the fields of ``MixtralConfig``."""
    return {
        **shape_to_huggingface(config),
        **moe_to_huggingface(config, "num_local_experts"),
        "head_dim": config.width_per_head,
        "sliding_window": config.sliding_window,
        "router_jitter_noise": 0.0,
    }


def config_from_huggingface(raw: Json) -> ModelConfig:
    """Our config of a ``config.json``; absent keys take the defaults of ``MixtralConfig``."""
    fields = Fields(raw)
    fields.only("router_jitter_noise", (0,), "our router adds no noise")
    shape = shape_from_huggingface(fields, max_positions=4096 * 32, norm_eps=1e-5, kv_heads=8, rope_theta=1_000_000.0)
    return fields.build(
        {
            "family": "mixtral",
            **shape,
            "head_dim": fields.take("head_dim", int, None),
            "sliding_window": fields.take("sliding_window", int, None),
            "moe": moe_from_huggingface(fields, experts=8, per_token=2, loss_coef=0.001),
        }
    )


def rules(config: ModelConfig) -> list[Rule]:
    """Return all rules: w1 is the gate projection, w3 up, w2 down."""
    return moe_rules(config, "block_sparse_moe", ("w1", "w3", "w2"))


FAMILY = Family("mixtral", "MixtralForCausalLM", config_to_huggingface, config_from_huggingface, rules)
