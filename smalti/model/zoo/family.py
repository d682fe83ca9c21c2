"""``Family``: the conversions that each model family's module defines, as ``FAMILY``."""

from collections.abc import Callable
from dataclasses import dataclass

from smalti.config.model import ModelConfig
from smalti.model.zoo.fields import Json
from smalti.model.zoo.tensor_names import Rule


@dataclass(frozen=True)
class Family:
    """Conversions of a family's config and weights, from and to Hugging Face."""

    model_type: str
    """``model_type`` in ``config.json``."""
    architecture: str
    """Name of the class in transformers."""
    config_to_huggingface: Callable[[ModelConfig], Json]
    """Converts to the keys of ``config.json``; ``huggingface.py`` adds model type, tokens and dtype."""
    config_from_huggingface: Callable[[Json], ModelConfig]
    """The inverse; DataError names an option that is not supported."""
    rules: Callable[[ModelConfig], list[Rule]]
    """Returns the rules of the weights: every parameter of ``Decoder(config)`` is in exactly one."""
