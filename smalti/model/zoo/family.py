"""What a family must offer, and the readings of ``config.json`` that families share.

Promises: a ``config.json`` that asks for anything our blocks do not compute is refused by name, never approximated.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from smalti.base.errors import DataError
from smalti.config.model import ModelConfig

Json = dict[str, Any]
Weights = dict[str, Tensor]


class Rule(NamedTuple):
    """Some of our tensors and the tensors of theirs that hold the same numbers; the smallest unit of converting.

    A model is converted rule by rule, so never more than the tensors of one rule need be in memory. ``to_theirs`` takes
    the tensors of ``ours`` in that order and gives those of ``theirs``; ``to_ours`` is its inverse, and its results
    share no memory with each other. Both work on the meta device.
    """

    ours: tuple[str, ...]
    theirs: tuple[str, ...]
    to_theirs: Callable[[list[Tensor]], list[Tensor]]
    to_ours: Callable[[list[Tensor]], list[Tensor]]


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
    """The way back; DataError names what we do not compute."""
    rules: Callable[[ModelConfig], list[Rule]]
    """How the weights convert: every parameter of ``Decoder(config)`` is in exactly one rule."""


def same(ours: str, theirs: str) -> Rule:
    """One tensor under another name."""
    return Rule((ours,), (theirs,), list, list)


def joined(ours: tuple[str, ...], theirs: str, rows: tuple[int, ...]) -> Rule:
    """Ours, of ``rows`` rows each, one below the other in one tensor of theirs."""
    return Rule(
        ours,
        (theirs,),
        lambda tensors: [torch.cat(tensors)],
        lambda tensors: [part.clone() for part in tensors[0].split(rows)],
    )


def stacked(ours: str, theirs: tuple[str, ...], *, transposed: bool = False) -> Rule:
    """One tensor [E, F, D] of ours for E of theirs, each [F, D]; ``transposed``: [D, F]."""
    if transposed:
        return Rule(
            (ours,),
            theirs,
            lambda tensors: [part.T.contiguous() for part in tensors[0]],
            lambda tensors: [torch.stack([part.T for part in tensors])],
        )
    return Rule((ours,), theirs, lambda tensors: list(tensors[0]), lambda tensors: [torch.stack(tensors)])


def to_theirs(family: Family, config: ModelConfig, weights: Weights) -> Weights:
    """All weights under their names."""
    found: Weights = {}
    for rule in family.rules(config):
        found |= zip(rule.theirs, rule.to_theirs([weights[name] for name in rule.ours]), strict=True)
    return found


def to_ours(family: Family, config: ModelConfig, weights: Weights) -> Weights:
    """All weights under our names."""
    found: Weights = {}
    for rule in family.rules(config):
        found |= zip(rule.ours, rule.to_ours([weights[name] for name in rule.theirs]), strict=True)
    return found


def build_config(fields: Json) -> ModelConfig:
    """A ``ModelConfig`` from converted fields; a combination that it refuses is a DataError."""
    try:
        return ModelConfig(**fields)
    except ValueError as error:
        raise DataError(f"config.json describes a model that Smalti cannot build: {error}") from error


def need(config: Json, key: str) -> Any:
    """A key that must be there."""
    if config.get(key) is None:
        raise DataError(f"config.json has no '{key}'", hint="is this the config.json of a causal language model?")
    return config[key]


def refuse_unless(config: Json, key: str, allowed: tuple[Any, ...], why: str) -> None:
    """DataError when an option has a value that our blocks do not compute; an absent key is fine."""
    if key in config and config[key] not in allowed:
        raise DataError(f"config.json has {key}={config[key]!r}: {why}", allowed=" or ".join(map(repr, allowed)))


def read_activation(name: str) -> str:
    """Our name of Hugging Face's activation."""
    known = {
        "silu": "silu",
        "swish": "silu",
        "gelu": "gelu",
        "gelu_pytorch_tanh": "gelu_tanh",
        "gelu_new": "gelu_tanh",
        "relu": "relu",
    }
    if name not in known:
        raise DataError(f"config.json has the activation '{name}'", allowed=", ".join(known))
    return known[name]


def read_rope_theta(config: Json, older: Any = None) -> float:
    """The base of the rotary frequencies, from ``rope_parameters`` (transformers 5) or from ``older`` (before).

    Both may be present; then they must agree, because readers differ in which one they take.
    """
    refuse_unless(config, "rope_scaling", (None,), "scaled rotary embeddings are not supported")
    newer = config.get("rope_parameters") or {}
    kind = newer.get("rope_type", newer.get("type", "default"))
    if kind != "default":
        raise DataError(f"config.json has rope_type='{kind}': not supported", allowed="default")
    theta = newer.get("rope_theta")
    if theta is not None and older is not None and float(theta) != float(older):
        raise DataError(
            f"config.json gives two bases for the rotary frequencies: rope_parameters.rope_theta={theta} and {older}",
            hint="keep the one that the model was trained with",
        )
    return float(theta if theta is not None else older if older is not None else 10_000.0)
