"""The output head's loss: equal to naive cross-entropy in float64, in a tenth of plain cross-entropy's memory."""

import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from conftest import PROVE
from torch import Tensor
from torch.nn import functional as F

from smalti.base.errors import DataError
from smalti.train.batches import IGNORE
from smalti.train.cross_entropy import cross_entropy_head

VOCAB, WIDTH = 200, 8
ONE_TILE, SOME_TILES, MANY_TILES = 10**9, 120_000, 1
"""``chunk_bytes``; over 300 tokens in bf16 the last cuts the vocabulary and the one before the tokens."""

ROOT = Path(__file__).resolve().parents[2]


class Result(NamedTuple):
    """A loss, and the gradients of the hidden states and the weight."""

    loss: Tensor
    hidden: Tensor | None
    weight: Tensor | None


def _inputs(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    targets = torch.randint(0, VOCAB, (2, 150))
    targets[0, :40] = IGNORE
    return torch.randn(2, 150, WIDTH).to(dtype), torch.randn(VOCAB, WIDTH).to(dtype), targets


def _ours(hidden: Tensor, weight: Tensor, targets: Tensor, **options: float | None) -> Result:
    hidden, weight = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    loss, _ = cross_entropy_head(targets, **options)(hidden, weight)
    (3.0 * loss).backward()
    return Result(loss.detach(), hidden.grad, weight.grad)


def _naive(hidden: Tensor, weight: Tensor, targets: Tensor, z_loss_coef: float, soft_cap: float | None) -> Result:
    hidden, weight = hidden.double().requires_grad_(), weight.double().requires_grad_()
    logits = (hidden @ weight.T).flatten(0, 1)
    if soft_cap is not None:
        logits = soft_cap * torch.tanh(logits / soft_cap)
    loss = F.cross_entropy(logits, targets.flatten(), ignore_index=IGNORE, reduction="sum")
    loss = loss + z_loss_coef * (logits.logsumexp(-1)[targets.flatten() != IGNORE] ** 2).sum()
    (3.0 * loss).backward()
    return Result(loss.detach(), hidden.grad, weight.grad)


def _relative(a: Tensor | None, b: Tensor | None) -> float:
    assert a is not None
    assert b is not None
    return float((a.double() - b.double()).norm() / b.double().norm())


@pytest.mark.sample(12)
@pytest.mark.parametrize("soft_cap", [None, 3.0])
@pytest.mark.parametrize("z_loss_coef", [0.0, 1e-2])
@pytest.mark.parametrize("chunk_bytes", [ONE_TILE, SOME_TILES, MANY_TILES])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-6), (torch.bfloat16, 6e-3)], ids=["fp32", "bf16"])
def test_equals_naive_float64(
    dtype: torch.dtype, bound: float, chunk_bytes: int, z_loss_coef: float, soft_cap: float | None
) -> None:
    inputs = _inputs(dtype)
    ours = _ours(*inputs, z_loss_coef=z_loss_coef, soft_cap=soft_cap, chunk_bytes=chunk_bytes)
    naive = _naive(*inputs, z_loss_coef, soft_cap)
    for name, mine, other in zip(Result._fields, ours, naive, strict=True):
        assert _relative(mine, other) < bound, name
    assert ours.weight is not None
    assert ours.weight.dtype == dtype


@pytest.mark.parametrize("chunk_bytes", [SOME_TILES, MANY_TILES])
def test_bf16_is_as_exact_in_tiles_as_whole(chunk_bytes: int) -> None:
    inputs = _inputs(torch.bfloat16)
    naive, whole = _naive(*inputs, 0.0, None), _ours(*inputs, chunk_bytes=ONE_TILE)
    tiled = _ours(*inputs, chunk_bytes=chunk_bytes)
    assert _relative(tiled.weight, naive.weight) < 1.2 * _relative(whole.weight, naive.weight)
    assert _relative(tiled.hidden, naive.hidden) < 1.2 * _relative(whole.hidden, naive.hidden)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_only_what_is_asked_for_gets_a_gradient(dtype: torch.dtype) -> None:
    hidden, weight, targets = _inputs(dtype)
    both = _ours(hidden, weight, targets, chunk_bytes=MANY_TILES)
    read = hidden.clone().requires_grad_()
    cross_entropy_head(targets, chunk_bytes=MANY_TILES)(read, weight)[0].mul(3.0).backward()
    assert _relative(read.grad, both.hidden) < 5e-3, "a frozen head"
    head = weight.clone().requires_grad_()
    cross_entropy_head(targets, chunk_bytes=MANY_TILES)(hidden, head)[0].mul(3.0).backward()
    assert torch.equal(head.grad, both.weight), "a frozen body"


