"""The presets ``depth-N`` and ``depth-N-moe``: a model of N layers, and a duration, batch and learning rate for it.

All sizes follow from N by published rules, which Smalti has not fitted itself, and none falls as N rises
(docs/concepts/model/presets.md).
"""

import math
import re
from typing import Any

DEEPEST = 128
"""Largest N."""

PATTERN = r"depth-([1-9][0-9]{0,2})(-moe)?"
"""Names of these presets."""

_ASPECT = 64
_WIDE = 2048
_CONTEXT_TOKENS = 2048
_EXPERTS, _CHOSEN = 16, 4


def depth_preset(name: str) -> dict[str, Any] | None:
    """Return the model section of ``depth-N`` or ``depth-N-moe`` with its train section as ``train``; None for others.

    The width is 64 for each layer (at equal size the loss hardly depends on the ratio: Kaplan et al. 2020,
    arXiv:2001.08361, figure 5), rounded up to pairs of heads of width 64, or 128 from N = 32 on; half as many key/value
    heads; SwiGLU of 8/3 of the width. ``depth-N-moe`` has DBRX's 16 experts, top-4, each a quarter as wide, so that
    about as many parameters are active. The heads satisfy the constraints of every model family.
    """
    match = re.fullmatch(PATTERN, name)
    if match is None or int(match[1]) > DEEPEST:
        return None
    layers = int(match[1])
    moe = match[2] is not None
    head_dim = 64 if layers * _ASPECT < _WIDE else 128
    width = _up(layers * _ASPECT, 2 * head_dim)
    heads = width // head_dim
    intermediate = _up(8 * width / 3, 128)
    model: dict[str, Any] = {
        "family": "dbrx" if moe else "llama",
        "vocab_size": 50432,
        "hidden_size": width,
        "intermediate_size": intermediate // _CHOSEN if moe else intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads // 2,
        "max_position_embeddings": _CONTEXT_TOKENS,
    }
    if moe:
        model |= {"norm": "layernorm", "clip_qkv": 8.0}
        model["moe"] = {"num_experts": _EXPERTS, "num_experts_per_tok": _CHOSEN}
    weights = width * head_dim * 2 * (heads + heads // 2) + 3 * width * intermediate
    flops_per_token = 6 * layers * weights + 12 * layers * width * _CONTEXT_TOKENS
    return {**model, "train": _training(flops_per_token)}


def rate_of_batch(lr: float, *, of_tokens: int, batch_tokens: int) -> float:
    """Return ``lr``, that of batches of ``of_tokens``, scaled to a smaller batch by the square root, to two digits.

    The square root is the rule for Adam (Malladi et al. 2022, arXiv:2205.10287); docs/log.md measured it down to a
    16th. For larger batches the rate is unchanged.
    """
    return lr if batch_tokens >= of_tokens else float(f"{lr * math.sqrt(batch_tokens / of_tokens):.2g}")


def _training(flops_per_token: int) -> dict[str, Any]:
    """Return the train section by the scaling laws of DeepSeek LLM (Bi et al. 2024, arXiv:2401.02954, equations 1, 2
    and 4).

    M, the FLOPs of a token without the vocabulary (for an MoE of the active parameters), gives the optimal compute C by
    M = 0.1715 C^0.5243. C gives the duration, 5.8316 C^0.4757 tokens, the batch, 0.2920 C^0.3271 tokens, rounded to a
    power of two, and the learning rate, 0.3118 C^-0.125. The laws were fitted on dense models of 1e17 to 3e20 FLOPs.
    """
    compute_flops = (flops_per_token / 0.1715) ** (1 / 0.5243)
    return {
        "duration": f"{_two_digits(5.8316 * compute_flops**0.4757)}tok",
        "global_batch_tokens": max(_CONTEXT_TOKENS, 2 ** round(math.log2(0.2920 * compute_flops**0.3271))),
        "optimizer": {"lr": float(f"{0.3118 * compute_flops**-0.125:.2g}")},
    }


def _up(value: float, multiple: int) -> int:
    return math.ceil(value / multiple) * multiple


def _two_digits(value: float) -> str:
    return f"{value:.1e}".replace("e+0", "e").replace("e+", "e")
