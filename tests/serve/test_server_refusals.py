"""What a server must not take: strangers, wrong keys, malformed and huge bodies; and never an answer of 500."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import pytest
from app_requests import error_message, send
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tiny_models import llama_config, tiny_model
from tiny_runs import tiny_tokenizer

from smalti.data.tokenizer.chat import PlainChat
from smalti.serve.engine.engine import Engine
from smalti.serve.engine.loop import EngineLoop
from smalti.serve.engine.scheduler import Limits
from smalti.serve.server.app import build
from smalti.serve.server.guard import Guard
from smalti.serve.server.metrics import Metrics
from smalti.serve.server.serving import Serving

KEY = "k" * 24
LIMITS = Limits(max_rows=4, max_waiting=8)
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
HELLO = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def loop() -> Iterator[EngineLoop]:
    engine = Engine(tiny_model(llama_config(vocab_size=320, context=64)), tiny_tokenizer(), name="tiny", limits=LIMITS)
    loop = EngineLoop(engine)
    yield loop
    loop.close()


@pytest.fixture
def serving(loop: EngineLoop) -> Serving:
    return Serving(loop.engine, loop, PlainChat(), Metrics(loop.counts), "tiny", max_choices=8)


@pytest.fixture
def app(serving: Serving) -> Guard:
    return build(serving, max_body_bytes=20_000)


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"prompt": 7}, "prompt", "7"),
        ({"prompt": []}, "prompt", "empty"),
        ({"prompt": [[]]}, "prompt", "a list of other things"),
        ({"prompt": ["a", 1]}, "prompt", "other things"),
        ({"prompt": [True]}, "prompt", "other things"),
        ({"prompt": [320]}, "prompt", "320"),
        ({"prompt": [-1]}, "prompt", "-1"),
        ({"prompt": [10**30]}, "prompt", "many digits"),
        ({"prompt": {"a": 1}}, "prompt", "object"),
        ({"prompt": "x", "n": 0}, "n", "greater than or equal to 1"),
        ({"prompt": "x", "n": 10**9}, "n", "1000000000 choices"),
        ({"prompt": ["x"] * 9}, "n", "9 choices"),
        ({"prompt": "x", "n": True}, "n", "integer"),
        ({"prompt": "x", "n": "2"}, "n", "integer"),
        ({"prompt": "x", "max_tokens": -1}, "max_tokens", "greater"),
        ({"prompt": "x", "max_tokens": 0}, "max_tokens", "echo"),
        ({"prompt": "x", "max_tokens": 1.5}, "max_tokens", "integer"),
        ({"prompt": "x", "temperature": -0.1}, "temperature", "greater"),
        ({"prompt": "x", "temperature": 1e-9}, "temperature", "1e-09 is neither 0"),
        ({"prompt": "x", "max_tokens": 5, "max_completion_tokens": 6}, "max_tokens", "differ"),
        ({"prompt": "x", "max_completion_tokens": 0}, "max_completion_tokens", "greater"),
        ({"prompt": "x", "top_logprobs": 2}, "top_logprobs", "here 'logprobs' is their number"),
        ({"messages": [{"role": "user", "content": "hi"}]}, "messages", "/v1/chat/completions"),
        ({"prompt": [1] * 65}, "prompt", "has 65"),
        ({"prompt": [1] * 64}, "prompt", "has 64"),
        ({"prompt": [1] * 65, "max_tokens": 0, "echo": True}, "prompt", "has 65"),
        ({"prompt": [[1], [1] * 65]}, "prompt", "has 65"),
        ({"prompt": "x", "top_p": 0}, "top_p", "greater"),
        ({"prompt": "x", "top_p": 1.1}, "top_p", "less"),
        ({"prompt": "x", "top_k": 10**30}, "top_k", "less"),
        ({"prompt": "x", "seed": 2**63}, "seed", "less"),
        ({"prompt": "x", "seed": 1.5}, "seed", "integer"),
        ({"prompt": "x", "stop": ""}, "stop", "1 to 1000"),
        ({"prompt": "x", "stop": ["a"] * 17}, "stop", "16"),
        ({"prompt": "x", "stop": "a" * 1001}, "stop", "1000"),
        ({"prompt": "x", "stop": 7}, "stop", "string"),
        ({"prompt": "x", "logprobs": 21}, "logprobs", "20"),
        ({"prompt": "x", "logprobs": True}, "logprobs", "integer"),
        ({"prompt": "x", "stream": 1}, "stream", "boolean"),
        ({"prompt": "x", "stream_options": {"include_usage": True}}, "stream_options", "'stream': true"),
        ({"prompt": "x", "presence_penalty": 0.5}, "presence_penalty", "leave it out, or give 0"),
        ({"prompt": "x", "frequency_penalty": -1}, "frequency_penalty", "not supported"),
        ({"prompt": "x", "logit_bias": {"5": 1}}, "logit_bias", "not supported"),
        ({"prompt": "x", "best_of": 3}, "best_of", "not supported"),
        ({"prompt": "x", "suffix": "y"}, "suffix", "not supported"),
        ({"prompt": "x", "min_p": 0.1}, "min_p", "not supported"),
        ({"prompt": "x", "guided_json": {}}, "guided_json", "leave it out"),
        ({"prompt": "x", "use_beam_search": 0}, "use_beam_search", "not supported"),
        ({"prompt": "x", "model": "other"}, "model", "'tiny'"),
        ({"prompt": "x" * 400}, "prompt", "maximum context length is 64"),
    ],
)
def test_completions_refuse(app: Guard, body: dict[str, Any], param: str | None, words: str) -> None:
    answer = send(app, "POST", TEXT, json=body)
    assert words in error_message(answer, 404 if param == "model" else 400, param=param)


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({}, "messages", "Field required"),
        ({"messages": []}, "messages", "at least 1"),
        ({"messages": "hi"}, "messages", "list"),
        ({"messages": [{"content": "hi"}]}, "messages", "role"),
        ({"messages": [{"role": "robot", "content": "hi"}]}, "messages", "'messages.0.role': Input should be 'system'"),
        ({"messages": [{"role": "assistant", "function_call": {"name": "f"}}]}, "messages", "no tools"),
        ({"messages": HELLO, "temperature": 1e-9}, "temperature", "1e-09 is neither 0"),
        ({"messages": [{"role": "tool", "content": "7"}]}, "messages", "no tools"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"id": "1"}]}]}, "messages", "no tools"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages", "image_url"),
        *(
            ({"messages": [*HELLO, {"role": role, **given}]}, "messages", words)
            for role in ("user", "system", "developer", "assistant")
            for given, words in (
                ({}, "'messages.1.content' is missing; it must be a text"),
                ({"content": None}, "'messages.1.content' is missing"),
                ({"content": []}, "'messages.1.content' is an empty list"),
                ({"content": [{"type": "text"}]}, "'messages.1.content.0.text' is missing"),
                (
                    {"content": [{"type": "text", "text": "x"}, {"type": "text", "text": 7}]},
                    "'messages.1.content.1.text'",
                ),
                ({"content": 7}, "'messages.1.content': Input should be a valid string"),
                ({"content": {"type": "text", "text": "x"}}, "'messages.1.content': "),
            )
        ),
        ({"messages": [{"role": "assistant", "content": None, "refusal": "no"}]}, "messages", "messages.0.content"),
        ({"messages": [{"role": "assistant", "content": None, "tool_calls": [{}]}]}, "messages", "no tools"),
        ({"messages": [{"role": "tool", "tool_call_id": "1"}]}, "messages", "no tools"),
        ({"messages": HELLO, "tools": [{"type": "function"}]}, "tools", "not supported"),
        ({"messages": HELLO, "tool_choice": "required"}, "tool_choice", "not supported"),
        ({"messages": HELLO, "response_format": {"type": "json_object"}}, "response_format", '{"type": "text"}'),
        ({"messages": HELLO, "top_logprobs": 2}, "top_logprobs", "'logprobs': true"),
        ({"messages": HELLO, "logprobs": True, "top_logprobs": 21}, "top_logprobs", "20"),
        ({"messages": HELLO, "logprobs": 2}, "logprobs", "boolean"),
        ({"messages": HELLO, "max_tokens": 0}, "max_tokens", "1 or more"),
        ({"messages": HELLO, "max_tokens": 5, "max_completion_tokens": 6}, "max_tokens", "differ"),
        ({"messages": HELLO, "prompt": "x"}, "prompt", "/v1/completions"),
        ({"messages": HELLO, "echo": True}, "echo", "/v1/completions"),
        ({"messages": [{"role": "user", "content": "x" * 400}]}, "messages", "maximum context length is 64"),
    ],
)
def test_chats_refuse(app: Guard, body: dict[str, Any], param: str, words: str) -> None:
    assert words in error_message(send(app, "POST", CHAT, json=body), 400, param=param)


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (b"", "JSON"),
        (b"{", "JSON"),
        (b"[]", "not an object"),
        (b"\xff\xfe{", "utf-8"),
        (b'{"prompt": "\xe4"}', "utf-8"),
        (b'{"temperature": NaN}', "NaN is not JSON"),
        (b'{"temperature": -Infinity}', "Infinity is not JSON"),
        (b'{"temperature": 1e999}', "temperature"),
        (b'{"prompt": "\\ud800"}', "surrogate"),
        (b'{"model": "\\udfff"}', "surrogate"),
        (b'{"n": ' + b"9" * 6000 + b"}", "JSON"),
        (b'{"prompt": ' + b"[" * 9000 + b"]" * 9000 + b"}", ""),
        (b'{"metadata": ' + b'{"a":' * 3000 + b"1" + b"}" * 3000 + b"}", ""),
    ],
)
def test_what_is_no_json(app: Guard, raw: bytes, words: str) -> None:
    for path in (TEXT, CHAT):
        answer = send(app, "POST", path, content=raw, headers={"Content-Type": "application/json"})
        assert words in error_message(answer, 400)


@pytest.mark.parametrize("field", ["prompt", "messages", "metadata", "stop", "logit_bias", "tools", "model"])
def test_no_depth_is_a_fault_of_the_server(app: Guard, field: str) -> None:
    rest = '"messages": [{"role": "user", "content": "x"}], ' if field != "messages" else ""
    for head, tail in (("[", "]"), ('{"a":', "}")):
        for depth in (50, 200, 240, 300, 900, 990, 3000):
            raw = f'{{{rest}"max_tokens": 1, "{field}": {head * depth}1{tail * depth}}}'
            answer = send(app, "POST", CHAT, content=raw.encode(), headers={"Content-Type": "application/json"})
            assert answer.status_code in ((200, 400) if field == "metadata" else (400, 404))


def test_routes_methods_types_and_sizes(app: Guard) -> None:
    assert "/v1/nothing" in error_message(send(app, "GET", "/v1/nothing"), 404, code="not_found")
    error_message(send(app, "GET", "/docs"), 404)
    error_message(send(app, "GET", "/openapi.json"), 404)
    error_message(send(app, "GET", TEXT), 405, code="method_not_allowed")
    error_message(send(app, "OPTIONS", TEXT), 405)
    assert "Content-Type: application/json" in error_message(send(app, "POST", TEXT, data={"prompt": "x"}), 415)
    assert "19.5 KiB" in error_message(
        send(app, "POST", TEXT, json={"prompt": "x" * 30_000}), 413, code="request_too_large"
    )

    async def endless() -> AsyncIterator[bytes]:
        while True:
            yield b" " * 1000

    headers = {"Content-Type": "application/json"}
    error_message(send(app, "POST", TEXT, content=endless(), headers=headers), 413)
    error_message(send(app, "POST", TEXT, content=b"{}", headers={**headers, "Content-Length": "-1"}), 413)


def test_too_many_at_once_are_sent_away(app: Guard, serving: Serving) -> None:
    async def all_at_once() -> list[httpx.Response]:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://localhost") as client:
            body = {"prompt": "x", "n": 8, "max_tokens": 40, "ignore_eos": True}
            return await asyncio.gather(*(client.post(TEXT, json=body) for _ in range(4)))

    answers = asyncio.run(all_at_once())
    sent_away = [answer for answer in answers if answer.status_code != 200]
    assert 1 <= len(sent_away) < 4
    for answer in sent_away:
        error_message(answer, 429, code="too_many_requests", type="rate_limit_error")
        assert answer.headers["retry-after"] == "1"
    end_s = time.monotonic() + 20
    while not serving.loop.engine.idle:  # those of a request that was sent away are aborted, the others are done
        assert time.monotonic() < end_s
        time.sleep(0.01)
    assert send(app, "POST", TEXT, json={"prompt": "x", "max_tokens": 1}).status_code == 200


def test_a_server_that_is_closing_refuses(app: Guard) -> None:
    app.closing = True
    answer = send(app, "POST", TEXT, json={"prompt": "x"})
    error_message(answer, 503, code="shutting_down")
    assert "retry-after" in answer.headers


ROUTES = ["/v1/models", "/v1/models/tiny", "/health", "/metrics", "/version", "/nothing", TEXT, CHAT]


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize(
    "given", [None, "", "Bearer", "Bearer x", f"Bearer {KEY}x", f"Basic {KEY}", f"bearer {KEY[1:]}"]
)
def test_every_route_asks_for_the_key(serving: Serving, path: str, given: str | None) -> None:
    app = build(serving, key=KEY)
    headers = {} if given is None else {"Authorization": given}
    for method in ("GET", "POST", "OPTIONS", "DELETE"):
        answer = send(app, method, path, headers=headers, host="example.org")
        error_message(answer, 401, code="invalid_api_key")
        assert answer.headers["www-authenticate"] == "Bearer"


def test_the_key_opens(serving: Serving) -> None:
    app = build(serving, key=KEY)
    headers = {"Authorization": f"Bearer {KEY}"}
    for path in ROUTES[:5]:
        assert send(app, "GET", path, headers=headers, host="example.org").status_code == 200
    assert send(app, "GET", "/", headers=headers).status_code == 200
    asking = send(app, "GET", "/")  # the page that asks for the key
    assert asking.status_code == 401
    assert "This server requires a key" in asking.text
    assert "tiny" not in asking.text


@pytest.mark.parametrize(
    ("host", "fine"),
    [
        ("localhost", True), ("127.0.0.1:8000", True), ("[::1]:9", True), ("a.localhost:1", True), ("127.0.0.2", True),
        ("evil.example", False), ("127.0.0.1.evil.example", False), ("localhost.evil.example", False),
        ("10.0.0.1", False), ("", False), ("[", False),
    ],
)  # fmt: skip
def test_without_a_key_only_this_machine_is_named(app: Guard, host: str, fine: bool) -> None:
    answer = send(app, "GET", "/v1/models", headers={"Host": host})
    if fine:
        assert answer.status_code == 200
    else:
        error_message(answer, 403, code="host_not_allowed")


@pytest.mark.parametrize("origin", ["http://evil.example", "null", "http://localhost:3000", "file://", "[", "http://["])
def test_without_a_key_no_other_page_is_answered(app: Guard, origin: str) -> None:
    for method, path in (("GET", "/v1/models"), ("POST", TEXT), ("OPTIONS", TEXT)):
        answer = send(app, method, path, headers={"Origin": origin})
        error_message(answer, 403, code="origin_not_allowed")
        assert "access-control-allow-origin" not in answer.headers
    own = send(app, "GET", "/v1/models", headers={"Origin": "http://127.0.0.1:8000"})
    assert own.status_code == 200
    assert own.headers["x-content-type-options"] == "nosniff"


ANY = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
SMALL = st.integers(-2, 6)
TEXTS = st.lists(st.text(max_size=4), max_size=3)
ROLES = st.sampled_from(["user", "system", "assistant"])
MESSAGE = st.fixed_dictionaries({}, optional={"role": ROLES | ANY, "content": st.text(max_size=6) | ANY})
FIELDS = {
    "prompt": st.text(max_size=8) | TEXTS | st.lists(st.integers(-1, 330), max_size=4),
    "messages": st.lists(MESSAGE, max_size=3),
    "model": st.sampled_from(["tiny", "other", None]),
    "max_tokens": SMALL,
    "temperature": st.floats(-1, 3) | SMALL,
    "top_p": st.floats(-0.5, 1.5),
    "top_k": SMALL,
    "n": SMALL,
    "seed": st.integers(-(2**70), 2**70),
    "stop": st.text(max_size=3) | st.lists(st.text(max_size=3), max_size=3),
    "stream": st.booleans(),
    "stream_options": st.just({"include_usage": True}),
    "logprobs": SMALL | st.booleans(),
    "top_logprobs": SMALL,
    "echo": st.booleans(),
    "ignore_eos": st.booleans(),
    "tools": ANY,
    "logit_bias": ANY,
    "best_of": SMALL,
}
BODIES = st.fixed_dictionaries({}, optional={name: values | ANY for name, values in FIELDS.items()})
FAIR = st.fixed_dictionaries(
    {"prompt": st.text(max_size=8), "messages": st.just(HELLO)},
    optional={name: FIELDS[name] for name in ("max_tokens", "n", "seed", "stop", "stream", "logprobs", "echo")},
)


@pytest.mark.slow
@pytest.mark.proof
@settings(max_examples=60)
@given(BODIES | FAIR | ANY, st.sampled_from([TEXT, CHAT]))
@example({"prompt": "x", "stop": ["\x00"], "logprobs": 3, "echo": True, "n": 2, "max_tokens": 0}, TEXT)
@example({"prompt": "x", "max_tokens": 10**40, "top_k": 2**31 - 1, "seed": -(2**63), "temperature": 2}, TEXT)
@example({"messages": HELLO, "logprobs": True, "top_logprobs": 20, "stop": "e", "max_tokens": 50}, CHAT)
@example({"prompt": "x", "stream": True, "stream_options": {}, "logprobs": 0, "max_tokens": 5}, TEXT)
def test_no_body_makes_it_fail(loop: EngineLoop, body: Any, path: str) -> None:
    serving = Serving(loop.engine, loop, PlainChat(), Metrics(loop.counts), "tiny", max_choices=8)
    raw = json.dumps(body).encode()
    answer = send(build(serving), "POST", path, content=raw, headers={"Content-Type": "application/json"})
    assert answer.status_code in (200, 400, 404), (answer.text, raw)
    if answer.status_code == 200:
        text = answer.text
        if answer.headers["content-type"].startswith("text/event-stream"):
            assert text.endswith("data: [DONE]\n\n")
            assert '"error"' not in text.split("\n\n")[0]
        else:
            assert all(choice["finish_reason"] for choice in answer.json()["choices"])
