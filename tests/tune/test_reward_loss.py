"""The loss of a reward model over packed rows, against its formula over single answers, in float64."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from example_rows import Answer, Layerless, Pair, pack, rows_of_pairs, some_pairs
from hypothesis import given
from torch import Tensor

from smalti.config.preference import RewardConfig
from smalti.tune.losses.reward import bradley_terry
from smalti.tune.reward.loss import RewardLoss


class Scorer(Layerless):
    """A score of each token."""

    def forward(self, inputs: Tensor, positions: Tensor, documents: Tensor, **_: Any) -> Any:
        hidden = self.table[inputs] + self.place[positions]
        return SimpleNamespace(value=hidden.tanh() @ self.weight[:1].T, router=None)


def _score(model: Scorer, answer: Answer) -> Tensor:
    hidden = model.table[answer.ids[-1]] + model.place[len(answer.ids) - 1]
    return hidden.tanh() @ model.weight[0]


def _check(rows: list[list[Pair]]) -> None:
    model, pairs = Scorer(), [pair for row in rows for pair in row]
    expected = torch.zeros((), dtype=torch.float64)
    for pair in pairs:
        chosen, rejected = _score(model, pair.first), _score(model, pair.second)
        expected = expected + (1 + (rejected + pair.values["margin"] - chosen).exp()).log()
        expected = expected + 0.3 * (chosen + rejected) ** 2
    torch.autograd.backward(expected)
    wanted = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    total, weight, metrics = RewardLoss(RewardConfig(center_coef=0.3))(model, pack(rows))
    torch.autograd.backward(total)
    assert int(weight) == len(pairs)
    torch.testing.assert_close(total, expected, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close([p.grad for p in model.parameters()], wanted, rtol=1e-8, atol=1e-9)
    margins = [float((_score(model, pair.first) - _score(model, pair.second)).detach()) for pair in pairs]
    assert float(metrics["reward/accuracy"]) == sum(0.5 if abs(m) < 1e-9 else float(m > 0) for m in margins)


def test_a_score_is_that_of_the_last_token() -> None:
    pairs = some_pairs(5)
    _check([pairs[:2], [], pairs[2:]])


@pytest.mark.slow
@pytest.mark.proof
@given(rows=rows_of_pairs())
def test_loss_and_gradients_of_packed_rows(rows: list[list[Pair]]) -> None:
    _check(rows)


def test_without_margin_and_centring() -> None:
    chosen, rejected = torch.tensor([1.0, -2.0]), torch.tensor([0.5, 3.0])
    expected = -torch.sigmoid(chosen - rejected).log()
    torch.testing.assert_close(bradley_terry(chosen, rejected), expected)
    torch.testing.assert_close(bradley_terry(chosen + 0.25, rejected, torch.full((2,), 0.25)), expected)
