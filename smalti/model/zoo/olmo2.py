"""Family ``olmo2``: norms after attention and MLP (post-norm), and of query and key over all heads.

Checked: transformers 5.23.
"""

from smalti.config.model import ModelConfig
from smalti.model.zoo.family import Family
from smalti.model.zoo.fields import Fields, Json, shape_from_huggingface, shape_to_huggingface
from smalti.model.zoo.tensor_names import Rule, attention_rules, mlp_rules, norm_rules, outer_rules


def config_to_huggingface(config: ModelConfig) -> Json:
    """Return the fields of ``Olmo2Config``."""
    return {**shape_to_huggingface(config), "attention_bias": config.attention_bias}


def config_from_huggingface(raw: Json) -> ModelConfig:
    """Our config of a ``config.json``; absent keys take the defaults of ``Olmo2Config``."""
    fields = Fields(raw)
    return fields.build(
        {
            "family": "olmo2",
            **shape_from_huggingface(fields, max_positions=2048, norm_eps=1e-5),
            "head_dim": fields.take("head_dim", int, None),
            "attention_bias": fields.take("attention_bias", bool, False),
            "qk_norm": "full",
            "norm_placement": "post",
        }
    )


def rules(config: ModelConfig) -> list[Rule]:
    """Return all rules: only names differ; both norms of a layer are named after the block before them."""
    rules = outer_rules(config)
    for layer in range(config.num_hidden_layers):
        rules += norm_rules(layer, "post_attention_layernorm", "post_feedforward_layernorm")
        rules += attention_rules(config, layer) + mlp_rules(config, layer)
    return rules


FAMILY = Family("olmo2", "Olmo2ForCausalLM", config_to_huggingface, config_from_huggingface, rules)
