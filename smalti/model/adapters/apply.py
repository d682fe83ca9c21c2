"""Adds the adapters of a config to a decoder, and freezes its weights."""

import re

import torch
from torch import nn

from smalti.config.adapter import AdapterConfig
from smalti.model.adapters.lora import LoRAExperts, LoRALinear
from smalti.model.blocks.moe.experts import Experts
from smalti.model.decoder import Decoder

_NAME = re.compile(r"blocks\.\d+\..+[._]lora_[AB]")


def is_adapter(name: str) -> bool:
    """Return whether a parameter's name is that of an adapter."""
    return _NAME.fullmatch(name) is not None


def apply(model: Decoder, config: AdapterConfig, *, compute: torch.dtype = torch.float32) -> None:
    """Add adapters in place, their values left to the caller, and freeze all other parameters in the dtype ``compute``.

    Frozen weights are never updated, so a copy in a wider dtype would only be cast in every pass. Modules with
    ``full_precision`` keep their dtype.
    """
    for module in model.modules():
        if not getattr(module, "full_precision", False):
            for name, parameter in list(module.named_parameters(recurse=False)):
                setattr(module, name, nn.Parameter(parameter.to(compute), requires_grad=False))
    model.requires_grad_(False)
    for layer, names in config.paths(model.config).items():
        block = model.blocks[layer]
        of_experts = [name for name in names if name.startswith("mlp.experts.")]
        for name in names:
            if name not in of_experts:
                linear = block.get_submodule(name)
                assert isinstance(linear, nn.Linear)
                block.set_submodule(name, LoRALinear(linear, config.rank, config.scale))
        if of_experts:
            experts = block.get_submodule("mlp.experts")
            assert isinstance(experts, Experts)
            parts = [name.rpartition(".")[2] for name in of_experts]
            block.set_submodule("mlp.experts", LoRAExperts(experts, parts, config.rank, config.scale))
