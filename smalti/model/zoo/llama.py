"""Family ``llama`` (2 and 3): dense, RMSNorm, gated MLP, grouped queries. Checked: transformers 5.23."""

from smalti.config.model import ModelConfig
from smalti.model.zoo.family import Family
from smalti.model.zoo.fields import Fields, Json, shape_from_huggingface, shape_to_huggingface
from smalti.model.zoo.tensor_names import dense_rules


def config_to_huggingface(config: ModelConfig) -> Json:
    """Return the fields of ``LlamaConfig``."""
    return {
        **shape_to_huggingface(config),
        "head_dim": config.width_per_head,
        "attention_bias": config.attention_bias,
        "mlp_bias": config.mlp_bias,
        "pretraining_tp": 1,
    }


def config_from_huggingface(raw: Json) -> ModelConfig:
    """Our config of a ``config.json``; absent keys take the defaults of ``LlamaConfig``."""
    fields = Fields(raw)
    return fields.build(
        {
            "family": "llama",
            **shape_from_huggingface(fields, max_positions=2048, norm_eps=1e-6),
            "head_dim": fields.take("head_dim", int, None),
            "attention_bias": fields.take("attention_bias", bool, False),
            "mlp_bias": fields.take("mlp_bias", bool, False),
        }
    )


FAMILY = Family("llama", "LlamaForCausalLM", config_to_huggingface, config_from_huggingface, dense_rules)
