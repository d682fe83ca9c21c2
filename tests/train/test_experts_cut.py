"""Experts that the ranks do not divide evenly are cut along another dim, without padding, with equal results."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gloo_ranks import run_ranks
from test_step import MOE, _gradients_after_step, _relative
from torch import nn
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

from smalti.distributed.checkpoint import checkpoint, saver
from smalti.distributed.parallel.fsdp import _placement

SIX = MOE.model_copy(update={"moe": MOE.moe.model_copy(update={"num_experts": 6}) if MOE.moe else None})


@pytest.mark.parametrize(
    ("shape", "shards", "dim"),
    [
        ((16, 10752, 6144), 8, None),  # experts are enough
        ((16, 10752, 6144), 64, 1),
        ((16, 10752, 6144), 3072, 2),
        ((16, 10752, 6144), 5, None),  # nothing divides: filled up
        ((100, 64), 64, None),  # a matrix is cut along its rows
    ],
)
def test_which_dim_is_cut(shape: tuple[int, ...], shards: int, dim: int | None) -> None:
    results = _placement(nn.Parameter(torch.empty(shape, device="meta")), shards)
    assert results == (None if dim is None else Shard(dim))


@pytest.mark.slow
def test_gradients_are_those_of_one_rank() -> None:
    whole = run_ranks(1, _gradients_after_step, SIX, 2)[0]
    for result in run_ranks(4, _gradients_after_step, SIX, 1):
        assert result["norm"] == pytest.approx(whole["norm"], rel=1e-5)
        for name, gradient in whole["gradients"].items():
            assert _relative(result["gradients"][name], gradient) < 2e-5, name
        for name, parameter in whole["parameters"].items():
            assert _relative(result["parameters"][name], parameter) < 2e-5, name


def _experts(fill: float | None) -> dict[str, torch.Tensor]:
    """[3, 8, 4] on one rank or more, cut as ``shard`` would."""
    mesh, generator = init_device_mesh("cpu", (dist.get_world_size(),)), torch.Generator().manual_seed(1)
    whole = torch.randn(3, 8, 4, generator=generator) if fill is None else torch.full((3, 8, 4), fill)
    place = _placement(nn.Parameter(whole), dist.get_world_size()) or Shard(0)
    return {"model.experts": distribute_tensor(whole, mesh, [place], src_data_rank=None)}


def _save(rank: int, folder: Path) -> str:
    return saver.save(folder, 1, _experts(None), {"step": 1}, keep=1)


def _load(rank: int, path: str) -> Any:
    tensors = _experts(-1.0)
    checkpoint.load(path, tensors)
    return tensors["model.experts"].full_tensor().tolist()  # type: ignore[attr-defined]


def test_a_checkpoint_is_read_by_ranks_that_cut_otherwise(tmp_path: Path) -> None:
    path = run_ranks(4, _save, tmp_path)[0]
    whole = torch.randn(3, 8, 4, generator=torch.Generator().manual_seed(1)).tolist()
    assert run_ranks(3, _load, path) == [whole] * 3
