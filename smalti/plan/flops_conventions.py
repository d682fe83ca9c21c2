"""FLOPs per token under the conventions of others, and conversion of an MFU between them.

Each convention is the formula that its source prints or runs, with its omissions. An MFU is tokens/s x FLOPs per
token / peak, so the quotient of the two counts converts it, on any hardware. Differences between peaks (989 and
989.4 TFLOP/s, bf16 and fp8) are left to the caller.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

from smalti.base.errors import UserError, nearest
from smalti.config.model import ModelConfig
from smalti.cost.flops import (
    CAUSAL_FORMULA,
    FORMULA,
    Recompute,
    recomputed_flops_per_token,
    train_flops_per_token,
    train_flops_per_token_causal,
)
from smalti.cost.params import count

LONGEST = 1_000_000_000
"""Longest sequence in tokens; more is taken for a typing error."""


@dataclass(frozen=True)
class Convention:
    """A formula for the FLOPs of a training token, forward and backward."""

    name: str
    """Name as typed: ``llm-foundry``."""
    symbols: str
    """Formula in N parameters, L layers, H heads, Q their width, d the model's, S tokens per sequence, V vocabulary."""
    note: str
    """Description of what is counted and what is left out."""
    source: str
    """Publication or implementation."""
    count: Callable[[ModelConfig, int], float]
    """Function of a config and a sequence length that returns the FLOPs per token."""
    causal: bool = False
    """True if attention is halved for the causal mask."""
    recomputes_head: bool = False
    """True if, in its HFU, full recomputation repeats the whole forward pass, output head included."""


def _six_n(config: ModelConfig, seq_len: int) -> float:
    return 6 * count(config).active


def _six_n_non_embedding(config: ModelConfig, seq_len: int) -> float:
    params = count(config)
    return 6 * (params.active - params.embedding - params.head)


def _without_lookup(config: ModelConfig) -> int:
    """Return the active parameters with norms and biases; the embedding only if it is tied to the output head."""
    params = count(config)
    return params.active - (0 if config.tie_word_embeddings else params.embedding)


def _whole_attention(config: ModelConfig, seq_len: int) -> int:
    """Return 12 L H Q S: every layer attends to the whole sequence."""
    return 12 * config.num_hidden_layers * config.num_attention_heads * config.width_per_head * seq_len


def _palm(config: ModelConfig, seq_len: int) -> float:
    return 6 * count(config).active + _whole_attention(config, seq_len)


def _llm_foundry(config: ModelConfig, seq_len: int) -> float:
    attention = 12 * config.num_hidden_layers * config.hidden_size * seq_len
    return 6 * _without_lookup(config) + attention


def _torchtitan(config: ModelConfig, seq_len: int) -> float:
    spans = sum(min(seq_len, config.window(layer) or seq_len) for layer in range(config.num_hidden_layers))
    return 6 * _without_lookup(config) + 12 * config.num_attention_heads * config.width_per_head * spans


def _megatron(config: ModelConfig, seq_len: int) -> float:
    params = count(config)
    return 6 * (params.matmul_active - params.router) + _whole_attention(config, seq_len) / 2


def _megatron_2021(config: ModelConfig, seq_len: int) -> float:
    _must_be_like_gpt(config)
    layers, hidden, vocab = config.num_hidden_layers, config.hidden_size, config.vocab_size
    return 72 * layers * hidden**2 * (1 + seq_len / (6 * hidden) + vocab / (12 * layers * hidden))


def _must_be_like_gpt(config: ModelConfig) -> None:
    """Raise UserError for models without GPT-3's proportions, which the formula of 2021 assumes."""
    wrong = [
        text
        for is_wrong, text in (
            (config.moe is not None, "experts"),
            (config.gated, "a gated MLP"),
            (config.intermediate_size != 4 * config.hidden_size, "an MLP that is not 4 times as wide"),
            (config.kv_heads != config.num_attention_heads, "shared keys and values"),
            (config.num_attention_heads * config.width_per_head != config.hidden_size, "heads wider than the model"),
        )
        if is_wrong
    ]
    if wrong:
        raise UserError(
            f"the convention 'megatron-2021' is not defined for {', '.join(wrong)}",
            allowed="models with the proportions of GPT-3",
            hint="megatron is what Megatron-LM counts today",
        )


