"""Logits of every family against transformers, float32 to 1e-5 and bfloat16 to 1e-2 in ||a - b|| / ||b||."""

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from model_cases import distance, ids
from parity import ALIBI, CALM, FAMILIES, LENGTH, MODELS, Pair, drawn, options, our_logits, pair, their_logits
from torch import Tensor

pytest.importorskip("transformers")
pytestmark = [pytest.mark.slow, pytest.mark.proof]

BATCH = 2
WORST: dict[str, dict[str, float]] = {}


@pytest.fixture(scope="module", autouse=True)
def _recorded(record) -> Iterator[None]:
    yield
    record("parity-logits", {"relative_error": WORST, "models_per_family": MODELS})


def _check(what: str, family: str, ours: Tensor, theirs: Tensor, bound: float) -> None:
    error = distance(ours, theirs)
    figures = WORST.setdefault(what, {})
    figures[family] = max(figures.get(family, 0.0), error)
    assert error < bound, f"{what}: {error:.2e}"


@pytest.mark.parametrize("family", FAMILIES)
@drawn
@given(data=st.data(), time=st.integers(2, LENGTH * 3 // 2), seed=st.integers(0, 99))
def test_float32(family, data, time, seed):
    with pair(family, data.draw(options(family))) as models, torch.no_grad():
        ids_BT = ids(models.ours.config, BATCH, time, seed)
        theirs, choices = their_logits(models.theirs, ids_BT)
        _check("rows", family, our_logits(models.ours, ids_BT, choices), theirs, 1e-5)
        _padded(family, models, ids_BT, data.draw(st.integers(0, time - 1)), data.draw(st.booleans()))
        _packed(family, models, ids_BT, data.draw(st.integers(1, time - 1)))


def _padded(family: str, models: Pair, ids_BT: Tensor, pads: int, left: bool) -> None:
    """The last row is shorter by ``pads``: an attention mask there, another document here."""
    real_BT = torch.ones_like(ids_BT)
    real_BT[-1, :pads] = 0
    real_BT = real_BT if left else real_BT.flip(1)
    positions_BT = (real_BT.cumsum(1) - 1).clamp(min=0)
    theirs, choices = their_logits(models.theirs, ids_BT, attention_mask=real_BT, position_ids=positions_BT)
    ours = our_logits(models.ours, ids_BT, choices, positions_BT, real_BT, real_BT)
    _check("padded", family, ours[real_BT.bool()], theirs[real_BT.bool()], 1e-5)


def _packed(family: str, models: Pair, ids_BT: Tensor, cut: int) -> None:
    """Two documents in a row: each alone there, and in one row with positions that start again."""
    time = ids_BT.shape[1]
    positions_T = torch.cat((torch.arange(cut), torch.arange(time - cut)))
    documents_T = (torch.arange(time) >= cut).long()
    rows = (positions_T.expand_as(ids_BT), documents_T.expand_as(ids_BT))
    scaling = models.ours.config.rope_scaling
    if scaling is None or scaling.rope_type not in ("dynamic", "longrope"):  # these look at the longest of a batch
        parts = [their_logits(models.theirs, part) for part in (ids_BT[:, :cut], ids_BT[:, cut:])]
        choices = [torch.cat(both, dim=1) for both in zip(*(choices for _, choices in parts), strict=True)]
        theirs = torch.cat([logits for logits, _ in parts], dim=1)
        _check("packed", family, our_logits(models.ours, ids_BT, choices, *rows), theirs, 1e-5)
    if family not in ALIBI and cut not in (0, time):
        theirs, choices = their_logits(models.theirs, ids_BT, position_ids=rows[0])
        _check("packed", family, our_logits(models.ours, ids_BT, choices, *rows), theirs, 1e-5)


@pytest.mark.parametrize("family", FAMILIES)
@drawn
@given(data=st.data(), time=st.integers(2, LENGTH * 3 // 2), seed=st.integers(0, 99))
def test_bfloat16(family, data, time, seed):
    with pair(family, data.draw(options(family)), torch.bfloat16, CALM) as models, torch.no_grad():
        ids_BT = ids(models.ours.config, BATCH, time, seed)
        theirs, choices = their_logits(models.theirs, ids_BT)
        _check("bfloat16", family, our_logits(models.ours, ids_BT, choices), theirs, 1e-2)
