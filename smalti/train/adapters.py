"""Adapters in a run: they are added to its model, and they alone are trained and saved (and a reward model's score).

The base is loaded from ``init_from`` on each attempt; ``frozen_origins`` checks that it is the same.
"""

from typing import Any

import torch
from torch import Tensor, nn

from smalti.base.errors import UserError
from smalti.config.run import JobConfig, RunConfig
from smalti.distributed.group import world as worlds
from smalti.distributed.parallel import fsdp, pipeline
from smalti.model.adapters import peft
from smalti.model.adapters.adapter import names_of
from smalti.model.adapters.apply import apply, is_adapter, is_trained
from smalti.model.adapters.lora import draw
from smalti.model.decoder import Decoder
from smalti.model.dtypes import DTYPES


def has_adapter(config: JobConfig) -> bool:
    """Return whether the run trains adapters."""
    return isinstance(config, RunConfig) and config.adapter is not None


def refuse_own_model(config: JobConfig) -> None:
    """Raise UserError for a config with adapters, which are added to the model of the config alone."""
    if has_adapter(config):
        raise UserError(
            "the section adapter has no effect on a model of your own",
            allowed="adapters of the model that the config describes",
            hint="build(config) without model, or remove adapter",
        )


def add(model: Decoder, config: RunConfig) -> None:
    """Add the adapters of the config, if any, to a model on the meta device."""
    if config.adapter is not None:
        with torch.device("meta"):
            apply(model, config.adapter, compute=DTYPES[config.train.precision.compute])


def init(model: nn.Module, config: JobConfig) -> None:
    """Set the adapters of a model, which may be sharded, to their initial values: drawn, or those of a folder.

    The folder may have the score of a reward model too.
    """
    if not isinstance(config, RunConfig) or config.adapter is None:
        return
    parameters = {name: parameter for name, parameter in model.named_parameters() if is_trained(name)}
    values: dict[str, Tensor] = {}
    if config.adapter.init_from is not None:
        whole = pipeline.whole_shapes(model).parameters
        shapes = {name: shape for name, shape in whole.items() if is_adapter(name)}
        values = worlds.together(lambda: _read(config, shapes))
    with torch.no_grad():
        for name, parameter in parameters.items():
            if name in values:
                fsdp.assign(parameter, values[name])
            elif is_adapter(name):
                fsdp.assign(parameter, draw(name, parameter.shape, config.seed))


def _read(config: RunConfig, shapes: dict[str, tuple[int, ...]]) -> dict[str, Tensor]:
    """Return the weights in ``adapter.init_from``. UserError if its matrices are not those of the config."""
    assert config.adapter is not None
    folder = config.adapter.init_from
    assert folder is not None
    adapter = peft.load(folder, config.model)
    values = {
        name: value
        for weight, pair in adapter.pairs.items()
        for name, value in zip(names_of(weight), pair, strict=True)
    }
    there = {name: tuple(value.shape) for name, value in values.items()}
    if adapter.scale != config.adapter.scale or there != shapes:
        name = next((n for n in [*shapes, *there] if shapes.get(n) != there.get(n)), None)
        what = (
            f"the scale is {adapter.scale:g} there and {config.adapter.scale:g} here"
            if name is None
            else f"'{name}' is {there.get(name, 'absent')} there and {shapes.get(name, 'absent')} here"
        )
        raise UserError(
            f"adapter.init_from={folder} is not what the section adapter describes: {what}",
            allowed="the rank, alpha, rslora, targets and layers of the adapter in the folder",
            hint=f"see {folder}/{peft.CONFIG}",
        )
    return values | adapter.whole


def trained_only(model: nn.Module, tensors: dict[str, Any]) -> dict[str, Any]:
    """Return the entries of a state dict for a checkpoint: of a decoder with adapters what is trained, else all."""
    if not (isinstance(model, Decoder) and any(map(is_adapter, tensors))):
        return tensors
    return {name: tensor for name, tensor in tensors.items() if is_trained(name)}
