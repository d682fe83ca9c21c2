"""What a family must offer, and the readings of ``config.json`` that families share.

Promises: a ``config.json`` that asks for anything our blocks do not compute is refused by name, never approximated.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from smalti.base.errors import DataError
from smalti.config.model import ModelConfig

Json = dict[str, Any]
Weights = dict[str, Tensor]


@dataclass(frozen=True)
class Family:
    """Conversions of one family, both ways, for the config and for the weights (names of whole tensors)."""

    model_type: str
    config_to_huggingface: Callable[..., Json]
    config_from_huggingface: Callable[[Json], ModelConfig]
    weights_to_huggingface: Callable[[ModelConfig, Weights], Weights]
    weights_from_huggingface: Callable[[ModelConfig, Weights], Weights]


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
    known = {"silu": "silu", "swish": "silu", "gelu": "gelu"}
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
