"""Family ``qwen3``: Llama with a norm of query and key in each head, and a window in some layers.

Checked: transformers 5.23.
"""

from smalti.config.model import ModelConfig
from smalti.model.zoo.family import Family
from smalti.model.zoo.fields import Fields, Json, shape_from_huggingface, shape_to_huggingface
from smalti.model.zoo.tensor_names import dense_rules


def config_to_huggingface(config: ModelConfig) -> Json:
    """Return the fields of ``Qwen3Config``.

    ``max_window_layers`` repeats ``layer_types`` for older readers, as far as it can.
    """
    windows = [config.window(layer) for layer in range(config.num_hidden_layers)]
    slides = [window is not None for window in windows]
    return {
        **shape_to_huggingface(config),
        "head_dim": config.width_per_head,
        "attention_bias": config.attention_bias,
        "use_sliding_window": any(slides),
        "sliding_window": next((window for window in windows if window), None),
        "max_window_layers": slides.index(True) if any(slides) else len(slides),
        "layer_types": ["sliding_attention" if sliding else "full_attention" for sliding in slides],
    }


def config_from_huggingface(raw: Json) -> ModelConfig:
    """Our config of a ``config.json``; absent keys take the defaults of ``Qwen3Config``."""
    fields = Fields(raw)
    shape = shape_from_huggingface(fields, max_positions=32768, norm_eps=1e-6, kv_heads=32)
    window, types = fields.take("sliding_window", int, 4096), fields.take("layer_types", list, None)
    first = fields.take("max_window_layers", int, 28)
    if any(kind not in ("full_attention", "sliding_attention") for kind in types or ()):
        raise fields.refusal("layer_types", "unknown kind of attention")
    if not fields.take("use_sliding_window", bool, False):
        window = None
    if types is None and window is not None:
        layers = range(shape["num_hidden_layers"])
        types = ["sliding_attention" if layer >= first else "full_attention" for layer in layers]
    slides = "sliding_attention" in (types or ())
    if not slides:
        window = types = None
    elif window is not None and "full_attention" not in types:
        types = None
    return fields.build(
        {
            "family": "qwen3",
            **shape,
            "head_dim": fields.take("head_dim", int, 128),
            "attention_bias": fields.take("attention_bias", bool, False),
            "qk_norm": "head",
            "sliding_window": window,
            "layer_types": types,
        }
    )


FAMILY = Family("qwen3", "Qwen3ForCausalLM", config_to_huggingface, config_from_huggingface, dense_rules)
