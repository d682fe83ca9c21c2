"""Maps Hugging Face's tensor names to ours: a ``Rule`` for each tensor, or group of tensors, that is converted.

The names of Llama's layers, which all families but MPT and DBRX use, are here; the other names are in the family's
module. torch is loaded when weights are converted, so that plans read configs without it.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from smalti.config.model import ModelConfig

if TYPE_CHECKING:
    from torch import Tensor

Weights = dict[str, "Tensor"]


class Rule(NamedTuple):
    """Tensors of ours, the tensors of Hugging Face ("theirs") that hold the same numbers, and both conversions.

    Models are converted rule by rule, so only the tensors of one rule must be in memory. ``to_theirs`` takes the
    tensors of ``ours`` in that order and returns those of ``theirs``; ``to_ours`` is its inverse, and its results share
    no memory with each other. Both work on the meta device.
    """

    ours: tuple[str, ...]
    theirs: tuple[str, ...]
    to_theirs: "Callable[[list[Tensor]], list[Tensor]]"
    to_ours: "Callable[[list[Tensor]], list[Tensor]]"


def same(ours: str, theirs: str) -> Rule:
    """Return the rule of a tensor that only has another name."""
    return Rule((ours,), (theirs,), list, list)


def joined(ours: tuple[str, ...], theirs: str, rows: tuple[int, ...]) -> Rule:
    """Return the rule of tensors, of ``rows`` rows each, that Hugging Face concatenates along the rows."""
    return Rule(
        ours,
        (theirs,),
        _cat,
        lambda tensors: [part.clone() for part in tensors[0].split(rows)],
    )


def stacked(ours: str, theirs: tuple[str, ...], *, transposed: bool = False) -> Rule:
    """Return the rule of a tensor [E, F, D] that Hugging Face stores as E tensors [F, D]; ``transposed``: [D, F]."""
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
    """Return the rules of embedding, last norm and, unless it is tied, output head; of a reward model the scores."""
    head = [] if config.tie_word_embeddings else [same("lm_head.weight", "lm_head.weight")]
    if config.num_labels:
        head = [same("score.weight", "score.weight")]
    return [same("embed.weight", "model.embed_tokens.weight"), same("norm.weight", "model.norm.weight"), *head]


def attention_rules(config: ModelConfig, layer: int) -> list[Rule]:
    """Return the rules of a layer's projections and their biases, and of its query and key norms if it has them."""
    names = [f"{part}_proj.{kind}" for part in "qkvo" for kind in ("weight", "bias")[: 1 + config.attention_bias]] + (
        ["q_norm.weight", "k_norm.weight"] if config.qk_norm else []
    )
    return [same(f"blocks.{layer}.attention.{name}", f"model.layers.{layer}.self_attn.{name}") for name in names]


def mlp_rules(config: ModelConfig, layer: int) -> list[Rule]:
    """Return the rules of the three matrices of a gated MLP and their biases."""
    kinds = ("weight", "bias")[: 1 + config.mlp_bias]
    names = [f"mlp.{part}_proj.{kind}" for part in ("gate", "up", "down") for kind in kinds]
    return [same(f"blocks.{layer}.{name}", f"model.layers.{layer}.{name}") for name in names]


def norm_rules(layer: int, attention: str = "input_layernorm", mlp: str = "post_attention_layernorm") -> list[Rule]:
    """Return the rules of a layer's two norms; ``attention`` and ``mlp`` are Hugging Face's names of them."""
    ours, theirs = f"blocks.{layer}.", f"model.layers.{layer}."
    return [
        same(f"{ours}attention_norm.weight", f"{theirs}{attention}.weight"),
        same(f"{ours}mlp_norm.weight", f"{theirs}{mlp}.weight"),
    ]


def dense_rules(config: ModelConfig) -> list[Rule]:
    """Return all rules of a dense model with pre-norm, as Llama's."""
    rules = outer_rules(config)
    for layer in range(config.num_hidden_layers):
        rules += norm_rules(layer) + attention_rules(config, layer) + mlp_rules(config, layer)
    return rules
