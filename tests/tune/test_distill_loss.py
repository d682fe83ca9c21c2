"""Distillation over tiles of both vocabularies' logits, against divergences of whole logits, in float64."""

from typing import Any

import pytest
import torch
from example_rows import VOCAB, Layerless, pack, some_pairs
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import llama_config
from torch import Tensor
from torch.nn import functional as F

from smalti.base.errors import UserError
from smalti.config.preference import DistillConfig
from smalti.config.train import LossConfig
from smalti.train.batches import IGNORE
from smalti.tune.distill import DistillLoss
from smalti.tune.losses.distillation import forward_kl, reverse_kl


def _logits(model: Layerless, microbatch: Any) -> Tensor:
    counted = microbatch.targets != IGNORE
    return ((model.table[microbatch.inputs] + model.place[microbatch.positions]) @ model.weight.T)[counted]


def _check(
    direction: str, temperature: float, weight: float, chunk_bytes: int, soft_cap: float | None, *, frozen: bool = False
) -> None:
    student, teacher = Layerless(1), Layerless(2).requires_grad_(False)
    student.weight.requires_grad_(not frozen)
    microbatch = pack([some_pairs(4)[:2], some_pairs(4)[2:]])
    targets = microbatch.targets[microbatch.targets != IGNORE]
    cap = (lambda logits: logits) if soft_cap is None else lambda logits: soft_cap * torch.tanh(logits / soft_cap)
    logits, of_teacher = cap(_logits(student, microbatch)), cap(_logits(teacher, microbatch))
    p, q = (
        (x / temperature).softmax(-1)
        for x in ((of_teacher, logits) if direction == "forward" else (logits, of_teacher))
    )
    kl = temperature**2 * (p * (p / q).log()).sum()
    expected = weight * kl + (1 - weight) * F.cross_entropy(logits, targets, reduction="sum")
    torch.autograd.backward(expected)
    wanted = [p.grad.clone() for p in student.parameters() if p.grad is not None]
    student.zero_grad()
    config = DistillConfig(teacher="t", direction=direction, temperature=temperature, weight=weight)
    model = llama_config(VOCAB).model_copy(update={"final_logit_softcapping": soft_cap})
    loss = DistillLoss(model, config, LossConfig(chunk_bytes=chunk_bytes), teacher, model)
    total, count, metrics = loss(student, microbatch)
    torch.autograd.backward(total)
    assert int(count) == len(targets)
    torch.testing.assert_close(total, expected, check_dtype=False, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(metrics["loss/train/divergence"], kl, rtol=1e-9, atol=1e-9)
    tolerance = 1e-9 if weight == 1 else 1e-6  # the cross-entropy's probabilities are in fp32
    gradients = [p.grad for p in student.parameters() if p.grad is not None]
    torch.testing.assert_close(gradients, wanted, rtol=tolerance, atol=tolerance)
    exact = {"forward": forward_kl, "reverse": reverse_kl}[direction]
    torch.testing.assert_close(exact(logits, of_teacher, temperature=temperature).sum(), kl)


@pytest.mark.usefixtures("tokens_of_heads")
@pytest.mark.parametrize("direction", ["forward", "reverse"])
def test_loss_and_gradients(direction: str) -> None:
    _check(direction, 2.0, 1.0, 1, None)
    _check(direction, 0.7, 0.6, 1000, 1.5)
    _check(direction, 0.7, 0.6, 1000, 1.5, frozen=True)  # the head, as beside adapters


@pytest.mark.slow
@pytest.mark.proof
@given(
    direction=st.sampled_from(["forward", "reverse"]),
    temperature=st.floats(0.3, 5),
    weight=st.sampled_from([0.1, 0.5, 1.0]),
    chunk_bytes=st.integers(1, 5000),
    soft_cap=st.sampled_from([None, 0.7, 30.0]),
)
def test_any_tiles(direction: str, temperature: float, weight: float, chunk_bytes: int, soft_cap: float | None) -> None:
    _check(direction, temperature, weight, chunk_bytes, soft_cap)


def test_a_teacher_of_another_vocabulary_is_refused() -> None:
    with pytest.raises(UserError, match="the teacher has 12 tokens, the model 11"):
        DistillLoss(llama_config(11), DistillConfig(teacher="t"), LossConfig(), Layerless(), llama_config(12))
