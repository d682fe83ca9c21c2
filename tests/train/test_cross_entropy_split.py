"""Cross-entropy over a vocabulary that ranks share, against plain cross-entropy of all of it."""

from typing import Any

import pytest
import torch
from gloo_ranks import run_ranks
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from smalti.distributed.parallel.slices import Ranks, all_gather_sequence
from smalti.train.batches import IGNORE
from smalti.train.cross_entropy import cross_entropy_head

ROWS, TIME, WIDTH, VOCAB = 2, 12, 8, 192
CHUNKS = (2**20, 2**12, 2**9)
"""All logits of a rank at once; tiles of tokens; tiles of tokens (fp32) or of the vocabulary (bf16)."""


class _Largest(TorchDispatchMode):
    """Records the elements of the largest tensor that is created under it."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        made = [leaf.numel() for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        self.elements = max([self.elements, *made])
        return result


def _inputs() -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    targets = torch.randint(0, VOCAB, (ROWS, TIME))
    targets[0, :3] = IGNORE
    targets[1, :2] = torch.tensor([0, VOCAB - 1])
    return torch.randn(ROWS, TIME, WIDTH), torch.randn(VOCAB, WIDTH) * 4, targets


def _split(rank: int, dtype: torch.dtype, soft_cap: float | None) -> list[tuple[list[Tensor], int]]:
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),), mesh_dim_names=("tensor",))
    whole, weight, targets = _inputs()
    values = []
    for chunk_bytes in CHUNKS:
        slice_BtD = whole.to(dtype).chunk(mesh.size(), dim=1)[rank].clone().requires_grad_()
        part = distribute_tensor(weight.to(dtype), mesh, [Shard(0)]).requires_grad_()
        head = cross_entropy_head(targets, z_loss_coef=1e-2, soft_cap=soft_cap, chunk_bytes=chunk_bytes)
        hidden = all_gather_sequence(slice_BtD, Ranks.of(mesh))
        with _Largest() as largest:
            loss, z_loss = head(hidden, part)
        torch.autograd.backward(loss)
        assert slice_BtD.grad is not None
        assert isinstance(part.grad, DTensor)
        slices = [torch.empty_like(slice_BtD) for _ in range(mesh.size())]
        torch.distributed.all_gather(slices, slice_BtD.grad.contiguous())
        values.append(([loss.detach(), z_loss, torch.cat(slices, dim=1), part.grad.full_tensor()], largest.elements))
    return values


def _plain(soft_cap: float | None) -> list[Tensor]:
    whole, weight, targets = _inputs()
    hidden, weight = whole.double().requires_grad_(), weight.double().requires_grad_()
    logits = hidden.flatten(0, 1) @ weight.T
    logits = logits if soft_cap is None else soft_cap * torch.tanh(logits / soft_cap)
    counted = targets.flatten() != IGNORE
    z_loss = 1e-2 * (logits.logsumexp(dim=-1).square() * counted).sum()
    loss = F.cross_entropy(logits, targets.flatten(), ignore_index=IGNORE, reduction="sum") + z_loss
    torch.autograd.backward(loss)
    assert hidden.grad is not None
    assert weight.grad is not None
    return [loss.detach(), z_loss.detach(), hidden.grad, weight.grad]


def _compare(ranks: int, dtype: torch.dtype, soft_cap: float | None, close: float) -> None:
    wanted = _plain(soft_cap)
    for results in run_ranks(ranks, _split, dtype, soft_cap):
        for figures, largest in results:
            for mine, theirs in zip(figures, wanted, strict=True):
                assert float((mine.double() - theirs).norm() / theirs.norm()) < close
            assert largest <= max(ROWS * TIME * VOCAB // ranks, VOCAB * WIDTH // ranks), "logits of other ranks"


@pytest.mark.exhaustive
def test_two_ranks_with_a_soft_cap() -> None:
    _compare(2, torch.float32, 20.0, 3e-6)


@pytest.mark.slow
def test_four_ranks() -> None:
    _compare(4, torch.float32, None, 3e-6)


@pytest.mark.slow
def test_tiles_of_the_vocabulary_in_bf16() -> None:
    _compare(2, torch.bfloat16, None, 2e-2)
