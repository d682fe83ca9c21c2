"""Family ``qwen3_moe``: Qwen3 with experts in some or all layers. Checked: transformers 5.23.

Not stored in its folders, and read as their defaults:
``moe.z_loss_coef``, ``moe.router_initializer_range``, ``moe.router_lr_frac``, ``moe.kernel``.
"""

from smalti.config.model import ModelConfig
from smalti.model.zoo.family import Family
from smalti.model.zoo.fields import Fields, Json, shape_from_huggingface, shape_to_huggingface
from smalti.model.zoo.moe import moe_from_huggingface, moe_rules, moe_to_huggingface


def config_to_huggingface(config: ModelConfig) -> Json:
    """Return the fields of ``Qwen3MoeConfig``; dense layers are listed one by one."""
    assert config.moe is not None
    return {
        **shape_to_huggingface(config),
        **moe_to_huggingface(config, "num_experts"),
        "head_dim": config.width_per_head,
        "attention_bias": config.attention_bias,
        "use_sliding_window": config.sliding_window is not None,
        "sliding_window": config.sliding_window,
        "decoder_sparse_step": 1,
        "mlp_only_layers": list(config.moe.mlp_only_layers),
        "moe_intermediate_size": config.expert_width,
        "norm_topk_prob": config.moe.norm_topk_prob,
    }


def config_from_huggingface(raw: Json) -> ModelConfig:
    """Our config of a ``config.json``; absent keys take the defaults of ``Qwen3MoeConfig``, a window of 4096 too."""
    fields = Fields(raw)
    shape = shape_from_huggingface(fields, max_positions=32768, norm_eps=1e-6, kv_heads=4)
    moe = moe_from_huggingface(fields, experts=128, per_token=8, loss_coef=0.001)
    inner = fields.take("moe_intermediate_size", int, 768)
    return fields.build(
        {
            "family": "qwen3_moe",
            **shape,
            "head_dim": fields.take("head_dim", int, None),
            "attention_bias": fields.take("attention_bias", bool, False),
            "qk_norm": "head",
            "sliding_window": _window(fields),
            "moe": {
                **moe,
                "intermediate_size": None if inner == shape["intermediate_size"] else inner,
                "mlp_only_layers": _dense_layers(fields, shape["num_hidden_layers"]),
                "norm_topk_prob": fields.take("norm_topk_prob", bool, False),
            },
        }
    )


def _window(fields: Fields) -> int | None:
    """Return the window of all layers. Hub folders have ``max_window_layers`` too, which transformers does not read."""
    window: int | None = fields.take("sliding_window", int, 4096)
    first = fields.take("max_window_layers", int, None)
    if not fields.take("use_sliding_window", bool, False):
        return None
    if window is not None and first is not None:
        raise fields.refusal("max_window_layers", "readers differ on which layers have the window", allowed="absent")
    return window


def _dense_layers(fields: Fields, layers: int) -> list[int]:
    """Return the listed layers and, with a ``decoder_sparse_step`` of n, all but every n-th."""
    step = fields.take("decoder_sparse_step", int, 1)
    if step is None or step < 1:
        raise fields.refusal("decoder_sparse_step", "not a step", allowed="1 or more")
    listed = fields.take("mlp_only_layers", list, None) or []
    return [layer for layer in range(layers) if layer in listed or (layer + 1) % step]


FAMILY = Family("qwen3_moe", "Qwen3MoeForCausalLM", config_to_huggingface, config_from_huggingface, moe_rules)
