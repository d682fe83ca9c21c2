"""What goes wrong inside a server: whose fault it is said to be, and that the others are still answered."""

import asyncio
import contextlib
import json
import time
from collections.abc import Iterator

import httpx
import pytest
import torch
from app_requests import error_message, send
from tiny_models import llama_config, tiny_model
from tiny_runs import tiny_tokenizer

from smalti.base.errors import CheckFailed, RetryableError, UserError
from smalti.data.tokenizer.chat import PlainChat
from smalti.serve.engine.engine import Engine
from smalti.serve.engine.loop import EngineLoop
from smalti.serve.engine.scheduler import Limits, QueueFull
from smalti.serve.server.app import build
from smalti.serve.server.errors import from_engine, from_smalti
from smalti.serve.server.guard import Guard
from smalti.serve.server.metrics import Metrics
from smalti.serve.server.serving import Serving

LIMITS = Limits(max_rows=4, max_waiting=8)
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


def tiny_engine() -> Engine:
    return Engine(tiny_model(llama_config(vocab_size=320, context=64)), tiny_tokenizer(), limits=LIMITS)


@pytest.fixture
def serving() -> Iterator[Serving]:
    with contextlib.closing(EngineLoop(tiny_engine())) as loop:
        yield Serving(loop.engine, loop, PlainChat(), Metrics(loop.counts), "tiny", max_choices=8)


@pytest.fixture
def app(serving: Serving) -> Guard:
    return build(serving)


def test_an_engine_that_failed_says_so() -> None:
    engine = tiny_engine()

    def fails(*args: object) -> None:
        raise RuntimeError("secret innards")

    engine._prefill = fails  # type: ignore[method-assign]
    loop = EngineLoop(engine)
    app = build(Serving(engine, loop, PlainChat(), Metrics(loop.counts), "tiny"))
    assert send(app, "GET", "/health").status_code == 200
    message = error_message(send(app, "POST", TEXT, json={"prompt": "x", "n": 2}), 500, type="server_error")
    assert "secret" not in message
    error_message(send(app, "GET", "/health"), 500, code="engine_failed")
    error_message(send(app, "POST", TEXT, json={"prompt": "x"}), 503)
    loop.close()


def test_errors_of_the_house_have_their_status() -> None:
    assert (from_smalti(QueueFull("full")).status, from_smalti(QueueFull("full")).code) == (429, "too_many_requests")
    assert from_smalti(RetryableError("ended")).status == 503
    assert from_smalti(UserError("wrong")).status == 400
    assert from_smalti(CheckFailed("no")).status == 500
    assert from_engine(UserError("wrong")).status == 500


def test_an_engine_that_ended_with_a_house_error_is_not_the_clients_fault(app: Guard, serving: Serving) -> None:
    serving.loop.error = UserError("innards")
    try:
        assert "innards" not in error_message(send(app, "GET", "/health"), 500, code="engine_failed")
    finally:
        serving.loop.error = None


def test_numbers_that_are_not_finite_are_a_500(app: Guard, serving: Serving) -> None:
    with torch.no_grad():
        serving.engine.model.embed.weight[40] = torch.nan
    scored = {"prompt": [1, 40, 2], "echo": True, "logprobs": 0, "max_tokens": 0}
    for body in (scored, {**scored, "max_tokens": 1}, {"prompt": [1, 40, 2]}):
        assert "not finite" in error_message(send(app, "POST", TEXT, json=body), 500, code="engine_failed")
        answer = send(app, "POST", TEXT, json={**body, "stream": True})
        failed, done, _ = answer.text.split("\n\n")
        assert json.loads(failed.removeprefix("data: "))["error"]["code"] == "engine_failed"
        assert done == "data: [DONE]"
    assert send(app, "GET", "/health").status_code == 200
    # One token only: a longer answer might draw token 40 and read it.
    assert send(app, "POST", TEXT, json={"prompt": [1, 2], "max_tokens": 1}).status_code == 200


def test_a_bug_in_a_stream_is_an_event(app: Guard, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: object) -> None:
        raise ValueError("secret innards")

    monkeypatch.setattr("smalti.serve.server.choices.Choice.add", broken)
    answer = send(app, "POST", TEXT, json={"prompt": "x", "stream": True})
    assert answer.text.endswith("data: [DONE]\n\n")
    assert "a bug in the server (ValueError)" in answer.text
    assert "secret" not in answer.text


HUGE = {
    "one word": {"prompt": "a" * 4_000_000},
    "words": {"prompt": "plain words, " * 300_000},
    "ids": {"prompt": [1] * 1_300_000},
    "prompts": {"prompt": [[1]] * 250_000},
    "a message": {"messages": [{"role": "user", "content": "plain words, " * 300_000}]},
    "messages": {"messages": [{"role": "user", "content": "x"}] * 100_000},
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", HUGE)
def test_a_huge_prompt_does_not_make_the_others_wait(app: Guard, name: str) -> None:
    raw = json.dumps(HUGE[name], separators=(",", ":")).encode()
    path = CHAT if "message" in name else TEXT

    async def longest_block_s() -> float:
        longest_s = 0.0
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            headers = {"Content-Type": "application/json"}
            asked = asyncio.create_task(client.post(path, content=raw, headers=headers))
            while not asked.done():
                begun_s = time.process_time()  # of all threads: what this machine's other programs take is left out
                await asyncio.sleep(0.005)
                longest_s = max(longest_s, time.process_time() - begun_s)
        error_message(await asked, 400)
        return longest_s

    assert 1e6 < len(raw) < 4 << 20
    assert asyncio.run(longest_block_s()) < 2.0  # the body must be read; encoding such a text takes 4 s
