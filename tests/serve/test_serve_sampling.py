"""Sampling: shares as the distribution says, bounds that hold, and no dependence on the batch."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from smalti.base.errors import UserError
from smalti.serve.engine.sampling import NotFinite, SamplingParams, _truncated_probabilities, sample

LOGITS = torch.tensor([0.1, 2.0, 1.0, -1.0, 0.5]).log_softmax(-1)


def _draws(n: int, **values) -> list[int]:
    params = [SamplingParams(**{"temperature": 1.0, "seed": seed, **values}) for seed in range(n)]
    return sample(LOGITS.expand(n, -1), params, [7] * n)


def test_greedy_takes_the_likeliest() -> None:
    assert sample(LOGITS[None], [SamplingParams()], [0]) == [1]


def test_draws_follow_the_distribution() -> None:
    drawn = torch.bincount(torch.tensor(_draws(20_000)), minlength=5) / 20_000
    assert torch.allclose(drawn, LOGITS.exp(), atol=0.015)


@pytest.mark.slow
def test_temperature_sharpens() -> None:
    drawn = torch.bincount(torch.tensor(_draws(20_000, temperature=0.5)), minlength=5) / 20_000
    assert torch.allclose(drawn, (LOGITS / 0.5).softmax(-1), atol=0.015)


def test_top_k_and_top_p_bound_the_choice() -> None:
    assert set(_draws(2000, top_k=2)) == {1, 2}
    assert set(_draws(2000, top_p=0.5)) == {1}  # the likeliest alone has 0.52
    assert set(_draws(2000, top_p=0.6)) == {1, 2}
    assert set(_draws(2000, top_k=1)) == {1}


def test_a_draw_depends_on_seed_and_position_only() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(6, 50, generator=generator)
    params = [SamplingParams(temperature=t, seed=s, top_p=0.9) for t, s in ((1.0, 1), (0.0, 2), (0.7, 3)) for _ in "ab"]
    together = sample(logits, params, list(range(6)))
    alone = [sample(logits[i : i + 1], [params[i]], [i])[0] for i in range(6)]
    assert together == alone
    other = [sample(logits[:1], [SamplingParams(temperature=1.0, seed=1)], [at])[0] for at in range(30)]
    assert len(set(other)) > 3


@pytest.mark.slow
def test_the_bounds_do_not_depend_on_the_rows_beside_a_row() -> None:
    scaled = torch.randn(8, 50257, generator=torch.Generator().manual_seed(0)) * 3
    threads = torch.get_num_threads()
    torch.set_num_threads(2)  # which share the sum of a long row when it is alone, and then its last bit is another
    try:
        sorted_probability = scaled.sort(dim=-1, descending=True, stable=True).values.softmax(-1)
        share = sorted_probability.cumsum(-1)[:, 1000] / sorted_probability.sum(-1)  # ends just at a token
        params = [SamplingParams(temperature=1.0, top_p=float(one)) for one in share]
        together, _ = _truncated_probabilities(scaled, params)
        for row in range(8):
            alone, _ = _truncated_probabilities(scaled[row : row + 1], params[row : row + 1])
            assert torch.equal(alone[0], together[row])
    finally:
        torch.set_num_threads(threads)


def test_all_but_one_token_impossible() -> None:
    logits = torch.full((1, 8), float("-inf"))
    logits[0, 5] = 0.0
    assert [sample(logits, [SamplingParams(temperature=1.0, seed=s)], [0])[0] for s in range(20)] == [5] * 20


@pytest.mark.parametrize("row", [[0.0, float("nan")], [0.0, float("inf")], [float("-inf"), float("-inf")]])
def test_what_is_no_distribution_is_refused(row: list[float]) -> None:
    for temperature in (0.0, 1.0):
        with pytest.raises(NotFinite, match="NaN"):
            sample(torch.tensor([row]), [SamplingParams(temperature=temperature)], [0])


@given(
    st.lists(st.floats(-(2.0**127), 2.0**127, width=32) | st.floats(-30, 30, width=32), min_size=1, max_size=40),
    st.sampled_from([1e-3, 0.1, 1.0, 1e38]),
    st.floats(0, 1, exclude_min=True),
    st.integers(0, 50),
    st.integers(0, 2**40),
)
def test_every_draw_is_a_token_inside_the_bounds(
    logits: list[float], temperature: float, top_p: float, top_k: int, seed: int
) -> None:
    params = SamplingParams(temperature=temperature, top_p=top_p, top_k=top_k, seed=seed)
    (token,) = sample(torch.tensor([logits]), [params], [0])
    scaled = (torch.tensor(logits) - max(logits)) / temperature
    order = scaled.sort(descending=True, stable=True).indices.tolist()
    before = order[: order.index(token)]
    probabilities = scaled.softmax(-1)
    assert len(before) < (top_k or len(logits))
    assert probabilities[token] > 0
    if top_k == 0:
        assert float(probabilities[before].double().sum()) <= top_p + 1e-5


@pytest.mark.parametrize(
    "values",
    [
        {"top_p": 0.0},
        {"max_tokens": 0},
        {"temperature": -1.0},
        {"temperature": 1e-38},
        {"temperature": float("nan")},
        {"top_k": -1},
        {"stop": ("",)},
    ],
)
def test_bad_values_are_named(values: dict) -> None:
    with pytest.raises(UserError, match=next(iter(values))):
        SamplingParams(**values)
