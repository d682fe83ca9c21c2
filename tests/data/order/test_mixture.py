from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smalti.base.errors import UserError
from smalti.config.data import DataConfig
from smalti.config.durations import RunLength
from smalti.data.order.mixture import RAMP_SPANS, compile_spans, quantise
from smalti.data.order.spans import Span

UNIT = 1 << 16


@pytest.mark.proof
@given(st.dictionaries(st.text(min_size=1, max_size=3), st.floats(1e-9, 1e9), min_size=1, max_size=20))
def test_quantised_weights(weights: dict[str, float]) -> None:
    whole = quantise(weights, UNIT)
    assert sum(whole.values()) == UNIT
    assert min(whole.values()) >= 1
    total = sum(map(Fraction, map(str, weights.values())))
    exact = {name: Fraction(str(weight)) / total * UNIT for name, weight in weights.items()}
    if all(share >= 1 for share in exact.values()):
        assert all(abs(whole[name] - exact[name]) < 1 for name in weights)


def test_largest_remainder_and_minimum() -> None:
    assert quantise({"a": 0.8, "b": 0.2}, 5) == {"a": 4, "b": 1}
    assert quantise({"a": 1, "b": 1, "c": 1}, 65_536) == {"a": 21_846, "b": 21_845, "c": 21_845}
    assert quantise({"a": 1e12, "b": 1e-12, "c": 1e-12}, 65_536) == {"a": 65_534, "b": 1, "c": 1}
    with pytest.raises(UserError, match="3 sources are too many for one stage"):
        quantise({"a": 1, "b": 1, "c": 1}, 2)


def _data(*stages: dict[str, Any], seq_len: int = 8) -> DataConfig:
    names = sorted({name for stage in stages for name in {**stage["weights"], **stage.get("weights_end", {})}})
    return DataConfig(sources={name: name for name in names}, seq_len=seq_len, stages=stages)


def _spans(*stages: dict[str, Any], steps: int = 300, batches: tuple[tuple[int, int], ...] = ((0, 80),)) -> list[Span]:
    config = _data(*stages)
    return compile_spans(config, RunLength(steps, batches), sorted(config.sources))


def test_decimal_weights_are_exact() -> None:
    spans = _spans({"until": "0.5run", "weights": {"a": 0.67, "b": 0.33}}, {"weights": {"a": 2, "b": 1}})
    assert [span.weights for span in spans] == [(201, 99), (200, 100)]
    assert [span.start_step for span in spans] == [0, 150]


def test_awkward_weights_are_parts_of_a_multiple_of_the_batch() -> None:
    stage = {"weights": {"a": 0.123457, "b": 0.9}}
    for rows, parts in ((1, 1024), (10, 10_240), (1000, 66_000), (1024, 65_536), (4096, 262_144)):
        (span,) = _spans(stage, batches=((0, rows * 8),))
        assert sum(span.weights) == parts
        assert abs(Fraction(span.weights[0], parts) - Fraction("0.123457") / Fraction("1.023457")) < Fraction(1, parts)


@pytest.mark.parametrize(("until", "step"), [("0.8run", 80), ("30step", 30), ("3200tok", 40), ("3239tok", 40)])
def test_stages_end_at_whole_steps(until: str, step: int) -> None:
    spans = _spans({"until": until, "weights": {"a": 1}}, {"weights": {"b": 1}}, steps=100)
    assert [span.start_step for span in spans] == [0, step]


@pytest.mark.parametrize(
    ("untils", "message"),
    [
        (("0.001run",), r"data\.stages\[0\] ends at '0.001run', which is step 0"),
        (("50step", "0.5run"), r"data\.stages\[1\] ends at '0.5run', which is step 50"),
        (("101step",), "which is step 101"),
        (("100step",), r"data\.stages\[1\] ends at '1run'"),
    ],
)
def test_stage_without_a_step_or_beyond_the_run_is_refused(untils: tuple[str, ...], message: str) -> None:
    stages = [{"until": until, "weights": {"a": 1}} for until in untils]
    with pytest.raises(UserError, match=message):
        _spans(*stages, {"weights": {"a": 1}}, steps=100)


def test_a_batch_of_part_of_a_sequence_is_refused_with_the_nearest() -> None:
    with pytest.raises(UserError, match=r"the global batch of 84 tokens in data\.stages\[0\]") as caught:
        _spans({"weights": {"a": 1}}, batches=((0, 84),))
    assert caught.value.hint == "train.global_batch_tokens=80"


def test_ramps_are_steps_on_the_straight_line_between_normalised_weights() -> None:
    (*ramp, after) = _spans(
        {"until": "200step", "weights": {"a": 8, "b": 2}, "weights_end": {"b": 0.5, "c": 0.5}}, {"weights": {"c": 1}}
    )
    assert len(ramp) == RAMP_SPANS
    assert after == Span(200, 10, 8, (0, 0, sum(after.weights)), 1)
    for index, span in enumerate(ramp):
        end = (ramp[index + 1] if index + 1 < len(ramp) else after).start_step
        way = (span.start_step + end) / 2 / 200
        expected = [0.8 * (1 - way), 0.2 * (1 - way) + 0.5 * way, 0.5 * way]
        assert [w / sum(span.weights) for w in span.weights] == pytest.approx(expected, abs=1e-3)
        assert min(span.weights) > 0
    short = _spans({"weights": {"a": 1}, "weights_end": {"b": 1}}, steps=3)
    assert [span.start_step for span in short] == [0, 1, 2]
    assert [Fraction(span.weights[1], sum(span.weights)) for span in short] == [Fraction(n, 6) for n in (1, 3, 5)]


def test_batch_ramps_cut_spans_and_weights_of_one_span_hang_on_nothing_else() -> None:
    stages = ({"until": "100step", "weights": {"a": 0.123457, "b": 1}}, {"weights": {"a": 1, "b": 0.777773}})
    spans = _spans(*stages, batches=((0, 24), (40, 80)))
    assert [(span.start_step, span.rows, span.stage) for span in spans] == [(0, 3, 0), (40, 10, 0), (100, 10, 1)]
    assert len({sum(span.weights) for span in spans}) == 1
    alone = _spans(stages[0] | {"until": "1run"}, batches=((0, 24),))
    assert alone[0].digest == spans[0].digest
    assert len({span.digest for span in spans}) == 3