def test_without_grad_mode_there_is_none() -> None:
    hidden, weight, targets = _inputs()
    with torch.no_grad():
        loss, _ = cross_entropy_head(targets)(hidden, weight.requires_grad_())
    assert not loss.requires_grad


def test_a_tied_head_adds_to_the_embedding() -> None:
    _, weight, targets = _inputs()
    ids = torch.randint(0, VOCAB, targets.shape)
    tied, naive = weight.clone().requires_grad_(), weight.clone().double().requires_grad_()
    cross_entropy_head(targets, chunk_bytes=MANY_TILES)(F.embedding(ids, tied), tied)[0].backward()
    logits = F.embedding(ids, naive) @ naive.T
    F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORE, reduction="sum").backward()
    assert _relative(tied.grad, naive.grad) < 1e-6


@pytest.mark.usefixtures("tokens_of_heads")
@pytest.mark.parametrize("tokens", [0, 5])
def test_no_counted_target_is_a_loss_of_zero(tokens: int) -> None:
    hidden, weight = torch.randn(1, tokens, WIDTH, requires_grad=True), torch.randn(VOCAB, WIDTH, requires_grad=True)
    loss, z_loss = cross_entropy_head(torch.full((1, tokens), IGNORE), z_loss_coef=1.0)(hidden, weight)
    loss.backward()
    assert loss == z_loss == 0
    assert not hidden.grad.any()
    assert not weight.grad.any()


def test_ignored_tokens_are_not_read_on_a_cpu() -> None:
    hidden, weight, targets = _inputs()
    whole = _ours(hidden, weight, targets)
    hidden[targets == IGNORE] = torch.nan
    result = _ours(hidden, weight, targets)
    assert torch.equal(result.loss, whole.loss)
    assert torch.equal(result.weight, whole.weight)
    assert not result.hidden[targets == IGNORE].any()


@pytest.mark.parametrize("chunk_bytes", [ONE_TILE, SOME_TILES, MANY_TILES])
def test_ignored_tokens_are_masked_on_a_gpu(chunk_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("smalti.train.cross_entropy.counted_rows", lambda _: None)
    test_equals_naive_float64(torch.bfloat16, 6e-3, chunk_bytes, 1e-2, 3.0)


@pytest.mark.parametrize("target", [VOCAB, -1, -101])
def test_a_target_outside_the_vocabulary_is_refused(target: int) -> None:
    hidden, weight, targets = _inputs()
    targets[1, 7] = target
    with pytest.raises(DataError, match=f"target {target} of the loss is not in the vocabulary of {VOCAB} tokens"):
        cross_entropy_head(targets)(hidden, weight)


def test_a_second_backward_pass_is_refused() -> None:
    hidden, weight, targets = _inputs()
    loss, _ = cross_entropy_head(targets)(hidden.requires_grad_(), weight)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_z_loss_is_reported_apart() -> None:
    hidden, weight, targets = _inputs()
    loss, z_loss = cross_entropy_head(targets, z_loss_coef=1e-2)(hidden.requires_grad_(), weight)
    plain, nothing = cross_entropy_head(targets)(hidden, weight)
    assert nothing == 0
    assert float((loss - z_loss).detach()) == pytest.approx(float(plain.detach()), rel=1e-6)
    assert not z_loss.requires_grad


@pytest.mark.exhaustive  # sixteen seconds of a full-size head
@pytest.mark.parametrize("dtype", ["fp32", "bf16"] if PROVE else ["fp32"])
def test_takes_a_tenth_of_the_memory_of_plain_cross_entropy(dtype: str) -> None:
    """The shape of bench/cross_entropy.py at a sixteenth of the logits, and of the bytes for a tile."""
    done = subprocess.run(
        [sys.executable, str(ROOT / "bench" / "cross_entropy.py"), "--dtype", dtype, "--tokens", "2048",
         "--width", "256", "--vocabulary", "32768", "--chunk-bytes", str(2**24), "--rounds", "1", "--bound", "0.1",
         "--memory-only", "--contenders", "plain", "smalti"],
        env={"PYTHONPATH": str(ROOT / "tools"), "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
