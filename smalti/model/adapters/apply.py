"""Adds the adapters of a config to a decoder, and freezes its weights."""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from smalti.config.adapter import AdapterConfig, Quantization, matrices
from smalti.model.adapters.lora import LoRAExperts, LoRALinear
from smalti.model.adapters.quantized import quantize
from smalti.model.blocks.embed import SCORES
from smalti.model.blocks.moe.experts import Experts
from smalti.model.decoder import Decoder
from smalti.model.dtypes import freeze

_NAME = re.compile(r"blocks\.\d+\..+[._]lora_[AB]")


def is_adapter(name: str) -> bool:
    """Return whether a parameter's name is that of an adapter."""
    return _NAME.fullmatch(name) is not None


def is_trained(name: str) -> bool:
    """Return whether a parameter of a model with adapters is trained: an adapter, or the score of a reward model."""
    return is_adapter(name) or name == SCORES


@contextmanager
def without_adapters(model: nn.Module) -> Iterator[None]:
    """Within it the model, which may be sharded, computes what its frozen weights alone do."""
    adapted = [module for module in model.modules() if isinstance(module, LoRALinear | LoRAExperts)]
    assert adapted, "a model without adapters"
    for module in adapted:
        module.is_adapted = False
    try:
        yield
    finally:
        for module in adapted:
            module.is_adapted = True


def apply(model: Decoder, config: AdapterConfig, *, compute: torch.dtype = torch.float32) -> None:
    """Add adapters in place, their values left to the caller, and freeze all other parameters in the dtype ``compute``.

    The score of a reward model, which no language model has, is trained too, in fp32.
    ``config.quantize``: the matrices of all blocks are stored in fewer bits, and their values left to the caller too
    (``stored_as``). Frozen weights are never updated, so a copy in a wider dtype would only be cast in every pass.
    """
    freeze(model, compute)
    if model.score is not None:
        model.score.float().requires_grad_(True)
    adapted = config.paths(model.config)
    for layer, block in enumerate(model.blocks):
        every, names = matrices(model.config, layer), adapted.get(layer, [])
        for name in every if config.quantize else names:
            if not name.startswith("mlp.experts."):
                linear, rank = block.get_submodule(name), config.rank if name in names else 0
                assert isinstance(linear, nn.Linear)
                block.set_submodule(name, LoRALinear(linear, rank, config.scale, config.quantize))
        of_experts = [name.rpartition(".")[2] for name in names if name.startswith("mlp.experts.")]
        if of_experts or (config.quantize and "mlp.experts.up_proj" in every):
            experts = block.get_submodule("mlp.experts")
            assert isinstance(experts, Experts)
            adapters = LoRAExperts(experts, of_experts, config.rank, config.scale, config.quantize)
            block.set_submodule("mlp.experts", adapters)


def stored_as(tensors: Mapping[str, Tensor], name: str, weight: Tensor) -> dict[str, Tensor]:
    """Return the tensors, by name, that hold the frozen weight ``name`` in a model with these ``tensors``."""
    if name in tensors:
        return {name: weight}
    codes, scales, grouped_scales = (f"{name}_{part}" for part in ("codes", "scales", "grouped_scales"))
    if codes not in tensors:
        return {}  # it belongs to another rank's layers
    kind: Quantization = "int8" if tensors[codes].numel() >= weight.numel() else "nf4"
    if grouped_scales in tensors:
        kind, scales = "nf4_double", grouped_scales
    values = zip((codes, scales), quantize(weight, kind), strict=True)
    return {target: value.view(tensors[target].shape) for target, value in values}
