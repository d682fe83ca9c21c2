"""The optimizer and its parameter groups."""

import torch
from torch import nn

from smalti.config.train import OptimizerConfig


def decays(name: str, parameter: torch.Tensor) -> bool:
    """Whether weight decay applies: to matrices, and not to norms, biases and embeddings.

    A rule on shape and name, no list to keep: vectors (norm weights, biases) and anything called ``embed`` are exempt.
    """
    return parameter.ndim >= 2 and "embed" not in name


def build_optimizer(model: nn.Module, config: OptimizerConfig) -> torch.optim.Optimizer:
    """AdamW (fused) over two groups: those that decay, those that do not."""
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    groups = [
        {"params": [p for name, p in named if decays(name, p)], "weight_decay": config.weight_decay},
        {"params": [p for name, p in named if not decays(name, p)], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=True)


def moments(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """The optimizer's tensors by name (``optimizer.<parameter>.<moment>``), made (as zeros) where there are none yet.

    AdamW keeps ``step`` on the CPU for each parameter; it is a tensor like the rest.
    """
    found: dict[str, torch.Tensor] = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        state = optimizer.state[parameter]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros_like(parameter)
        found.update({f"optimizer.{name}.{key}": value for key, value in state.items()})
    return found
