"""Answers are batch-invariant: requests are submitted, end and are aborted while others generate."""

from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import ByteTokenizer, dbrx_config, llama_config, tiny_model

from smalti.serve.engine.engine import Engine
from smalti.serve.engine.request import RequestOutput
from smalti.serve.engine.sampling import SamplingParams
from smalti.serve.engine.scheduler import Limits

CONTEXT = 256


def built(family: str, dtype: torch.dtype, **limits: int) -> Engine:
    config = {"llama": llama_config, "dbrx": dbrx_config}[family](context=CONTEXT)
    return Engine(tiny_model(config).to(dtype), ByteTokenizer(), limits=Limits(**limits))


@dataclass
class Asked:
    """One request of a schedule; ``abort`` is the number of steps after which it is aborted, if that."""

    length: int
    step: int
    params: SamplingParams
    abort: int | None
    outputs: list[RequestOutput] = field(default_factory=list)

    @property
    def ids(self) -> list[int]:
        return [(7 * self.length + 13 * place) % 256 for place in range(self.length)]

    @property
    def tokens(self) -> list[int]:
        return [token.id for output in self.outputs for token in output.tokens]


asked = st.builds(
    Asked,
    length=st.integers(1, 150),
    step=st.integers(0, 12),
    params=st.builds(
        SamplingParams,
        max_tokens=st.integers(1, 20),
        temperature=st.sampled_from([0.0, 0.0, 1.0]),
        seed=st.integers(0, 3),
        logprobs=st.just(1),
        ignore_eos=st.booleans(),
    ),
    abort=st.none() | st.integers(0, 10),
)


def play(engine: Engine, schedule: list[Asked]) -> None:
    """Run a schedule to its end."""
    numbers: dict[int, int] = {}
    for step in range(1000):
        for index, one in enumerate(schedule):
            if one.step == step:
                numbers[index] = engine.submit(one.ids, one.params, one.outputs.append)
            if one.abort is not None and one.step + one.abort == step:
                engine.abort(numbers[index])
        if not engine.step() and len(numbers) == len(schedule):
            return
    raise AssertionError("the engine never came to an end")


def alone(engine: Engine, one: Asked) -> Asked:
    same = Asked(one.length, 0, one.params, None)
    play(engine, [same])
    return same


LIMITS = [{}, {"max_rows": 3, "prefill_tokens": 32}, {"max_rows": 40, "cache_bytes": 1, "prefill_tokens": 7}]


@pytest.mark.sample(1)
@settings(max_examples=max(3, settings.default.max_examples // 20))
@given(schedule=st.lists(asked, min_size=2, max_size=12), limits=st.sampled_from(LIMITS))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_answers_of_a_dense_model_are_batch_invariant_to_the_bit(dtype, schedule, limits) -> None:
    engine = built("llama", dtype, **limits)
    for one in schedule:
        one.outputs.clear()
    play(engine, schedule)
    for one in schedule:
        expected = alone(engine, one)
        scores = [token for output in one.outputs for token in output.tokens]
        assert scores == [token for output in expected.outputs for token in output.tokens][: len(scores)]
        assert one.outputs[-1].finish_reason is not None
        assert all(output.finish_reason is None for output in one.outputs[:-1])
        if one.outputs[-1].finish_reason != "abort":
            assert one.tokens == expected.tokens
            assert one.outputs[-1].finish_reason == expected.outputs[-1].finish_reason
    assert engine.idle
    assert engine.counts().kv_used_frac == 0
    assert engine._runner._cache.requests() == []
    assert not engine._runner._prompts


@pytest.mark.slow
@settings(max_examples=max(5, settings.default.max_examples // 20))
@given(schedule=st.lists(asked, min_size=2, max_size=8))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_answers_of_an_moe_are_batch_invariant_up_to_rounding(dtype, schedule) -> None:
    """The matmul of an expert has as many rows as tokens chose it. Where two tokens are as good as equally likely,
    the answers may part; until then the log-probabilities agree."""
    engine = built("dbrx", dtype)
    tolerance = 1e-4 if dtype == torch.float32 else 0.1
    for one in schedule:
        one.outputs.clear()
    play(engine, schedule)
    for one in schedule:
        expected = alone(engine, one)
        pairs = zip(
            (token for output in one.outputs for token in output.tokens),
            (token for output in expected.outputs for token in output.tokens),
            strict=False,
        )
        for mine, other in pairs:
            assert mine.logprob is not None
            assert other.logprob is not None
            if mine.id != other.id:
                assert one.params.temperature > 0 or abs(mine.logprob - other.logprob) < tolerance
                break
            assert abs(mine.logprob - other.logprob) < tolerance


def test_long_prompts_do_not_stall_those_that_run() -> None:
    engine = built("llama", torch.float32, prefill_tokens=16)
    first: list[RequestOutput] = []
    second: list[RequestOutput] = []
    engine.submit([1, 2, 3], SamplingParams(max_tokens=40, ignore_eos=True), first.append)
    engine.step()
    engine.submit([5] * 160, SamplingParams(max_tokens=2), second.append)
    for turn in range(1, 10):
        engine.step()
        assert (len(first), len(second)) == (2 + turn, 0)
    engine.step()
    assert len(second) >= 1
    assert engine.counts().prompt_tokens_total == 163


def test_no_request_overtakes_one_that_waits_longer() -> None:
    engine = built("llama", torch.float32, max_rows=2)
    order: list[int] = []
    for index in range(7):
        engine.submit([index], SamplingParams(max_tokens=3), lambda output, index=index: order.append(index))
    while engine.step():
        pass
    assert [index for place, index in enumerate(order) if index not in order[:place]] == list(range(7))
