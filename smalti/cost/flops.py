"""Floating-point operations of one training token, by the formula of the plan and of the reported MFU.

Public MFU figures differ by formula before they differ by speed: some count the embedding, some halve attention because
the causal mask makes half of it unnecessary. A Llama-3-8B token at 8,192 is 57.9 GFLOP by the formula here and 51.5 by
the halved one. So compare tokens per second first, and MFU only under one ``FORMULA``. The formulas of others, and what
an MFU under one is under another, are in ``plan/flops_conventions.py``.
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
"""The variant that halves attention, for comparison with stacks that report it."""


Recompute = Literal["none", "attention", "full"]
"""What the backward pass recomputes: nothing, the scores of attention, whole blocks."""


def train_flops_per_token(config: ModelConfig, seq_len: int) -> int:
    """FLOPs of forward and backward for one token under ``FORMULA``; a multiply-add is two.

    6 N: 2 forward, 4 backward (Kaplan et al. 2020, appendix; Chowdhery et al. 2022, PaLM, appendix B). Attention: two
    matmuls of ``heads x head_dim x seq_len`` forward, twice that backward, 2 FLOPs each: 12; a layer with a sliding
    window has at most the window's keys. Recomputation (activation checkpointing) is work, not progress, and is not
    counted. A document mask is not subtracted either, and elementwise work (norms, biases, ALiBi, caps) is left out.
    """
    return 6 * count(config).matmul_active + 12 * _width(config) * sum(_spans(config, seq_len))


def train_flops_per_token_causal(config: ModelConfig, seq_len: int) -> int:
    """The same under ``CAUSAL_FORMULA``: attention halved; with a window w, w - w^2 / 2s keys in place of s / 2."""
    return 6 * count(config).matmul_active + round(12 * _width(config) * sum(_causal_spans(config, seq_len)))


def recomputed_flops_per_token(
    config: ModelConfig, seq_len: int, recompute: Recompute, *, causal: bool = False
) -> float:
    """FLOPs of a token that are recomputed: they count for HFU, not for MFU.

    ``full``: the forward pass of every block, not of the output head. ``attention``: only the two products with scores,
    2 x 2 x heads x head_dim x keys a layer (selective recomputation, Korthikanti et al. 2022, arXiv 2205.05198).
    """
    keys = sum(_causal_spans(config, seq_len)) if causal else float(sum(_spans(config, seq_len)))
    attention = 4 * _width(config) * keys
    params = count(config)
    blocks = 2 * (params.matmul_active - params.embedding) + attention
    return {"none": 0.0, "attention": attention, "full": blocks}[recompute]


def mfu(tokens_per_s: float, flops_per_token: float, peak_flops_per_s: float) -> float:
    """Model FLOPs utilisation as a fraction; ``peak_flops_per_s`` is that of all devices together."""
    return tokens_per_s * flops_per_token / peak_flops_per_s


def _width(config: ModelConfig) -> int:
    return config.num_attention_heads * config.width_per_head


def _spans(config: ModelConfig, seq_len: int) -> list[int]:
    """The most keys that a token of each layer has."""
    return [min(seq_len, config.window(layer) or seq_len) for layer in range(config.num_hidden_layers)]


def _causal_spans(config: ModelConfig, seq_len: int) -> list[float]:
    """The keys that a token of each layer has on average behind a causal mask."""
    return [span - span**2 / (2 * seq_len) for span in _spans(config, seq_len)]
