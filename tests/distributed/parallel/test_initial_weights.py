"""The first weights are the same to the bit on any number of ranks and any mesh."""

import hashlib
from pathlib import Path
from typing import Any

import mesh_runs
import pytest
from conftest import PROVE
from gloo_ranks import run_ranks
from torch.distributed.tensor import DTensor

from smalti.config.run import RunConfig
from smalti.train import build

MESHES: list[dict[str, Any]] = [{"shard": 3}, {"expert": 2, "shard": 2, "tensor": 2}]
MORE: list[dict[str, Any]] = [
    {"shard": 2}, {"shard": 4}, {"shard": 6}, {"shard": 8}, {"replicate": 2, "shard": 2},
    {"expert": 2, "shard": 2, "sequence": 2},
]  # fmt: skip


def _digest(rank: int, config: RunConfig) -> dict[str, str]:
    model = build(config).state.model
    whole = {
        name: parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
        for name, parameter in model.named_parameters()
    }
    return {name: hashlib.sha256(tensor.detach().numpy().tobytes()).hexdigest() for name, tensor in whole.items()}


@pytest.mark.slow
def test_first_weights_are_those_of_one_process(tmp_path: Path) -> None:
    digests = run_ranks(1, _digest, mesh_runs.config_of(tmp_path, "moe", "one", 4))[0]
    assert len(digests) > 20
    for parallel in [*MESHES, *(MORE if PROVE else [])]:
        ranks, name = 1, "-".join(parallel)
        for axis, size in parallel.items():
            ranks *= 1 if axis == "expert" else size
        of_ranks = run_ranks(
            ranks, _digest, mesh_runs.config_of(tmp_path, "moe", f"{name}-{ranks}", 4, ranks, **parallel)
        )
        assert all(of_rank == digests for of_rank in of_ranks), parallel
