"""A small run on any mesh, rehearsed and really made on gloo ranks."""

from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import torch
from gloo import run_ranks
from mesh_runs import config_of
from torch import Tensor, nn

from smalti.config.run import RunConfig
from smalti.dist.traffic import Total
from smalti.model.blocks.moe.router import Router


class Real(NamedTuple):
    """What one rank held and sent in a real step."""

    peak_bytes: int
    parameters: int
    optimizer: int
    collectives: Counter[Any]


def counts(collectives: list[Total] | tuple[Total, ...]) -> Counter[Any]:
    """(op, axis, bytes) -> calls; votes are not of a step."""
    return Counter({(one.op, one.axis, one.bytes): one.count for one in collectives if one.bytes != 16})


def real_steps(root: Path, ranks: int, kind: str, **parallel: Any) -> tuple[RunConfig, list[Real]]:
    """Each rank's second step."""
    config = config_of(root, kind, "run", 10, ranks, **parallel)
    return config, run_ranks(ranks, _real, config, timeout_s=200)


def _real(rank: int, config: RunConfig) -> Real:
    from counted_step import counted, counted_steps

    step = counted_steps(config, prepare=_choose_evenly)[-1]
    found = counted(step.live)
    return Real(found.peak_bytes, found.parts["weights"], found.parts["moments"], counts(step.collectives))


def _choose_evenly(model: nn.Module) -> None:
    """Token n takes experts n k, n k + 1 ... of a circle."""
    for module in model.modules():
        if isinstance(module, Router):
            module.choose = _Evenly(module)  # type: ignore[method-assign]


class _Evenly:
    def __init__(self, router: Router) -> None:
        self.chosen, self.experts = router.config.num_experts_per_tok, router.config.num_experts

    def __call__(self, score_BTE: Tensor) -> Tensor:
        tokens = score_BTE.shape[0] * score_BTE.shape[1]
        return (torch.arange(tokens * self.chosen) % self.experts).view(*score_BTE.shape[:2], self.chosen)
