"""The optimizers and their parameter groups.

Each skips its whole update on the device where the tensor in its attribute ``found_inf`` is 1, as ``train_step``
requires; of torch's optimizers those with ``fused=True`` do.

A new optimizer is an entry in ``BUILDERS`` and one in ``OPTIMIZERS`` of ``smalti/config/optimizer.py``.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.sgd import sgd

from smalti.config.optimizer import OptimizerConfig, OptimizerName
from smalti.distributed.parallel.dtensors import local
from smalti.model.blocks.moe.router import Router

Groups = list[dict[str, Any]]


def decays(name: str, parameter: Tensor) -> bool:
    """Return whether weight decay applies to a parameter: to matrices, not to norms, biases and embeddings.

    Decided by shape and name: vectors (norm weights, biases) and all with ``embed`` in their name are exempt.
    """
    return parameter.ndim >= 2 and "embed" not in name


def build_optimizer(model: nn.Module, config: OptimizerConfig) -> torch.optim.Optimizer:
    """Build the optimizer of ``config`` with all its moments allocated.

    Parameters are grouped by whether they decay, by learning rate (``lr_frac``: a group's fraction of the schedule's)
    and by mesh, as torch updates no DTensors of several meshes in one call.
    """
    routers = [module for module in model.modules() if isinstance(module, Router)]
    lr_frac_of = {router.weight: router.config.router_lr_frac for router in routers}
    alike: dict[tuple[bool, float, Any], list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
            alike.setdefault((decays(name, parameter), lr_frac_of.get(parameter, 1.0), mesh), []).append(parameter)
    groups: Groups = [
        {"params": parameters, "weight_decay": config.weight_decay if decay else 0.0, "lr_frac": lr_frac}
        for (decay, lr_frac, _), parameters in sorted(alike.items(), key=lambda item: not item[0][0])
    ]
    return BUILDERS[config.name](groups, config)


def moments(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return the optimizer's tensors by name (``optimizer.<parameter>.<moment>``), including AdamW's ``step`` of each
    parameter."""
    return {
        f"optimizer.{name}.{key}": value
        for name, parameter in model.named_parameters()
        for key, value in optimizer.state.get(parameter, {}).items()
    }


def _adamw(groups: Groups, config: OptimizerConfig) -> torch.optim.Optimizer:
    """Build AdamW (arXiv 1711.05101), fused, with its moments, which torch would allocate in the first step."""
    assert config.eps is not None
    optimizer = torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=True)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            optimizer.state[parameter] = {
                "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }
    return optimizer


class Lion(torch.optim.Optimizer):
    """Lion: the sign of an average of gradients, with decoupled weight decay (Chen et al. 2023, arXiv 2302.06675,
    alg. 2).

    w -= lr (sign(b1 m + (1 - b1) g) + decay w), then m = b2 m + (1 - b2) g. It has one moment, and works on shards, as
    updates are elementwise.
    """

    def __init__(
        self, params: Iterable[Any], *, lr: float, betas: tuple[float, float], weight_decay: float = 0.0
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter] = {"exp_avg": torch.zeros_like(parameter)}

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient; closures are not supported."""
        assert closure is None
        for group in self.param_groups:
            updated = [parameter for parameter in group["params"] if parameter.grad is not None]
            if not updated:
                continue
            weights = [local(parameter) for parameter in updated]
            gradients = [local(parameter.grad) for parameter in updated]
            averages = [local(self.state[parameter]["exp_avg"]) for parameter in updated]
            (update_beta, average_beta) = group["betas"]
            lr = group["lr"]
            directions = list(torch._foreach_lerp(averages, gradients, 1 - update_beta))
            torch._foreach_sign_(directions)
            self._descend(weights, directions, lr=lr, weight_decay=group["weight_decay"])
            self._descend(averages, gradients, lr=1 - average_beta, weight_decay=1.0, maximize=True)

    def _descend(self, values: list[Tensor], gradients: list[Tensor], **settings: Any) -> None:
        """Update x -= lr (g + decay x), or lr (decay x - g) to maximize, by the kernel that can skip on the device."""
        found_inf = getattr(self, "found_inf", None)
        sgd(values, gradients, [None] * len(values), fused=True, found_inf=found_inf, momentum=0.0, dampening=0.0,
            nesterov=False, **{"maximize": False, **settings})  # fmt: skip


BUILDERS: dict[OptimizerName, Callable[[Groups, OptimizerConfig], torch.optim.Optimizer]] = {
    "adamw": _adamw,
    "lion": lambda groups, config: Lion(groups, lr=config.lr, betas=config.betas),
}
"""Builders of an optimizer with its moments, over parameter groups with their weight decay."""
