"""What a family must offer, and the parts of ``config.json`` and of the weights that families share.

The families that spell their configs and tensors as Llama does (all but MPT and DBRX) are made of the parts below.
torch is loaded when weights are converted, so that plans read configs without it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from smalti.config.model import ModelConfig
from smalti.model.zoo.fields import (
    LARGEST_LAYERS,
    Fields,
    Json,
    activation_to_huggingface,
    rope_from_huggingface,
    rope_to_huggingface,
)

if TYPE_CHECKING:
    from torch import Tensor

Weights = dict[str, "Tensor"]


class Rule(NamedTuple):
    """Some of our tensors and the tensors of theirs that hold the same numbers; the smallest unit of converting.

    A model is converted rule by rule, so never more than the tensors of one rule need be in memory. ``to_theirs`` takes
    the tensors of ``ours`` in that order and gives those of ``theirs``; ``to_ours`` is its inverse, and its results
    share no memory with each other. Both work on the meta device.
    """

    ours: tuple[str, ...]
    theirs: tuple[str, ...]
    to_theirs: "Callable[[list[Tensor]], list[Tensor]]"
    to_ours: "Callable[[list[Tensor]], list[Tensor]]"


@dataclass(frozen=True)
class Family:
    """Conversions of one family, both ways, for the config and for the weights."""

    model_type: str
    """``model_type`` in ``config.json``."""
    architecture: str
    """The class in transformers that reads it."""
    config_to_huggingface: Callable[[ModelConfig], Json]
    """What ``config.json`` says of the model; the kind, tokens and dtype are added by ``huggingface.py``."""
    config_from_huggingface: Callable[[Json], ModelConfig]
    """The reverse; DataError names what we do not compute."""
    rules: Callable[[ModelConfig], list[Rule]]
    """How the weights convert: every parameter of ``Decoder(config)`` is in exactly one rule."""


# ---- weights --------------------------------------------------------------------------------------------------------


def same(ours: str, theirs: str) -> Rule:
    """One tensor under another name."""
    return Rule((ours,), (theirs,), list, list)


def joined(ours: tuple[str, ...], theirs: str, rows: tuple[int, ...]) -> Rule:
    """Ours, of ``rows`` rows each, one below the other in one tensor of theirs."""
    return Rule(
        ours,
        (theirs,),
        _cat,
        lambda tensors: [part.clone() for part in tensors[0].split(rows)],
    )


def stacked(ours: str, theirs: tuple[str, ...], *, transposed: bool = False) -> Rule:
    """One tensor [E, F, D] of ours for E of theirs, each [F, D]; ``transposed``: [D, F]."""
    if transposed:
        return Rule(
            (ours,),
            theirs,
            lambda tensors: [part.T.contiguous() for part in tensors[0]],
            lambda tensors: _stack([part.T for part in tensors]),
        )
    return Rule((ours,), theirs, lambda tensors: list(tensors[0]), _stack)


def _cat(tensors: "list[Tensor]") -> "list[Tensor]":
    import torch

    return [torch.cat(tensors)]


def _stack(tensors: "list[Tensor]") -> "list[Tensor]":
    import torch

    return [torch.stack(tensors)]


def outer_rules(config: ModelConfig) -> list[Rule]:
    """Embedding, last norm, and the output head where it is not tied."""
    head = [] if config.tie_word_embeddings else [same("lm_head.weight", "lm_head.weight")]
    return [same("embed.weight", "model.embed_tokens.weight"), same("norm.weight", "model.norm.weight"), *head]


def attention_rules(config: ModelConfig, layer: int) -> list[Rule]:
    """The projections of one layer with their biases, and the norms of query and key where there are some."""
    names = [f"{part}_proj.{kind}" for part in "qkvo" for kind in ("weight", "bias")[: 1 + config.attention_bias]] + (
        ["q_norm.weight", "k_norm.weight"] if config.qk_norm else []
    )
    return [same(f"blocks.{layer}.attention.{name}", f"model.layers.{layer}.self_attn.{name}") for name in names]


def mlp_rules(config: ModelConfig, layer: int) -> list[Rule]:
    """The three matrices of a plain gated MLP with their biases."""
    kinds = ("weight", "bias")[: 1 + config.mlp_bias]
    names = [f"mlp.{part}_proj.{kind}" for part in ("gate", "up", "down") for kind in kinds]
    return [same(f"blocks.{layer}.{name}", f"model.layers.{layer}.{name}") for name in names]


def norm_rules(layer: int, attention: str = "input_layernorm", mlp: str = "post_attention_layernorm") -> list[Rule]:
    """The two norms of one layer, by their names."""
    ours, theirs = f"blocks.{layer}.", f"model.layers.{layer}."
    return [
        same(f"{ours}attention_norm.weight", f"{theirs}{attention}.weight"),
        same(f"{ours}mlp_norm.weight", f"{theirs}{mlp}.weight"),
    ]


def dense_rules(config: ModelConfig) -> list[Rule]:
    """Llama's names for a dense model whose norms stand before attention and MLP."""
    found = outer_rules(config)
    for layer in range(config.num_hidden_layers):
        found += norm_rules(layer) + attention_rules(config, layer) + mlp_rules(config, layer)
    return found


# ---- config.json ----------------------------------------------------------------------------------------------------


def shape_to_huggingface(config: ModelConfig) -> Json:
    """What every family says that spells its config as Llama does."""
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.kv_heads,
        "hidden_act": activation_to_huggingface(config),
        "max_position_embeddings": config.max_position_embeddings,
        "initializer_range": config.initializer_range,
        "rms_norm_eps": config.norm_eps,
        "attention_dropout": 0.0,
        "tie_word_embeddings": config.tie_word_embeddings,
        **rope_to_huggingface(config),
    }


def shape_from_huggingface(
    raw: Fields,
    *,
    max_positions: int,
    norm_eps: float,
    kv_heads: int | None = None,
    activation: str = "silu",
    rope_theta: float = 10_000.0,
) -> dict[str, Any]:
    """The reverse; the arguments are the family's defaults of absent keys (``kv_heads`` None: as many as heads)."""
    longest = raw.take("max_position_embeddings", int, max_positions)
    return {
        "vocab_size": raw.take("vocab_size", int),
        "hidden_size": raw.take("hidden_size", int),
        "intermediate_size": raw.take("intermediate_size", int),
        "num_hidden_layers": raw.take("num_hidden_layers", int, most=LARGEST_LAYERS),
        "num_attention_heads": raw.take("num_attention_heads", int),
        "num_key_value_heads": raw.take("num_key_value_heads", int, kv_heads),
        "activation": raw.activation("hidden_act", activation),
        "max_position_embeddings": longest,
        "initializer_range": raw.take("initializer_range", float, 0.02),
        "norm_eps": raw.take("rms_norm_eps", float, norm_eps),
        "tie_word_embeddings": raw.take("tie_word_embeddings", bool, False),
        **rope_from_huggingface(raw, rope_theta, longest),
    }
