"""Family ``mixtral``: Mistral with a mixture in every layer, weights divided by their sum. Checked: transformers 5.23.

Not carried by its folders: ``moe.z_loss_coef`` and ``moe.kernel`` come back as their defaults.
"""

from smalti.config.model import ModelConfig
from smalti.model.zoo.family import Family, Rule, shape_from_huggingface, shape_to_huggingface
from smalti.model.zoo.fields import Fields, Json
from smalti.model.zoo.mixture import mixture_rules, moe_from_huggingface, moe_to_huggingface


def config_to_huggingface(config: ModelConfig) -> Json:
    """``MixtralConfig``."""
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
    """w1 is the gate, w3 goes up, w2 down."""
    return mixture_rules(config, "block_sparse_moe", ("w1", "w3", "w2"))


FAMILY = Family("mixtral", "MixtralForCausalLM", config_to_huggingface, config_from_huggingface, rules)
