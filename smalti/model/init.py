"""Initial weights: a pure function of (config, seed, parameter name, expert index), never of ranks, order or history.

Guarantees: the same arguments give the same values whatever was drawn before, under any mesh and any number of threads:
any rank may draw a parameter (or one expert) by itself. Does not promise equal bits on another kind of CPU or torch.

Normal values with the standard deviation ``initializer_range``; matrices that write to the residual stream get it
divided by sqrt(2 * layers) (GPT-2, Radford et al. 2019, section 2.3); norm weights are 1, biases 0.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from smalti.base.rng import derive_key
from smalti.config.model import ModelConfig


def draw(name: str, shape: Sequence[int], config: ModelConfig, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """The initial value of the parameter ``name``, whole, on the CPU. Drawn in float32, then cast to ``dtype``.

    A 3-D parameter holds one matrix per expert, each with a key of its own: expert e is the same in any subset.
    """
    if name.endswith(".bias"):
        return torch.zeros(tuple(shape), dtype=dtype, device="cpu")
    if "norm" in name.split(".")[-2]:
        return torch.ones(tuple(shape), dtype=dtype, device="cpu")
    std = initial_std(name, config)
    if len(shape) != 3:
        return _normal(tuple(shape), std, derive_key(seed, name)).to(dtype)
    return torch.stack([draw_expert(name, expert, shape[1:], config, seed, dtype) for expert in range(shape[0])])


def draw_expert(
    name: str, expert: int, shape: Sequence[int], config: ModelConfig, seed: int, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Expert ``expert`` of the 3-D parameter ``name``; ``shape`` is that of one expert."""
    return _normal(tuple(shape), initial_std(name, config), derive_key(seed, name, expert)).to(dtype)


def initial_std(name: str, config: ModelConfig) -> float:
    """Standard deviation of the initial values of a matrix."""
    writes_to_residual = "o_proj" in name or "down_proj" in name
    depth = (2 * config.num_hidden_layers) ** 0.5 if writes_to_residual else 1.0
    return config.initializer_range / depth


@torch.no_grad()
def init_weights(model: nn.Module, config: ModelConfig, seed: int) -> None:
    """Set all parameters of a plain (unsharded) module in place, on its own device and in its own dtypes."""
    for name, parameter in model.named_parameters():
        parameter.copy_(draw(name, parameter.shape, config, seed))


def _normal(shape: tuple[int, ...], std: float, key: int) -> Tensor:
    generator = torch.Generator(device="cpu").manual_seed(key)
    return torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu").mul_(std)
