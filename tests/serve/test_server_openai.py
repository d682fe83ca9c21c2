"""The real ``openai`` client against a real ``smalti serve`` process."""

import asyncio
import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from server_process import ServerProcess, start_server
from tiny_runs import tiny_run

from smalti.distributed.checkpoint.export import export
from smalti.serve.engine.engine import Engine
from smalti.serve.engine.offline import generate
from smalti.serve.engine.sampling import SamplingParams

openai = pytest.importorskip("openai")

pytestmark = pytest.mark.slow  # it starts a process that loads a model
PROMPTS = ["def add(", "3+4=", "", "class Point:\n", "plain words, ", "Grüße ", "x", "([{"] * 2
MODEL = "tiny"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tiny_run(tmp_path_factory.mktemp("server"))
    export(run)
    return run


@pytest.fixture(scope="module")
def engine(run: Path) -> Engine:
    return Engine.from_folder(run / "export")


@pytest.fixture(scope="module")
def server(run: Path) -> Iterator[ServerProcess]:
    with start_server(run, "--max-rows", "8") as started:
        yield started


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> Iterator["openai.OpenAI"]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


def test_models(client: "openai.OpenAI") -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).owned_by == "smalti"
    with pytest.raises(openai.NotFoundError, match="other/model") as caught:
        client.models.retrieve("other/model")
    assert caught.value.code == "model_not_found"


def test_a_completion_is_the_engines_answer(client: "openai.OpenAI", engine: Engine) -> None:
    expected = generate(engine, ["def add("], SamplingParams(max_tokens=20))[0]
    answer = client.completions.create(model=MODEL, prompt="def add(", max_tokens=20, temperature=0)
    assert answer.choices[0].text == expected.text
    assert answer.choices[0].finish_reason == expected.finish_reason
    assert answer.usage.completion_tokens == len(expected.token_ids)
    assert answer.usage.prompt_tokens == expected.prompt_tokens
    assert answer.usage.total_tokens == expected.prompt_tokens + len(expected.token_ids)
    assert answer.object == "text_completion"


def test_defaults_are_openais(client: "openai.OpenAI") -> None:
    answers = [client.completions.create(model=MODEL, prompt="def ") for _ in range(3)]
    assert len({answer.choices[0].text for answer in answers}) > 1  # temperature 1, no seed
    assert all(answer.usage.completion_tokens <= 16 for answer in answers)


def test_prompts_of_all_kinds(client: "openai.OpenAI", engine: Engine) -> None:
    ids = [engine.begin_id, *engine.tokenizer.encode("def add(")]
    kinds = ["def add(", ["def add(", "3+4="], ids, [ids, [engine.begin_id, *engine.tokenizer.encode("3+4=")]]]
    texts = []
    for prompt in kinds:
        answer = client.completions.create(model=MODEL, prompt=prompt, temperature=0, max_tokens=6)
        assert [choice.index for choice in answer.choices] == list(range(len(answer.choices)))
        texts.append([choice.text for choice in answer.choices])
    assert texts[0] == texts[2] == texts[1][:1]
    assert texts[1] == texts[3]


def test_seed_is_reproducible_and_n_differ(client: "openai.OpenAI") -> None:
    def ask(**more):
        answer = client.completions.create(model=MODEL, prompt="def ", max_tokens=12, **more)
        return [choice.text for choice in answer.choices]

    three = ask(n=3, seed=5)
    assert ask(n=3, seed=5) == three
    assert len(set(three)) == 3
    assert ask(seed=5) == three[:1]
    assert ask(seed=6) != three[:1]
    two_prompts = client.completions.create(model=MODEL, prompt=["def ", "def "], n=3, seed=5, max_tokens=12)
    assert [choice.text for choice in two_prompts.choices] == three * 2
    unseeded = ask(n=4)
    assert len(set(unseeded)) > 1


def test_stop_ends_before_the_text(client: "openai.OpenAI") -> None:
    free = client.completions.create(model=MODEL, prompt="def ", temperature=0, max_tokens=30).choices[0].text
    stop = free[3:5]
    for given in (stop, ["never", stop]):
        cut = client.completions.create(model=MODEL, prompt="def ", temperature=0, max_tokens=30, stop=given)
        assert cut.choices[0].text == free[: free.index(stop)]
        assert cut.choices[0].finish_reason == "stop"


@pytest.mark.parametrize("stream_usage", [False, True])
def test_a_stream_joins_to_the_whole(client: "openai.OpenAI", stream_usage: bool) -> None:
    asked = {"model": MODEL, "prompt": ["def ", "Grüße "], "n": 2, "seed": 3, "max_tokens": 25}
    whole = client.completions.create(**asked)
    options = {"stream_options": {"include_usage": True}} if stream_usage else {}
    texts, reasons, usage = {}, {}, None
    for chunk in client.completions.create(**asked, stream=True, **options):
        assert usage is None, "the usage comes last"
        usage = chunk.usage
        assert bool(chunk.choices) != bool(usage)
        for choice in chunk.choices:
            assert choice.index not in reasons, "nothing comes after the end"
            texts[choice.index] = texts.get(choice.index, "") + choice.text
            if choice.finish_reason:
                reasons[choice.index] = choice.finish_reason
    assert texts == {choice.index: choice.text for choice in whole.choices}
    assert reasons == {choice.index: choice.finish_reason for choice in whole.choices}
    assert usage == (whole.usage if stream_usage else None)


