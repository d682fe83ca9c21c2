"""Real steps of a small run on gloo ranks, for any mesh, as a reference for the rehearsal."""

from collections import Counter
from typing import Any, NamedTuple

import torch
from gloo_ranks import run_ranks
from torch import Tensor, nn

from smalti.config.load import from_dict
from smalti.config.run import RunConfig
from smalti.distributed.trace.traffic import Total
from smalti.model.blocks.moe.router import Router

SEQ_LEN, ROWS = 64, 8
DENSE = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4,
    "num_attention_heads": 8, "num_key_value_heads": 4,
}  # fmt: skip
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "balance_loss_coef": 0.01, "z_loss_coef": 0.001}
MODELS = {
    "dense": DENSE,
    "moe": {**DENSE, "family": "dbrx", "norm": "layernorm", "intermediate_size": 32, "moe": EXPERTS},
}


def config_of(kind: str, ranks: int, rows: int = ROWS, **parallel: Any) -> RunConfig:
    """A run of packed rows; ``parallel``: the axes, and ``microbatch_tokens``."""
    train = {
        "duration": "10step", "global_batch_tokens": rows * SEQ_LEN, "optimizer": {"lr": 3e-3},
        "precision": {"compute": "fp32"}, "microbatch_tokens": parallel.pop("microbatch_tokens", "auto"),
        "parallel": {"ranks": ranks, "threads": 1, "device": "cpu", **parallel},
    }  # fmt: skip
    data = {"sources": {"made": "nowhere"}, "seq_len": SEQ_LEN, "stages": [{"weights": {"made": 1}}],
            "mask_documents": True}  # fmt: skip
    return from_dict(RunConfig, {"name": "run", "model": MODELS[kind], "data": data, "train": train}).config


class Real(NamedTuple):
    """Memory and collectives of one rank in a real step."""

    peak_bytes: int
    parameters: int
    optimizer: int
    collectives: Counter[Any]


def counts(collectives: list[Total] | tuple[Total, ...]) -> Counter[Any]:
    """(op, axis, bytes) -> calls; votes are not of a step."""
    return Counter({(one.op, one.axis, one.bytes): one.count for one in collectives if one.bytes != 16})


def real_steps(config: RunConfig) -> list[Real]:
    """Each rank's second step."""
    return run_ranks(config.train.parallel.ranks, _real, config, timeout_s=200)


def _real(rank: int, config: RunConfig) -> Real:
    from counted_step import counted, counted_steps

    step = counted_steps(config, prepare=_choose_evenly)[-1]
    result = counted(step.live)
    return Real(result.peak_bytes, result.parts["weights"], result.parts["moments"], counts(step.collectives))


def _choose_evenly(model: nn.Module) -> None:
    """Token n takes experts n k, n k + 1 ... of a circle."""
    for module in model.modules():
        if isinstance(module, Router):
            module.chooser = _Evenly(module)


class _Evenly:
    def __init__(self, router: Router) -> None:
        self.chosen, self.experts = router.config.num_experts_per_tok, router.config.num_experts

    def __call__(self, score_BTE: Tensor) -> Tensor:
        tokens = score_BTE.shape[0] * score_BTE.shape[1]
        return (torch.arange(tokens * self.chosen) % self.experts).view(*score_BTE.shape[:2], self.chosen)
