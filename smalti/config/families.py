"""Which options of the model section each family can hold.

A family is a form in Hugging Face folders. An option that the family cannot spell must have its default, unless the
family fixes it to something else; ``decoder`` mixes freely and has no such form.
"""

from typing import Any

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
_MOE = {"num_experts", "num_experts_per_tok", "balance_loss_coef", "global_balance_loss_coef", "z_loss_coef", "kernel"}

FREE: dict[str, set[str]] = {
    "llama": _EVERY | _ROTARY | {"head_dim", "attention_bias", "mlp_bias"},
    "mistral": _EVERY | _ROTARY | {"head_dim", "sliding_window"},
    "qwen3": _EVERY | _ROTARY | {"head_dim", "attention_bias", "sliding_window", "layer_types"},
    "olmo2": _EVERY | _ROTARY | {"attention_bias"},
    "mpt": (_EVERY - {"num_key_value_heads", "activation"})
    | {"norm_eps", "clip_qkv", "attention_multiplier", "tie_word_embeddings"},
    "dbrx": _EVERY | {"rope_theta", "rope_scaling", "clip_qkv", "moe"},
    "mixtral": _EVERY | _ROTARY | {"head_dim", "sliding_window", "moe"},
    "olmoe": _EVERY | _ROTARY | {"attention_bias", "clip_qkv", "moe"},
    "qwen3_moe": _EVERY | _ROTARY | {"head_dim", "attention_bias", "sliding_window", "moe"},
}
"""Options that may have any value."""

FIXED: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {},
    "qwen3": {"qk_norm": "head"},
    "olmo2": {"qk_norm": "full", "norm_placement": "post"},
    "mpt": {
        "norm": "layernorm",
        "position": "alibi",
        "gated": False,
        "activation": "gelu",
    },
    "dbrx": {"norm": "layernorm"},
    "mixtral": {},
    "olmoe": {"qk_norm": "full"},
    "qwen3_moe": {"qk_norm": "head"},
}
"""Options that must have this value; all others must have their default."""

FREE_MOE: dict[str, set[str]] = {
    "dbrx": _MOE | {"norm_topk_prob", "norm_topk_p"},
    "mixtral": _MOE,
    "olmoe": _MOE | {"norm_topk_prob"},
    "qwen3_moe": _MOE | {"norm_topk_prob", "intermediate_size", "mlp_only_layers"},
}
"""The same for the ``moe`` section, where all others must have their default."""


def misfits(family: str, given: dict[str, Any], defaults: dict[str, Any]) -> list[str]:
    """What ``family`` cannot hold of the model section, as ``field=value (what it must be)``."""
    if family not in FREE:
        return []
    fixed = FIXED[family]
    found = []
    for name, default in defaults.items():
        must = fixed.get(name, default)
        if name not in FREE[family] and given[name] != must:
            found.append(f"{name}={_shown(given[name])} ({_shown(must)} only)")
    return found


def _shown(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return {None: "absent", True: "true", False: "false"}[value]
    return str(value) if isinstance(value, str | int | float) else "given"
