"""Adapters on every axis of a mesh: losses, gradients and weights are those of one rank, bytes those of the plan."""

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import toy_run
from gloo_ranks import run_ranks
from torch import Tensor

from smalti.config.load import from_dict
from smalti.config.run import RunConfig
from smalti.cost.memory.per_rank import memory_per_rank
from smalti.distributed.checkpoint import checkpoint
from smalti.distributed.parallel.dtensors import local
from smalti.model.adapters.apply import is_adapter
from smalti.train import Hook, build, fit

MODEL: dict[str, Any] = {
    "family": "decoder", "hidden_size": 64, "head_dim": 32, "intermediate_size": 128, "num_hidden_layers": 4,
    "attention_bias": True, "mlp_bias": True,
    "moe": {"num_experts": 4, "num_experts_per_tok": 2, "num_shared_experts": 1, "mlp_only_layers": [0]},
}  # fmt: skip
OPTIMIZER = {"lr": 3e-3, "eps": 1e-5}  # with a smaller one, Adam's first steps are the signs of rounding errors


SHARD, TENSOR, EXPERT, PIPELINE = {"shard": 2}, {"tensor": 2}, {"shard": 2, "expert": 2}, {"pipeline": 2}
STATIC, V = EXPERT | {"dispatch": "static"}, PIPELINE | {"pipeline_schedule": "zero_bubble"}
RING = {"sequence": 2, "context": "ring"}


def tuned(root: Path, name: str, steps: int, *, quantize: str | None, **parallel: Any) -> RunConfig:
    """A run beside the weights of the run ``root``/runs/base, which is made where it is missing."""
    train = {"duration": f"{steps}step", "checkpoint": {"every": "1step"}, "optimizer": OPTIMIZER}
    microbatch = {"microbatch_tokens": 32} if parallel.get("pipeline") else {}
    tree = toy_run.config(root, **train, **microbatch, parallel={"threads": 1, "device": "cpu"}).model_dump()
    tree["model"] |= MODEL
    base = root / "runs/base"
    if not base.exists():
        fit(build(from_dict(RunConfig, tree | {"folder": str(base)}, "toy").config))
    ranks = 1
    for axis in ("replicate", "shard", "sequence", "tensor", "pipeline"):
        ranks *= parallel.get(axis, 1)
    tree["train"]["parallel"] |= {"ranks": ranks, **parallel}
    tree |= {"folder": str(root / "runs" / name), "init_from": str(base)}
    tree["adapter"] = {"rank": 4, "alpha": 8, "rslora": True, "quantize": quantize}
    return from_dict(RunConfig, tree, "toy").config


class Step(NamedTuple):
    """What a rank has after a step, of the adapters whole."""

    figures: list[float]
    """Loss and gradient norm."""
    gradients: dict[str, Tensor]
    weights: dict[str, Tensor]
    bytes: tuple[int, int]
    """This rank's, of parameters and of the optimizer's moments."""


class Steps(Hook):
    """Keeps each step."""

    def __init__(self) -> None:
        self.taken: list[Step] = []

    def on_step(self, job: Any, result: Any) -> None:
        model, optimizer = job.state.model, job.state.optimizer
        adapters = {name: p for name, p in model.named_parameters() if is_adapter(name)}
        state = [value for of in optimizer.state.values() for key, value in of.items() if key != "step"]
        sizes = [sum(local(p).nbytes for p in tensors) for tensors in (model.parameters(), state)]
        self.taken.append(Step(
            [float(result.loss), float(result.grad_norm)],
            {name: p.grad.full_tensor().clone() for name, p in adapters.items()},
            {name: p.detach().full_tensor().clone() for name, p in adapters.items()},
            (sizes[0], sizes[1]),
        ))  # fmt: skip


def _one_step_on_each(rank: int, configs: list[RunConfig]) -> list[Step]:
    """Take step n of the run on the n-th mesh, resuming from the checkpoint of the mesh before it."""
    steps = Steps()
    for number, config in enumerate(configs):
        job = build(config, hooks=[steps])
        job.trial_steps = number + 1
        fit(job)
    return steps.taken


@pytest.mark.exhaustive  # real processes
@pytest.mark.parametrize(
    ("quantize", "meshes"),
    [
        (None, [SHARD, TENSOR, EXPERT, V]),
        ("nf4", [SHARD, TENSOR, STATIC, RING]),
        ("int8", [{"replicate": 2} | EXPERT, TENSOR | EXPERT, TENSOR | PIPELINE]),
    ],
)
def test_steps_are_those_of_one_rank(quantize: str | None, meshes: list[dict[str, Any]], tmp_path: Path) -> None:
    one = Steps()
    fit(build(tuned(tmp_path, "one", len(meshes), quantize=quantize), hooks=[one]))
    configs = [tuned(tmp_path, "meshes", len(meshes), quantize=quantize, **mesh) for mesh in meshes]
    ranks = run_ranks(configs[0].train.parallel.ranks, _one_step_on_each, configs, timeout_s=300)
    for config, mesh, wanted, *steps in zip(configs, meshes, one.taken, *ranks, strict=True):
        torch.testing.assert_close(torch.tensor(steps[0].figures), torch.tensor(wanted.figures), rtol=1e-5, atol=0)
        for kind in ("gradients", "weights"):
            tensors = getattr(wanted, kind)
            assert {name for step in steps for name in getattr(step, kind)} == tensors.keys()
            for name, tensor in ((name, each) for step in steps for name, each in getattr(step, kind).items()):
                assert tensors[name].any() or mesh is meshes[0]  # where B is 0, so the gradient of A is too
                msg = f"{mesh} {kind} {name}"
                torch.testing.assert_close(tensor, tensors[name], rtol=1e-4, atol=1e-6, msg=msg)
        if mesh is not V:  # of which the plan does not know that the first rank has the last layers too
            planned = memory_per_rank(config)
            sizes = [planned.params_bytes, planned.moments_bytes]  # of the fullest pipeline stage
            assert any(list(step.bytes) == pytest.approx(sizes, rel=0.01) for step in steps), mesh
    stored = checkpoint.read_model(f"{configs[0].run_folder}/checkpoints/step-{len(meshes):08}")  # what an export reads
    last = {name: weight for rank in ranks for name, weight in rank[-1].weights.items()}
    assert all(torch.equal(stored.pop(name), weight) for name, weight in last.items())
    assert not stored
