"""Initial weights, as a pure function of config, seed, parameter name and expert index.

Guarantees: the values do not depend on ranks, threads or what was drawn before, so any rank can draw any parameter (or
expert) by itself. Another kind of CPU or version of torch may give other bits.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from smalti.base.rng import derive_key
from smalti.config.model import ModelConfig


def draw(name: str, shape: Sequence[int], config: ModelConfig, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the initial value of the whole parameter ``name`` on the CPU, drawn in float32, then cast to ``dtype``.

    Matrices are normal, norm weights 1, biases 0. A 3-D parameter holds a matrix for each expert, with its own key:
    expert e is the same in any subset.
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
    """Return expert ``expert`` of the 3-D parameter ``name``; ``shape`` is that of one expert."""
    return _normal(tuple(shape), initial_std(name, config), derive_key(seed, name, expert)).to(dtype)


def initial_std(name: str, config: ModelConfig) -> float:
    """Return the standard deviation of a matrix's initial values: ``initializer_range``, or that of the routers.

    For matrices that write to the residual stream it is divided by sqrt(2 layers) (GPT-2, Radford et al. 2019, section
    2.3).
    """
    if ".router." in name and config.moe is not None and config.moe.router_initializer_range is not None:
        return config.moe.router_initializer_range
    writes_to_residual = "o_proj" in name or "down_proj" in name
    depth = (2 * config.num_hidden_layers) ** 0.5 if writes_to_residual else 1.0
    return config.initializer_range / depth


@torch.no_grad()
def init_weights(model: nn.Module, config: ModelConfig, seed: int) -> None:
    """Set all parameters of a plain (unsharded) module in place, on their devices and in their dtypes."""
    for name, parameter in model.named_parameters():
        parameter.copy_(draw(name, parameter.shape, config, seed))


def _normal(shape: tuple[int, ...], std: float, key: int) -> Tensor:
    generator = torch.Generator(device="cpu").manual_seed(key)
    return torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu").mul_(std)
