"""Answers of the app in this process: which fields are honoured, where tokens begin, prompts that fill the context."""

import contextlib
from collections.abc import Iterator

import pytest
from app_requests import error_message, send
from tiny_models import llama_config, tiny_model
from tiny_runs import tiny_tokenizer, tokenizer_with_unused_ids

from smalti.data.tokenizer.chat import PlainChat
from smalti.data.tokenizer.encode import Tokenizer
from smalti.serve.engine.engine import Engine
from smalti.serve.engine.loop import EngineLoop
from smalti.serve.server.app import build
from smalti.serve.server.guard import Guard
from smalti.serve.server.metrics import Metrics
from smalti.serve.server.serving import Serving

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


@contextlib.contextmanager
def app_of(tokenizer: Tokenizer) -> Iterator[Guard]:
    engine = Engine(tiny_model(llama_config(vocab_size=320, context=64)), tokenizer)
    with contextlib.closing(EngineLoop(engine)) as loop:
        yield build(Serving(engine, loop, PlainChat(), Metrics(loop.counts), "tiny"))


@pytest.fixture(scope="module")
def app() -> Iterator[Guard]:
    with app_of(tiny_tokenizer()) as app:
        yield app


def test_both_names_of_the_longest_answer_count_on_both_routes(app: Guard) -> None:
    for name in ("max_tokens", "max_completion_tokens"):
        for path, body in ((TEXT, {"prompt": "x"}), (CHAT, {"messages": [{"role": "user", "content": "x"}]})):
            answer = send(app, "POST", path, json={**body, name: 3, "ignore_eos": True})
            assert answer.json()["usage"]["completion_tokens"] == 3


def test_what_is_ignored_inside_other_fields_is_named_too(app: Guard) -> None:
    body = {"prompt": "x", "max_tokens": 1, "stream": True, "user": "me", "store": None}
    body["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
    answer = send(app, "POST", TEXT, json=body)
    assert answer.headers["x-smalti-ignored-fields"] == "user, stream_options.continuous_usage_stats"
    named = {"role": "user", "content": [{"type": "text", "text": "x", "cache_control": {}}], "name": "Ann"}
    answer = send(app, "POST", CHAT, json={"messages": [named, {**named, "refusal": None}], "max_tokens": 1})
    assert answer.headers["x-smalti-ignored-fields"] == "messages.name, messages.content.cache_control"


def test_a_prompt_that_fills_the_context_can_be_scored(app: Guard) -> None:
    tokenizer = tiny_tokenizer()
    body = {"echo": True, "logprobs": 1, "max_tokens": 0}
    answer = send(app, "POST", TEXT, json={**body, "prompt": list(range(64))})
    assert len(answer.json()["choices"][0]["logprobs"]["tokens"]) == 64
    text = next(text for n in range(300) if len(tokenizer.encode(text := "7" * n)) == 63)
    answer = send(app, "POST", TEXT, json={**body, "prompt": text})
    assert len(answer.json()["choices"][0]["logprobs"]["tokens"]) == 63
    error_message(send(app, "POST", TEXT, json={**body, "prompt": text, "max_tokens": 1}), 400, param="prompt")


def test_tokens_are_placed_in_the_text_after_a_prompt_that_ends_inside_a_character(app: Guard) -> None:
    tokenizer = tiny_tokenizer()
    first = next(i for i in range(tokenizer.vocab_size) if tokenizer.token_bytes(i) == b"\xf0")
    for seed in range(8):
        body = {"prompt": [*tokenizer.encode("ab"), first], "max_tokens": 12, "seed": seed, "logprobs": 0}
        choice = send(app, "POST", TEXT, json=body).json()["choices"][0]
        scores = choice["logprobs"]
        placed = [
            (token, choice["text"][place : place + len(token)])
            for token, place in zip(scores["tokens"], scores["text_offset"], strict=True)
            if token.isascii() and not token.startswith(("bytes:", "<|"))
        ]
        assert placed
        for token, shown in placed:
            assert shown.lstrip("\ufffd") == token[: len(shown.lstrip("\ufffd"))]


def test_an_id_without_a_token_ends_nothing() -> None:
    tokenizer = tokenizer_with_unused_ids()
    with app_of(tokenizer) as app:
        for seed in range(5):
            body = {"prompt": "x", "max_tokens": 50, "temperature": 2.0, "seed": seed, "logprobs": 20}
            assert send(app, "POST", TEXT, json={**body, "ignore_eos": True}).status_code == 200
        hole = min(tokenizer.unused_ids)
        assert f"{hole}, which" in error_message(
            send(app, "POST", TEXT, json={"prompt": [1, hole]}), 400, param="prompt"
        )