def test_stream_on_the_wire(server: ServerProcess) -> None:
    body = {"model": MODEL, "prompt": "def ", "max_tokens": 3, "stream": True}
    answer = httpx.post(f"{server.url}/v1/completions", json=body)
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = answer.text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    for text in events[:-2]:
        assert json.loads(text.removeprefix("data: "))["object"] == "text_completion"


def test_chat(client: "openai.OpenAI", engine: Engine) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "3+4="}]
    answer = client.chat.completions.create(model=MODEL, messages=messages, temperature=0, max_tokens=20)
    params = SamplingParams(max_tokens=20, stop=("\nUser:", "\nAssistant:"))
    expected = generate(engine, ["Be brief.\n\nUser: 3+4=\n\nAssistant:"], params)[0]
    assert answer.object == "chat.completion"
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].message.content == expected.text.lstrip()
    parts = [messages[0], {"role": "user", "content": [{"type": "text", "text": "3+4="}]}]
    again = client.chat.completions.create(model=MODEL, messages=parts, temperature=0, max_completion_tokens=20)
    assert again.choices == answer.choices
    chunks = list(
        client.chat.completions.create(
            model=MODEL, messages=messages, temperature=0, max_tokens=20, stream=True,
            stream_options={"include_usage": True},
        )
    )  # fmt: skip
    assert chunks[0].choices[0].delta.role == "assistant"
    deltas = [chunk.choices[0].delta.content or "" for chunk in chunks[:-1]]
    assert "".join(deltas) == answer.choices[0].message.content
    assert chunks[-2].choices[0].finish_reason == answer.choices[0].finish_reason
    assert chunks[-1].usage == answer.usage


def test_chat_without_a_bound_fills_the_context(client: "openai.OpenAI", engine: Engine) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "x"}], seed=1)
    assert answer.usage.total_tokens <= engine.limit_tokens
    assert answer.choices[0].finish_reason in ("stop", "length")


def test_logprobs_of_completions(client: "openai.OpenAI") -> None:
    asked = {"model": MODEL, "prompt": "Grüße", "temperature": 0, "max_tokens": 12, "logprobs": 3}
    choice = client.completions.create(**asked).choices[0]
    found = choice.logprobs
    assert len(found.tokens) == len(found.token_logprobs) == len(found.top_logprobs) == len(found.text_offset)
    for token, logprob, tops, offset in zip(
        found.tokens, found.token_logprobs, found.top_logprobs, found.text_offset, strict=True
    ):
        assert logprob == max(tops.values()) == tops[token]  # greedy
        assert 1 <= len(tops) <= 3
        if not token.startswith("bytes:") and token != "<|endoftext|>":
            # A broken character before it comes out with it, as U+FFFD.
            assert choice.text[offset:].lstrip("\ufffd").startswith(token)
    echoed = client.completions.create(**asked, echo=True).choices[0]
    assert echoed.text == "Grüße" + choice.text
    n_prompt = len(echoed.logprobs.tokens) - len(found.tokens)
    assert n_prompt > 0
    assert echoed.logprobs.tokens[n_prompt:] == found.tokens
    assert echoed.logprobs.text_offset[n_prompt:] == [offset + 5 for offset in found.text_offset]
    assert echoed.logprobs.text_offset[0] == 0
    assert all(value < 0 for value in echoed.logprobs.token_logprobs)  # the begin token stands before the text


def test_echo_of_ids_scores_them(client: "openai.OpenAI", engine: Engine) -> None:
    import torch

    ids = [engine.begin_id, *engine.tokenizer.encode("def add(a, b)")]
    choice = client.completions.create(model=MODEL, prompt=ids, echo=True, logprobs=1, max_tokens=0).choices[0]
    with torch.no_grad():
        logits = engine.model(torch.tensor([ids])).value[0].float().log_softmax(-1)
    expected = [float(logits[at, token]) for at, token in enumerate(ids[1:])]
    assert choice.logprobs.token_logprobs[0] is None
    assert choice.logprobs.top_logprobs[0] is None
    assert choice.logprobs.token_logprobs[1:] == pytest.approx(expected, abs=1e-4)
    assert choice.text == "<|endoftext|>def add(a, b)"
    assert choice.finish_reason == "length"


