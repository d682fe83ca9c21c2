"""Floating-point operations of one training token, by the formula of the plan and of the reported MFU.

Published MFU figures use different formulas: some count the embedding, some halve attention because of the causal mask.
So compare MFU only under one ``FORMULA``. ``plan/flops_conventions.py`` has the formulas of others and converts MFU
between them.
"""

from typing import Literal

from smalti.config.model import ModelConfig
from smalti.cost.params import count

FORMULA = "6N+12LHQS"
"""Name of the formula behind every MFU of Smalti; printed wherever an MFU is printed in full."""

FORMULA_TEXT = (
    "6 x matmul parameters a token meets (output head counted, embedding lookup not, active experts only) "
    "+ 12 x layers x heads x head_dim x seq_len (attention, not halved for causality; at most a layer's window)"
)
"""``FORMULA`` in words."""

CAUSAL_FORMULA = "6N+6LHQS"
"""The variant that halves attention, for comparison with stacks that report it.

A Llama-3-8B token at 8,192 is 51.5 GFLOP by it and 57.9 by ``FORMULA``.
"""


Recompute = Literal["none", "attention", "full"]
"""Parts that the backward pass recomputes: none, the scores of attention, whole blocks."""


def train_flops_per_token(config: ModelConfig, seq_len: int, *, frozen: bool = False) -> int:
    """Return the FLOPs of forward and backward for one token under ``FORMULA``; a multiply-add is two.

    frozen: only adapters are trained, so the matrices have no gradient: 4 N, and the adapters' own work is left out.

    6 N: 2 forward, 4 backward (Kaplan et al. 2020, appendix; Chowdhery et al. 2022, PaLM, appendix B). Attention: two
    matmuls of ``heads x head_dim x seq_len`` forward, twice that backward, 2 FLOPs each: 12; a layer with a sliding
    window has at most the window's keys. Recomputation (activation checkpointing) is work, not progress, and is not
    counted. A document mask is not subtracted either, and elementwise work (norms, biases, ALiBi, caps) is left out.
    """
    return (4 if frozen else 6) * count(config).matmul_active + 12 * _width(config) * sum(_spans(config, seq_len))


def train_flops_per_token_causal(config: ModelConfig, seq_len: int) -> int:
    """Return the FLOPs under ``CAUSAL_FORMULA``: attention halved; with a window w, w - w^2 / 2s keys instead of s /
    2."""
    return 6 * count(config).matmul_active + round(12 * _width(config) * sum(_causal_spans(config, seq_len)))


def recomputed_flops_per_token(
    config: ModelConfig, seq_len: int, recompute: Recompute, *, causal: bool = False
) -> float:
    """Return the FLOPs of a token that are recomputed, which count for HFU, not for MFU.

    ``full``: the forward pass of every block, not of the output head. ``attention``: only the two products with scores,
    2 x 2 x heads x head_dim x keys a layer (selective recomputation, Korthikanti et al. 2022, arXiv 2205.05198).
    """
    keys = sum(_causal_spans(config, seq_len)) if causal else float(sum(_spans(config, seq_len)))
    attention = 4 * _width(config) * keys
    params = count(config)
    blocks = 2 * (params.matmul_active - params.output) + attention
    return {"none": 0.0, "attention": attention, "full": blocks}[recompute]


def mfu(tokens_per_s: float, flops_per_token: float, peak_flops_per_s: float) -> float:
    """Return the model FLOPs utilisation, 0 to 1; ``peak_flops_per_s`` is of all devices together."""
    return tokens_per_s * flops_per_token / peak_flops_per_s


def _width(config: ModelConfig) -> int:
    return config.num_attention_heads * config.width_per_head


def _spans(config: ModelConfig, seq_len: int) -> list[int]:
    """Return the most keys that a token attends to, for each layer."""
    return [min(seq_len, config.window(layer) or seq_len) for layer in range(config.num_hidden_layers)]


def _causal_spans(config: ModelConfig, seq_len: int) -> list[float]:
    """Return the keys that a token attends to on average under a causal mask, for each layer."""
    return [span - span**2 / (2 * seq_len) for span in _spans(config, seq_len)]
