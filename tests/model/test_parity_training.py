"""Loss and the gradient of every parameter against transformers, float32 to 1e-5."""

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from model_cases import distance, ids
from parity import CALM, FAMILIES, LENGTH, MODELS, Pair, drawn, options, our_logits, pair, their_logits
from torch import Tensor, nn
from torch.nn import functional as F

from smalti.model.huggingface import load_folder

pytest.importorskip("transformers")
pytestmark = [pytest.mark.slow, pytest.mark.proof]

IGNORED = -100
SMALLEST_SHARE = 1e-2
"""A tensor's gradient that is smaller than this share of the whole model's is a sum that cancels, such as that of a
router whose one chosen weight is divided by itself; its error is measured against the share."""
WORST: dict[str, dict[str, float]] = {}


@pytest.fixture(scope="module", autouse=True)
def _recorded(record) -> Iterator[None]:
    yield
    record("parity-training", {"relative_error": WORST, "models_per_family": MODELS})


def _keep(what: str, family: str, error: float) -> float:
    figures = WORST.setdefault(what, {})
    figures[family] = max(figures.get(family, 0.0), error)
    return error


@pytest.mark.parametrize("family", FAMILIES)
@drawn
@given(data=st.data(), time=st.integers(2, LENGTH * 3 // 2), seed=st.integers(0, 99))
def test_loss_and_gradients(family, data, time, seed):
    with pair(family, data.draw(options(family)), gain=CALM) as models:
        ids_BT = ids(models.ours.config, 2, time, seed)
        labels_BT = ids_BT.masked_fill(ids(models.ours.config, 2, time, seed + 1) % 4 == 0, IGNORED)
        labels_BT[0, -1] = ids_BT[0, -1]  # one counts in any case
        their_loss, choices = _their_loss(models.theirs, ids_BT, labels_BT)
        our_loss = _our_loss(models, ids_BT, labels_BT, choices)
        assert _keep("loss", family, abs(our_loss - their_loss) / max(their_loss, SMALLEST_SHARE)) < 1e-5
        theirs = _their_gradients(models)
        ours = {name: parameter.grad for name, parameter in models.ours.named_parameters()}
        floor = SMALLEST_SHARE * float(torch.stack([gradient.norm() for gradient in theirs.values()]).norm())
        for name, gradient in theirs.items():
            error = _relative(ours[name], gradient, floor)
            assert _keep("gradients", family, error) < 1e-5, f"{name}: {error:.2e}"


def _their_loss(theirs: nn.Module, ids_BT: Tensor, labels_BT: Tensor) -> tuple[float, list[Tensor]]:
    with torch.no_grad():
        _, choices = their_logits(theirs, ids_BT)
    loss = theirs(input_ids=ids_BT, labels=labels_BT, use_cache=False).loss
    loss.backward()
    return float(loss.detach()), choices


def _our_loss(models: Pair, ids_BT: Tensor, labels_BT: Tensor, choices: list[Tensor]) -> float:
    logits_BTV = our_logits(models.ours, ids_BT, choices)
    loss = F.cross_entropy(logits_BTV[:, :-1].flatten(0, 1), labels_BT[:, 1:].flatten(), ignore_index=IGNORED)
    loss.backward()
    return float(loss.detach())


def _their_gradients(models: Pair) -> dict[str, Tensor]:
    """Under our names: a model whose weights are the gradients, saved and read like any other."""
    with torch.no_grad():
        for parameter in models.theirs.parameters():
            parameter.copy_(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
    models.theirs.save_pretrained(models.folder)
    return dict(load_folder(models.folder).state_dict())


def _relative(ours: Tensor | None, theirs: Tensor, floor: float) -> float:
    ours = torch.zeros_like(theirs) if ours is None else ours
    return distance(ours, theirs) * float(theirs.norm()) / max(float(theirs.norm()), floor)
