"""Family ``mistral``: Llama without biases, with a sliding window in every layer. Checked: transformers 5.23."""

from smalti.config.model import ModelConfig
from smalti.model.zoo.family import Family
from smalti.model.zoo.fields import Fields, Json, shape_from_huggingface, shape_to_huggingface
from smalti.model.zoo.tensor_names import dense_rules


def config_to_huggingface(config: ModelConfig) -> Json:
    """Return the fields of ``MistralConfig``."""
    return {
        **shape_to_huggingface(config),
        "head_dim": config.width_per_head,
        "sliding_window": config.sliding_window,
    }


def config_from_huggingface(raw: Json) -> ModelConfig:
    """Our config of a ``config.json``; absent keys take the defaults of ``MistralConfig``, a window of 4096 too."""
    fields = Fields(raw)
    return fields.build(
        {
            "family": "mistral",
            **shape_from_huggingface(fields, max_positions=4096 * 32, norm_eps=1e-6, kv_heads=8),
            "head_dim": fields.take("head_dim", int, None),
            "sliding_window": fields.take("sliding_window", int, 4096),
        }
    )


FAMILY = Family("mistral", "MistralForCausalLM", config_to_huggingface, config_from_huggingface, dense_rules)
