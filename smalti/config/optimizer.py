"""The section ``train.optimizer``, and the table of optimizers: their defaults and what planning needs of each.

A new optimizer is an entry in ``OPTIMIZERS`` and one in ``BUILDERS`` of ``smalti/train/optim.py``.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from smalti.config.schema import BelowOne, Config, Real

OptimizerName = Literal["adamw", "lion"]


@dataclass(frozen=True)
class Optimizer:
    """An update rule as the planner needs it, without torch."""

    moments: int
    """Tensors in fp32 that it keeps for each parameter."""
    update_values: float
    """Numbers in fp32 that the update of one parameter reads and writes."""
    update_kernels: int = 1
    """Launches of an update."""
    makes_updates: bool = False
    """The updates of all weights exist before they are applied."""
    has_eps: bool = True
    """It divides by a root, to which ``eps`` is added."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Fields of ``OptimizerConfig`` whose default is another one for this rule."""


OPTIMIZERS: dict[OptimizerName, Optimizer] = {
    "adamw": Optimizer(moments=2, update_values=7),
    "lion": Optimizer(
        moments=1,
        update_values=13,
        update_kernels=5,
        makes_updates=True,
        has_eps=False,
        defaults={"betas": (0.9, 0.99), "eps": None},
    ),
}


class OptimizerConfig(Config):
    """AdamW or Lion with decoupled weight decay; norms, biases and embeddings are exempt from decay by rule."""

    name: OptimizerName = "adamw"
    """The update rule. Lion keeps one moment less; it needs a 3 to 10 times lower lr and as much more weight decay."""
    lr: Real = Field(gt=0)
    """Peak learning rate."""
    betas: tuple[BelowOne, BelowOne] = (0.9, 0.95)
    """Decay rates, each below 1: of the two moments for adamw; of update and moment for lion (0.9, 0.99)."""
    eps: Real | None = Field(1e-8, gt=0)
    """Added to the root of the second moment; adamw only."""
    weight_decay: Real = Field(0.1, ge=0)
    """Decoupled weight decay of matrices, multiplied by the learning rate."""
    clip_norm: Real = Field(1.0, gt=0)
    """Maximum global norm of the gradient; a larger gradient is scaled down to it."""

    @model_validator(mode="before")
    @classmethod
    def _defaults_of_the_rule(cls, values: Any) -> Any:
        name = values.get("name") if isinstance(values, Mapping) else None
        rule = OPTIMIZERS.get(name) if isinstance(name, str) else None  # type: ignore[call-overload]
        return {**rule.defaults, **values} if rule else values

    @model_validator(mode="after")
    def _eps_has_an_effect(self) -> Self:
        has_eps = OPTIMIZERS[self.name].has_eps
        if has_eps and self.eps is None:
            raise ValueError(f"optimizer '{self.name}' needs eps; its default is 1e-8")
        if not has_eps and self.eps is not None:
            raise ValueError(f"eps={self.eps} has no effect: optimizer '{self.name}' has no second moment")
        return self
