"""The table of model families: which options of the model section each supports.

A family is a format of Hugging Face folders. An option that the format lacks must have its default, or the value that
the family fixes. ``decoder`` supports all options and has no such format.

A new family is a name and an entry here, and the module ``smalti/model/zoo/NAME.py`` with its ``FAMILY``.
"""

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Any, Literal

FamilyName = Literal["llama", "mistral", "qwen3", "olmo2", "mpt", "dbrx", "mixtral", "olmoe", "qwen3_moe", "decoder"]

_EVERY = {
    "family",
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "max_position_embeddings",
    "activation",
    "initializer_range",
}
_ROTARY = {"norm_eps", "rope_theta", "rope_scaling", "tie_word_embeddings"}
_SCORE = {"num_labels"}
_MOE = {
    "num_experts",
    "num_experts_per_tok",
    "balance_loss_coef",
    "global_balance_loss_coef",
    "z_loss_coef",
    "router_initializer_range",
    "router_lr_frac",
    "kernel",
}


@dataclass(frozen=True)
class FamilyOptions:
    """Options of the model section that a family supports."""

    free: AbstractSet[str]
    """Options that may have any value."""
    fixed: Mapping[str, Any] = field(default_factory=dict)
    """Options that must have this value; all others must have their default."""
    free_moe: AbstractSet[str] | None = None
    """Options of the ``moe`` section that may have any value, all others their default; None: a dense family."""
    is_divided_by_heads: bool = False
    """``hidden_size`` must be a multiple of ``num_attention_heads``."""
    mlp_ratio: int | None = None
    """``intermediate_size`` must be so many times ``hidden_size``."""


FAMILIES: dict[FamilyName, FamilyOptions] = {
    "llama": FamilyOptions(
        _EVERY | _ROTARY | _SCORE | {"head_dim", "attention_bias", "mlp_bias"}, is_divided_by_heads=True
    ),
    "mistral": FamilyOptions(_EVERY | _ROTARY | _SCORE | {"head_dim", "sliding_window"}),
    "qwen3": FamilyOptions(
        _EVERY | _ROTARY | _SCORE | {"head_dim", "attention_bias", "sliding_window", "layer_types"}, {"qk_norm": "head"}
    ),
    "olmo2": FamilyOptions(
        _EVERY | _ROTARY | _SCORE | {"attention_bias"},
        {"qk_norm": "full", "norm_placement": "post"},
        is_divided_by_heads=True,
    ),
    "mpt": FamilyOptions(
        (_EVERY - {"num_key_value_heads", "activation"})
        | {"norm_eps", "clip_qkv", "attention_multiplier", "tie_word_embeddings"},
        {"norm": "layernorm", "position": "alibi", "gated": False, "activation": "gelu"},
        is_divided_by_heads=True,
        mlp_ratio=4,
    ),
    "dbrx": FamilyOptions(
        _EVERY | {"rope_theta", "rope_scaling", "clip_qkv", "moe"},
        {"norm": "layernorm"},
        free_moe=_MOE | {"norm_topk_prob", "norm_topk_p"},
        is_divided_by_heads=True,
    ),
    "mixtral": FamilyOptions(_EVERY | _ROTARY | _SCORE | {"head_dim", "sliding_window", "moe"}, free_moe=_MOE),
    "olmoe": FamilyOptions(
        _EVERY | _ROTARY | {"attention_bias", "clip_qkv", "moe"},
        {"qk_norm": "full"},
        free_moe=_MOE | {"norm_topk_prob"},
        is_divided_by_heads=True,
    ),
    "qwen3_moe": FamilyOptions(
        _EVERY | _ROTARY | _SCORE | {"head_dim", "attention_bias", "sliding_window", "moe"},
        {"qk_norm": "head"},
        free_moe=_MOE | {"norm_topk_prob", "intermediate_size", "mlp_only_layers"},
    ),
}
"""Families and their options, without ``decoder``."""


def misfits(
    family: FamilyName, section: Mapping[str, Any], defaults: Mapping[str, Any], moe_defaults: Mapping[str, Any]
) -> list[str]:
    """Return the options of ``section`` that ``family`` does not support, as ``field=value (the allowed value)``.

    ``section`` has all fields of the model section; its ``moe`` is a mapping of fields too, or None.
    """
    options = FAMILIES.get(family)
    if options is None:
        return []
    breaks = []
    for name, default in defaults.items():
        must = options.fixed.get(name, default)
        if name not in options.free and section[name] != must:
            breaks.append(f"{name}={_shown(section[name])} ({_shown(must)} only)")
    if options.free_moe is not None and section["moe"] is None:
        breaks.append("moe absent (required)")
    if options.free_moe is not None and section["moe"] is not None:
        breaks += [
            f"moe.{name}"
            for name, value in section["moe"].items()
            if name not in options.free_moe and value != moe_defaults[name]
        ]
    width, heads = section["hidden_size"], section["num_attention_heads"]
    if options.is_divided_by_heads and width % heads:
        breaks.append(f"hidden_size={width} with num_attention_heads={heads} (multiples only, also with head_dim)")
    if options.mlp_ratio is not None and section["intermediate_size"] != options.mlp_ratio * width:
        breaks.append(f"intermediate_size={section['intermediate_size']} ({options.mlp_ratio} x hidden_size only)")
    return breaks


def _shown(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return {None: "absent", True: "true", False: "false"}[value]
    return str(value) if isinstance(value, str | int | float) else "given"
