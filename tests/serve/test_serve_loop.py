"""The engine's thread: requests from many threads, aborts, errors of one and of all, and its end."""

import queue
import threading
import time
from collections.abc import Iterator

import pytest
import torch
from tiny_models import ByteTokenizer, llama_config, tiny_model

from smalti.base.errors import RetryableError, UserError
from smalti.serve.engine.engine import Engine
from smalti.serve.engine.loop import EngineLoop
from smalti.serve.engine.offline import generate
from smalti.serve.engine.request import RequestOutput
from smalti.serve.engine.sampling import SamplingParams
from smalti.serve.engine.scheduler import Limits, QueueFull

LONG = SamplingParams(max_tokens=10_000, ignore_eos=True)
WAIT_S = 30


@pytest.fixture
def loop() -> Iterator[EngineLoop]:
    made = EngineLoop(Engine(tiny_model(llama_config(context=20_000)), ByteTokenizer(), limits=Limits(max_rows=4)))
    yield made
    made.close()


def finish(outputs: "queue.Queue[RequestOutput]") -> list[RequestOutput]:
    """All outputs up to the last."""
    taken = [outputs.get(timeout=WAIT_S)]
    while taken[-1].finish_reason is None:
        taken.append(outputs.get(timeout=WAIT_S))
    return taken


def test_threads_get_what_generate_gives(loop: EngineLoop) -> None:
    prompts = [f"prompt {index}" * (1 + index % 3) for index in range(12)]
    params = SamplingParams(max_tokens=20, temperature=0.8)
    texts: dict[str, str] = {}

    def ask(prompt: str) -> None:
        outputs: queue.Queue[RequestOutput] = queue.Queue()
        loop.submit(prompt, params, outputs.put)
        texts[prompt] = "".join(output.text for output in finish(outputs))

    threads = [threading.Thread(target=ask, args=(prompt,)) for prompt in prompts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    other = Engine(loop.engine.model, ByteTokenizer())
    assert [texts[prompt] for prompt in prompts] == [answer.text for answer in generate(other, prompts, params)]
    assert loop.counts().generated_tokens_total > 0


def test_abort_frees_the_row_and_leaves_the_others(loop: EngineLoop) -> None:
    first: queue.Queue[RequestOutput] = queue.Queue()
    other: queue.Queue[RequestOutput] = queue.Queue()
    number = loop.submit("abc", LONG, first.put)
    loop.submit("xyz", SamplingParams(max_tokens=50, ignore_eos=True), other.put)
    first.get(timeout=WAIT_S)
    loop.abort(number)
    loop.abort(number)
    loop.abort(12345)
    assert finish(first)[-1].finish_reason == "abort"
    assert sum(len(output.tokens) for output in finish(other)) == 50
    assert loop.counts().running == loop.counts().kv_used_frac == 0


def test_a_bad_prompt_or_on_output_ends_that_request_alone(loop: EngineLoop, caplog: pytest.LogCaptureFixture) -> None:
    good: queue.Queue[RequestOutput] = queue.Queue()
    loop.submit("abc", SamplingParams(max_tokens=200, ignore_eos=True), good.put)
    with pytest.raises(UserError, match="not in the vocabulary"):
        loop.submit([1, 257], LONG, good.put)
    with pytest.raises(UserError, match="no token"):
        loop.submit([], LONG, good.put)

    def broken(output: RequestOutput) -> None:
        raise RuntimeError("nobody listens")

    loop.submit("abc", LONG, broken)
    assert sum(len(output.tokens) for output in finish(good)) == 200
    assert loop.error is None
    assert "on_output failed" in caplog.text
    assert loop.counts().running == 0


def test_more_than_may_wait_are_refused() -> None:
    engine = Engine(tiny_model(llama_config(context=2000)), ByteTokenizer(), limits=Limits(max_rows=1, max_waiting=2))
    for _ in range(3):
        engine.submit("abc", LONG, lambda output: None)
    with pytest.raises(QueueFull, match="3 requests"):
        engine.submit("abc", LONG, lambda output: None)
    engine.step()
    assert (engine.counts().running, engine.counts().waiting) == (1, 2)
    engine.end_all()
    assert engine.idle
    engine.submit("abc", LONG, lambda output: None)


def test_an_error_of_the_engine_is_told_to_all_and_stays(loop: EngineLoop, caplog: pytest.LogCaptureFixture) -> None:
    outputs: list[queue.Queue[RequestOutput]] = [queue.Queue() for _ in range(6)]
    for one in outputs:
        loop.submit("abc", LONG, one.put)
    outputs[0].get(timeout=WAIT_S)

    def fail(last: dict[int, int]) -> None:
        raise MemoryError("out of memory")

    loop.engine._runner.decode = fail  # type: ignore[assignment]
    for one in outputs:
        last = finish(one)[-1]
        assert last.finish_reason == "error"
        assert isinstance(last.error, MemoryError)
    assert isinstance(loop.error, MemoryError)
    with pytest.raises(RetryableError, match="out of memory"):
        loop.submit("abc", LONG, outputs[0].put)
    assert "the engine failed" in caplog.text


def test_close_ends_what_runs_and_may_come_twice(loop: EngineLoop) -> None:
    outputs: list[queue.Queue[RequestOutput]] = [queue.Queue() for _ in range(6)]
    for one in outputs:
        loop.submit("abc", LONG, one.put)
    loop.close()
    loop.close()
    assert [finish(one)[-1].finish_reason for one in outputs] == ["abort"] * 6
    with pytest.raises(RetryableError, match="shutting down"):
        loop.submit("abc", LONG, outputs[0].put)
    assert not [thread for thread in threading.enumerate() if thread.name == "engine"]


def test_an_idle_engine_costs_nothing(loop: EngineLoop) -> None:
    outputs: queue.Queue[RequestOutput] = queue.Queue()
    loop.submit("abc", SamplingParams(max_tokens=2, ignore_eos=True), outputs.put)
    finish(outputs)
    time.sleep(0.1)
    before = time.process_time()
    time.sleep(0.3)
    assert time.process_time() - before < 0.1


def test_numbers_that_are_not_finite_end_their_request_alone() -> None:
    model = tiny_model(llama_config())
    with torch.no_grad():
        model.embed.weight[7] = float("nan")
    engine = Engine(model, ByteTokenizer())
    good, bad, late = list[RequestOutput](), list[RequestOutput](), list[RequestOutput]()
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    engine.submit("abc", params, good.append)
    engine.submit([1, 7, 2], params, bad.append)
    engine.submit([1, 2], params, late.append)
    while engine.step():
        pass
    assert bad[-1].finish_reason == "error"
    assert "finite" in str(bad[-1].error)
    expected = generate(Engine(model, ByteTokenizer()), ["abc", [1, 2]], params)
    for outputs, answer in zip((good, late), expected, strict=True):
        assert tuple(token.id for output in outputs for token in output.tokens) == answer.token_ids
