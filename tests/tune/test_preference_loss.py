"""Preference losses over packed rows, against formulas over single answers, in float64."""

import math
from typing import Any

import pytest
import torch
from example_rows import Layerless, Pair, length, log_p, pack, rows_of_pairs, some_pairs
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import llama_config
from torch import Tensor

from smalti.config.preference import PreferenceConfig
from smalti.config.train import LossConfig
from smalti.train.step import Loss
from smalti.tune.preference.loss import KTOLoss, cached_reference, preference_loss

CASES = [
    {"loss": "dpo", "beta": 0.3},
    {"loss": "dpo", "label_smoothing": 0.2},
    {"loss": "robust_dpo", "label_smoothing": 0.1},
    {"loss": "ipo", "beta": 0.4},
    {"loss": "simpo", "gamma": 0.7},
    {"loss": "simpo", "beta": 1.5, "label_smoothing": 0.1},
    {"loss": "kto", "desirable_weight": 1.3, "undesirable_weight": 0.6},
]


def loss_of(case: dict[str, Any], chunk_bytes: int = 2**20) -> Loss:
    config = PreferenceConfig(**case)
    reference = cached_reference if config.traits.has_reference else None
    return preference_loss(llama_config(), config, LossConfig(chunk_bytes=chunk_bytes), reference)


def _sigmoid(x: Tensor) -> Tensor:
    return 1 / (1 + (-x).exp())


def _expected(case: dict[str, Any], model: Layerless, pair: Pair) -> Tensor:
    """The loss of one pair, from the papers' formulas with whole logits."""
    name, smoothing = case["loss"], case.get("label_smoothing", 0.0)
    beta = case.get("beta", 2.0 if name == "simpo" else 0.1)
    first, second = log_p(model, pair.first), log_p(model, pair.second)
    if name == "simpo":
        margin = beta * first / length(pair.first) - beta * second / length(pair.second) - case.get("gamma", 1.0)
        return -(1 - smoothing) * _sigmoid(margin).log() - smoothing * _sigmoid(-margin).log()
    first, second = first - pair.values["reference_first"], second - pair.values["reference_second"]
    if name == "ipo":
        return (first / length(pair.first) - second / length(pair.second) - 1 / (2 * beta)) ** 2
    if name == "kto":
        desirable = pair.values["label"] > 0
        value = _sigmoid(beta * first) if desirable else _sigmoid(-beta * first)
        return (case["desirable_weight"] if desirable else case["undesirable_weight"]) * (1 - value)
    kept, swapped = -_sigmoid(beta * (first - second)).log(), -_sigmoid(beta * (second - first)).log()
    if name == "robust_dpo":
        return ((1 - smoothing) * kept - smoothing * swapped) / (1 - 2 * smoothing)
    return (1 - smoothing) * kept + smoothing * swapped


def _gradients(model: Layerless, total: Tensor) -> list[Tensor]:
    model.zero_grad()
    torch.autograd.backward(total)
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


@pytest.mark.slow
@pytest.mark.proof
@given(case=st.sampled_from(CASES), rows=rows_of_pairs(), chunk_bytes=st.sampled_from([1, 600, 2**20]))
def test_losses_and_gradients_of_packed_rows(case: dict[str, Any], rows: list[list[Pair]], chunk_bytes: int) -> None:
    model = Layerless()
    pairs = [pair for row in rows for pair in row]
    expected = torch.stack([_expected(case, model, pair) for pair in pairs]).sum()
    wanted = _gradients(model, expected)
    total, weight, metrics = loss_of(case, chunk_bytes)(model, pack(rows))
    assert int(weight) == len(pairs)
    torch.testing.assert_close(total, expected, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(_gradients(model, total), wanted, rtol=1e-8, atol=1e-9)
    if case["loss"] != "kto":
        chosen = sum(float(log_p(model, pair.first).detach()) for pair in pairs)
        assert float(metrics["preference/logp_chosen"]) == pytest.approx(chosen)
        assert float(metrics["loss/train/targets"]) == sum(length(p.first) + length(p.second) for p in pairs)


@pytest.mark.usefixtures("tokens_of_heads")
@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case.values())))
def test_the_sum_does_not_depend_on_packing_and_microbatches(case: dict[str, Any]) -> None:
    rows = some_pairs(7)
    model, loss = Layerless(), loss_of(case)
    whole, weight, metrics = loss(model, pack([rows], seq_len=200))
    wanted = _gradients(model, whole)
    torch.testing.assert_close(whole, torch.stack([_expected(case, model, pair) for pair in rows]).sum())
    parts = [loss(model, pack([[pair]])) for pair in rows] + [loss(model, pack([[]], seq_len=9, like=rows))]
    assert sum(int(part[1]) for part in parts) == int(weight) == 7
    total = torch.stack([part[0] for part in parts]).sum()
    torch.testing.assert_close(total, whole)
    torch.testing.assert_close(_gradients(model, total), wanted)
    for name, value in metrics.items():
        torch.testing.assert_close(torch.stack([part[2][name] for part in parts]).sum(), value, check_dtype=False)


def test_kto_uses_the_divergence_of_the_step_before() -> None:
    loss = loss_of({"loss": "kto"})
    assert isinstance(loss, KTOLoss)
    rows, model = some_pairs(4), Layerless()
    total, weight, metrics = loss(model, pack([rows]))
    sums = {**metrics, "weight": weight}
    loss.state.after_step(model, sums, skip=torch.tensor(True))
    assert float(loss.state.value) == 0
    sums["preference/kl_estimate"] = torch.tensor(6.0)
    loss.state.after_step(model, sums, skip=torch.tensor(False))
    assert float(loss.state.value) == 1.5
    assert loss.state.tensors() == {"loss.kl": loss.state.value}
    later = loss(model, pack([rows]))[0]
    expected = 0.0
    for pair in rows:
        value = 0.1 * (float(log_p(model, pair.first).detach()) - pair.values["reference_first"] - 1.5)
        expected += 1 / (1 + math.exp(value if pair.values["label"] else -value))
    assert float(later.detach()) == pytest.approx(expected)
    assert float(later.detach()) != pytest.approx(float(total.detach()))
    sums["preference/kl_estimate"] = torch.tensor(-6.0)
    loss.state.after_step(model, sums, skip=torch.tensor(False))
    assert float(loss.state.value) == 0, "a divergence is not negative"


@pytest.mark.parametrize("name", ["dpo", "ipo", "simpo", "kto"])
def test_ties_with_the_reference_are_half_accurate(name: str) -> None:
    model, pairs = Layerless(), []
    for pair in some_pairs(3):
        second = pair.first if name == "simpo" else pair.second
        log_ps = (float(log_p(model, answer).detach()) for answer in (pair.first, second))
        references = dict(zip(("reference_first", "reference_second"), log_ps, strict=True))
        pairs.append(Pair(pair.first, second, {**references, "label": 1.0}))
    for dtype in (torch.float64, torch.float32):  # equal, and up to rounding
        _, weight, metrics = loss_of({"loss": name})(model, pack([pairs], dtype=dtype))
        assert float(metrics["preference/accuracy"] / weight) == 0.5