def test_logprobs_of_a_chat(client: "openai.OpenAI") -> None:
    asked = {"model": MODEL, "messages": [{"role": "user", "content": "x"}], "max_tokens": 10, "seed": 2}
    choice = client.chat.completions.create(**asked, logprobs=True, top_logprobs=2).choices[0]
    assert len(choice.logprobs.content) == 10 or choice.finish_reason == "stop"
    for token in choice.logprobs.content:
        assert len(token.top_logprobs) == 2
        assert token.top_logprobs[0].logprob >= token.top_logprobs[1].logprob
        assert bytes(token.bytes).decode("utf-8", "replace")
    parts = []
    for chunk in client.chat.completions.create(**asked, logprobs=True, top_logprobs=2, stream=True):
        parts += chunk.choices[0].logprobs.content if chunk.choices[0].logprobs else []
    assert parts == choice.logprobs.content
    assert client.chat.completions.create(**asked, logprobs=True).choices[0].logprobs.content[0].top_logprobs == []
    assert client.chat.completions.create(**asked).choices[0].logprobs is None


def test_errors_are_the_clients_own(client: "openai.OpenAI") -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        client.completions.create(model="gpt-4", prompt="x")
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as long:
        client.completions.create(model=MODEL, prompt="word " * 500)
    assert long.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError) as tools:
        client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "x"}],
            tools=[{"type": "function", "function": {"name": "f"}}],
        )  # fmt: skip
    assert tools.value.param == "tools"
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.completions.create(model=MODEL, prompt="x", temperature=3)


def test_sixteen_at_once_equal_one_by_one(client: "openai.OpenAI", server: ServerProcess) -> None:
    def ask(index: int):
        sampled = {"temperature": 0} if index % 2 else {"temperature": 1.0, "seed": index}
        answer = client.completions.create(
            model=MODEL, prompt=PROMPTS[index], max_tokens=10 + index, logprobs=0, **sampled
        )
        return answer.choices[0].text, answer.choices[0].finish_reason, answer.choices[0].logprobs.tokens

    alone = [ask(index) for index in range(16)]
    with ThreadPoolExecutor(16) as pool:
        together = list(pool.map(ask, range(16)))
    assert together == alone
    assert server.metric("smalti_num_requests_running") == 0


def _idle(server: ServerProcess, limit_s: float = 20) -> None:
    end_s = time.monotonic() + limit_s
    while server.metric("smalti_num_requests_running") or server.metric("smalti_num_requests_waiting"):
        assert time.monotonic() < end_s, "the slot of a client that went away is not free"
        time.sleep(0.02)


def test_a_client_that_goes_away_frees_its_place(client: "openai.OpenAI", server: ServerProcess) -> None:
    before = server.metric("smalti_generation_tokens_total")
    asked = {
        "model": MODEL,
        "prompt": ["def "] * 64,
        "max_tokens": 90,
        "temperature": 1.0,
        "extra_body": {"ignore_eos": True},
    }
    stream = client.completions.create(**asked, stream=True)
    next(iter(stream))
    stream.close()
    _idle(server)
    assert server.metric("smalti_generation_tokens_total") - before < 64 * 90

    # Without a stream: the client gives up while it waits.
    async def give_up() -> None:
        async with httpx.AsyncClient(timeout=60) as impatient:
            body = {**asked, "ignore_eos": True}
            task = asyncio.create_task(impatient.post(f"{server.url}/v1/completions", json=body))
            await asyncio.sleep(0.15)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    middle = server.metric("smalti_generation_tokens_total")
    asyncio.run(give_up())
    _idle(server)
    assert server.metric("smalti_generation_tokens_total") - middle < 64 * 90
    assert client.completions.create(model=MODEL, prompt="x", max_tokens=1).choices


def test_metrics_count(client: "openai.OpenAI", server: ServerProcess) -> None:
    names = ("smalti_prompt_tokens_total", "smalti_generation_tokens_total",
             "smalti_time_to_first_token_seconds_count", "smalti_e2e_request_latency_seconds_count")  # fmt: skip
    before = [server.metric(name) for name in names]
    client.completions.create(model=MODEL, prompt=["ab", "cd"], max_tokens=4, extra_body={"ignore_eos": True})
    after = [server.metric(name) for name in names]
    assert [b - a for a, b in zip(before, after, strict=True)] == [after[0] - before[0], 8, 2, 2]
    assert after[0] - before[0] >= 4
    assert 0 <= server.metric("smalti_kv_cache_usage_perc") <= 1


def test_unknown_fields_are_named_in_a_header(server: ServerProcess) -> None:
    body = {"prompt": "x", "max_tokens": 1, "user": "me", "some\r\nthing": 1, "logit_bias": None, "tools": []}
    answer = httpx.post(f"{server.url}/v1/completions", json=body)
    assert answer.status_code == 200
    assert answer.headers["x-smalti-ignored-fields"] == "user, some\\r\\nthing"
    assert answer.headers["x-request-id"].startswith("req-")


def test_health_and_version(server: ServerProcess) -> None:
    assert httpx.get(f"{server.url}/health").json() == {"status": "ok"}
    assert set(httpx.get(f"{server.url}/version").json()) == {"version"}