_ALL = (
    Convention(
        "exact",
        FORMULA,
        "Smalti's: N counts matmuls only, with output head and router, without embedding, norms and biases",
        "Kaplan et al. 2020, Chowdhery et al. 2022 (appendix B), counted by layer",
        train_flops_per_token,
    ),
    Convention(
        "exact-causal",
        CAUSAL_FORMULA,
        "as exact, with attention halved for the causal mask",
        "as exact",
        train_flops_per_token_causal,
        causal=True,
    ),
    Convention(
        "6n",
        "6N",
        "all active parameters, embedding included; no attention over the sequence",
        "Kaplan et al. 2020; Hoffmann et al. 2022 count N this way",
        _six_n,
    ),
    Convention(
        "6n-non-embedding",
        "6N",
        "parameters of the blocks only: neither embedding nor output head",
        "Kaplan et al. 2020, section 2.1",
        _six_n_non_embedding,
    ),
    Convention(
        "palm",
        "6N+12LHQS",
        "all parameters, embedding and head both; attention whole",
        "Chowdhery et al. 2022 (arXiv 2204.02311), appendix B",
        _palm,
    ),
    Convention(
        "llm-foundry",
        "6N+12LdS",
        "all parameters but an untied embedding; d is the model's width, whatever the heads have",
        "llm-foundry, flops_per_batch of modeling_mpt.py; scripts/train/benchmarking/README.md",
        _llm_foundry,
        recomputes_head=True,
    ),
    Convention(
        "torchtitan",
        "6N+12LHQS",
        "all parameters but an untied embedding; a sliding window bounds S",
        "torchtitan 01c01c8, models/utils.py",
        _torchtitan,
    ),
    Convention(
        "megatron",
        "6N+6LHQS",
        "N of matmuls with the output head, without the router; attention halved, windows ignored",
        "Megatron-LM 001b00c, training.py, num_floating_point_operations",
        _megatron,
        causal=True,
    ),
    Convention(
        "megatron-2021",
        "72Ld^2(1+S/6d+V/12Ld)",
        "models with GPT-3's proportions; attention whole, output head counted",
        "Narayanan et al. 2021 (arXiv 2104.04473), equation 3 without its recomputation",
        _megatron_2021,
    ),
)

CONVENTIONS = {convention.name: convention for convention in _ALL}
"""Name -> convention."""


def convention(name: str) -> Convention:
    """Return the named convention; ``exact`` also by its formula. Raises UserError with the nearest name otherwise."""
    typed = name.strip().lower().replace("_", "-")
    resolved = {FORMULA.lower(): "exact", CAUSAL_FORMULA.lower(): "exact-causal"}.get(typed, typed)
    if resolved not in CONVENTIONS:
        close = nearest(typed, CONVENTIONS)
        raise UserError(
            f"'{name}' is not a known convention of counting FLOPs",
            allowed=", ".join(CONVENTIONS),
            hint=f"did you mean '{close}'?" if close else "smalti plan flops MODEL lists them",
        )
    return CONVENTIONS[resolved]


def flops_per_token(config: ModelConfig, seq_len: int, name: str = "exact") -> float:
    """Return the FLOPs of forward and backward per token of a sequence of ``seq_len``, under the named convention."""
    return float(convention(name).count(config, _checked(seq_len)))


def train_flops(config: ModelConfig, tokens: float, seq_len: int, name: str = "exact") -> float:
    """Return the FLOPs of training on ``tokens``, under the named convention."""
    if not 0 < tokens < math.inf:
        raise UserError(f"{tokens} tokens are out of range", allowed="a number above 0")
    return tokens * flops_per_token(config, seq_len, name)


def convert_mfu(mfu: float, config: ModelConfig, seq_len: int, *, source: str, target: str) -> float:
    """Convert an MFU reported under ``source`` to ``target``, at the same tokens/s and peak."""
    return _share(mfu) * flops_per_token(config, seq_len, target) / flops_per_token(config, seq_len, source)


def tokens_per_s(mfu: float, config: ModelConfig, seq_len: int, *, name: str, peak_flops_per_s: float) -> float:
    """Return the throughput at an MFU under ``name``; ``peak_flops_per_s`` is that of all devices together."""
    return _share(mfu) * peak_flops_per_s / flops_per_token(config, seq_len, name)


def hfu(mfu: float, config: ModelConfig, seq_len: int, *, recompute: Recompute, name: str = "exact") -> float:
    """Return the hardware FLOPs utilisation of a run with that MFU under ``name``: recomputation counts too."""
    chosen = convention(name)
    flops = flops_per_token(config, seq_len, name)
    again = recomputed_flops_per_token(config, seq_len, recompute, causal=chosen.causal)
    if chosen.recomputes_head and recompute == "full":
        again = flops / 3
    return _share(mfu) * (flops + again) / flops


def _checked(seq_len: int) -> int:
    if not 1 <= seq_len <= LONGEST:
        raise UserError(f"a sequence of {seq_len} tokens is out of range", allowed=f"1 to {LONGEST:,} tokens")
    return seq_len


def _share(mfu: float) -> float:
    if not 0 < mfu <= 1:
        raise UserError(
            f"an MFU of {mfu} is out of range", allowed="above 0, up to 1", hint="50.7 % is 0.507" if mfu > 1 else None
        )
    return mfu
