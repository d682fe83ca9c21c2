"""Metrics of the load of experts, and the warning of routers that collapse. All of it is on the host.

Shapes: L layers with experts, E experts, S steps.
"""

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from smalti.base import log
from smalti.config.run import RunConfig
from smalti.track.sinks.feed import Events

_LOADS = 200
_FIRST_STEP = 100
_WINDOW_STEPS = 20
_LEAST_BOUND = 1.5
_HINTED_COEF = 0.3
"""A larger coefficient made the loss worse (docs/log.md)."""


def expert_metrics(load_LE: Tensor, entropy_L: Tensor) -> dict[str, float]:
    """Return the metrics of a step, for each layer and over all layers."""
    imbalance_L = load_LE.amax(-1) / load_LE.mean(-1).clamp(min=1e-30)
    dead_L = (load_LE == 0).double().mean(-1)
    share_LE = load_LE / load_LE.sum(-1, keepdim=True).clamp(min=1e-30)
    load_entropy_L = torch.special.entr(share_LE).sum(-1) / math.log(load_LE.shape[-1])
    metrics = {
        "moe/load_imbalance": imbalance_L.amax(),
        "moe/load_entropy": load_entropy_L.mean(),
        "moe/router_entropy": entropy_L.mean(),
        "moe/dead_experts_frac": dead_L.mean(),
    }
    for layer, (imbalance, entropy, dead) in enumerate(zip(imbalance_L, entropy_L, dead_L, strict=True)):
        metrics[f"moe/load_imbalance/layer{layer}"] = imbalance
        metrics[f"moe/router_entropy/layer{layer}"] = entropy
        metrics[f"moe/dead_experts_frac/layer{layer}"] = dead
    return {name: float(value) for name, value in metrics.items()}


def loads_due(step: int, total_steps: int) -> bool:
    """Return whether the load of each expert is recorded after update ``step`` (from 1): after the first, and 200 times
    in a run at regular intervals. With 40 layers of 256 experts this is about 60 kB each time, 12 MB in all."""
    return step == 1 or step * _LOADS // total_steps > (step - 1) * _LOADS // total_steps


def expert_loads(load_LE: Tensor) -> dict[str, list[float]]:
    """Return the load of each expert over the mean of its layer, to three digits.

    One list for each layer: a metric for each expert would be thousands of curves at a tracker, most of the size of
    ``metrics.jsonl`` their names.
    """
    ratio_LE = load_LE / load_LE.mean(-1, keepdim=True).clamp(min=1e-30)
    return {
        f"moe/load/layer{layer}": [float(f"{ratio:.3g}") for ratio in ratios]
        for layer, ratios in enumerate(ratio_LE.tolist())
    }


class CollapseWatch:
    """Writes a warning and an event when routers collapse.

    It looks at windows of 20 steps, after the warmup and step 100. A router has collapsed if the median over a window
    of the busiest expert's load over the mean is more than a third of the way from 1 (even) to num_experts /
    num_experts_per_tok (all tokens choose the same experts), at least 1.5, or if experts had no token in the whole
    window. It is reported once, and again only after a window in which no step was above that bound and all experts
    had tokens.
    """

    def __init__(self, config: RunConfig, events: Events, *, warns: bool, collapsed: Iterable[int] = ()) -> None:
        """``warns``: False on all ranks but the first. ``collapsed``: the layers in the checkpoint."""
        moe = config.model.moe
        assert moe is not None
        self._config = config
        self._events = events
        self._warns = warns
        self._max = moe.num_experts / moe.num_experts_per_tok
        self._bound = max(1 + (self._max - 1) / 3, _LEAST_BOUND)
        self._after_step = max(_FIRST_STEP, config.length.step_at(config.train.schedule.warmup))
        self._loads: list[Tensor] = []
        self.collapsed = set(collapsed)
        """Layers that were reported and have not recovered; goes into checkpoints, unlike an incomplete window."""

    def add(self, step: int, load_LE: Tensor) -> None:
        """Take the load of update ``step`` (from 1), which all ranks have alike."""
        if step <= self._after_step:
            return
        self._loads.append(load_LE)
        if step % _WINDOW_STEPS == 0:
            if len(self._loads) == _WINDOW_STEPS:
                self._judge(step, torch.stack(self._loads))
            self._loads = []

    def _judge(self, step: int, load_SLE: Tensor) -> None:
        imbalance_SL = load_SLE.amax(-1) / load_SLE.mean(-1).clamp(min=1e-30)
        median_L = imbalance_SL.quantile(0.5, dim=0)
        unused_LE = (load_SLE == 0).all(0)
        is_collapsed_L = (median_L > self._bound) | unused_LE.any(-1)
        is_uneven_L = (imbalance_SL > self._bound).any(0) | unused_LE.any(-1)
        now = {layer for layer, is_collapsed in enumerate(is_collapsed_L.tolist()) if is_collapsed}
        new = sorted(now - self.collapsed)
        self.collapsed = {layer for layer in self.collapsed if is_uneven_L[layer]} | now
        if not new:
            return
        imbalance = [round(float(median_L[layer]), 2) for layer in new]
        unused = {f"layer{layer}": unused_LE[layer].nonzero().flatten().tolist() for layer in new}
        unused = {layer: experts for layer, experts in unused.items() if experts}
        hint = _hint(self._config)
        facts = {"layers": new, "load_imbalance": imbalance} | ({"without_tokens": unused} if unused else {})
        self._events.write("router_collapsed", step=step, **facts, hint=hint)
        if self._warns:
            log.get("train").warning(
                "step %d: the router of layer %s has collapsed: over %d steps its busiest expert had %s times the mean "
                "load (1: even, %.3g: all tokens)%s; hint: %s",
                *(step, ", ".join(map(str, new)), _WINDOW_STEPS, ", ".join(map(str, imbalance)), self._max),
                "".join(f"; no token for experts {experts} of {layer}" for layer, experts in unused.items()),
                hint,
            )


def _hint(config: RunConfig) -> str:
    """Return what to type."""
    moe, train = config.model.moe, config.train
    assert moe is not None
    options = []
    if moe.balance_loss_coef < _HINTED_COEF:
        options.append(f"model.moe.balance_loss_coef={min(max(10 * moe.balance_loss_coef, 0.01), _HINTED_COEF):g}")
    if moe.router_lr_frac == 1:
        options.append("model.moe.router_lr_frac=0.1")
    options.append(f"train.optimizer.lr={train.optimizer.lr / 2:g}")
    return (
        f"in a new run {', '.join(options)} or a train.schedule.warmup over {train.schedule.warmup}; "
        "the last two also here with --fork"
    )
