"""The engine: batched = alone, cached = recomputed, limits, ends, streaming."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tiny_models import ByteTokenizer, dbrx_config, llama_config, tiny_model
from tiny_runs import tokenizer_with_unused_ids

from smalti.base.errors import UserError
from smalti.model.huggingface import save_folder
from smalti.serve.engine.engine import Engine
from smalti.serve.engine.offline import generate, stream
from smalti.serve.engine.request import RequestOutput
from smalti.serve.engine.runner import Runner
from smalti.serve.engine.sampling import SamplingParams
from smalti.serve.engine.scheduler import Limits
from smalti.serve.engine.scores import SampledIds

PROMPTS = ["abc", "hello", "xyz", "", "a longer prompt", "12345"]


@pytest.fixture(params=[llama_config, dbrx_config], ids=["llama", "dbrx"])
def engine(request) -> Engine:
    return Engine(tiny_model(request.param()), ByteTokenizer())


def _recomputed(engine: Engine, prompt: str, n: int) -> list[int]:
    """Greedy by a full forward for each token."""
    ids = [256, *prompt.encode()]
    for _ in range(n):
        with torch.no_grad():
            ids.append(int(engine.model(torch.tensor([ids])).value[0, -1].argmax()))
        if ids[-1] == 256:
            break
    return ids[len(prompt.encode()) + 1 :]


@pytest.mark.sample(1)
def test_batched_greedy_equals_alone_and_recomputed(engine: Engine) -> None:
    params = SamplingParams(max_tokens=20)
    together = generate(engine, PROMPTS, params)
    for prompt, answer in zip(PROMPTS, together, strict=True):
        assert answer.prompt == prompt
        assert answer == generate(engine, [prompt], params)[0]
        assert list(answer.token_ids) == _recomputed(engine, prompt, 20)


@pytest.mark.sample(1)
def test_sampled_answers_do_not_depend_on_the_batch(engine: Engine) -> None:
    params = [SamplingParams(max_tokens=8 + i, temperature=1.0, top_p=0.9, seed=i) for i in range(len(PROMPTS))]
    together = generate(engine, PROMPTS, params)
    assert together == [generate(engine, [p], [one])[0] for p, one in zip(PROMPTS, params, strict=True)]
    assert together[::-1] == generate(engine, PROMPTS[::-1], params[::-1])


@pytest.mark.parametrize("step_rows", [None, 4])
def test_a_decode_step_has_16_rows_and_with_experts_no_padding(engine: Engine, step_rows: int | None) -> None:
    engine = Engine(engine.model, engine.tokenizer, limits=Limits(step_rows=step_rows))
    rows: list[int] = []
    engine.model.embed.register_forward_hook(lambda _, ids, output: rows.append(len(output)))
    generate(engine, PROMPTS[:3], SamplingParams(max_tokens=2, ignore_eos=True))
    assert rows[-1] == (step_rows or (3 if engine.model.config.moe else 16))


def test_cached_logits_equal_full_recompute(engine: Engine) -> None:
    ids = torch.randint(0, 256, (3, 40), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        full = engine.model(ids).value
    runner = Runner(engine.model, SampledIds(257), step_rows=16)
    lengths = [1, 5, 30]
    for row, length in enumerate(lengths):
        for begin, end in ((0, length // 2), (length // 2, length)):
            if begin < end:
                logits, _ = runner.prefill(row, ids[row, begin:end].tolist(), length)
        assert torch.allclose(logits, full[row, length - 1], rtol=1e-4, atol=1e-5)
        runner.start(row)
    for step in range(10):
        if step == 5:
            runner.free(1)
        rows = [row for row in range(3) if step < 5 or row != 1]
        requests, logits = runner.decode({row: int(ids[row, lengths[row] + step]) for row in rows})
        assert sorted(requests) == rows
        for row, one in zip(requests, logits, strict=True):
            assert torch.allclose(one, full[row, lengths[row] + step], rtol=1e-4, atol=1e-5)


@pytest.mark.sample(1)
def test_stream_gives_the_same_text(engine: Engine) -> None:
    params = SamplingParams(max_tokens=30, temperature=1.0, seed=4)
    assert "".join(stream(engine, "abc", params)) == generate(engine, ["abc"], params)[0].text


def test_context_ends_the_answer_with_length(engine: Engine) -> None:
    answer = generate(engine, ["a" * 50], SamplingParams(max_tokens=1000))[0]
    assert answer.finish_reason in ("length", "stop")
    assert answer.prompt_tokens + len(answer.token_ids) <= 64
    if answer.finish_reason == "length":
        assert answer.prompt_tokens + len(answer.token_ids) == 64


def test_a_prompt_without_room_is_refused(engine: Engine) -> None:
    with pytest.raises(UserError, match="65 tokens"):
        generate(engine, ["a" * 64])
    with pytest.raises(UserError, match="64 tokens"):
        generate(engine, ["a" * 63])
    assert len(generate(engine, ["a" * 62])[0].token_ids) == 1


def test_an_end_token_stops_and_is_not_shown(engine: Engine) -> None:
    free = generate(engine, ["abc"], SamplingParams(max_tokens=10))[0]
    last = free.token_ids[3]
    ends = Engine(engine.model, ByteTokenizer(), end_ids=frozenset({last}))
    cut = generate(ends, ["abc"], SamplingParams(max_tokens=10))[0]
    first = free.token_ids.index(last)
    assert cut.finish_reason == "stop"
    assert cut.token_ids == free.token_ids[: first + 1]
    assert cut.text == ByteTokenizer().decode(list(free.token_ids[:first]))


def test_a_stop_text_stops(engine: Engine) -> None:
    free = generate(engine, ["abc"], SamplingParams(max_tokens=30))[0].text
    stop = free[4:6]
    cut = generate(engine, ["abc"], SamplingParams(max_tokens=30, stop=(stop,)))[0]
    assert cut.text == free[: free.index(stop)]
    assert cut.finish_reason == "stop"


def test_a_tokenizer_larger_than_the_model_is_refused() -> None:
    with pytest.raises(UserError, match="257"):
        Engine(tiny_model(llama_config(vocab_size=200)), ByteTokenizer())
    with pytest.raises(UserError, match="2 sampling params"):
        generate(Engine(tiny_model(llama_config()), ByteTokenizer()), ["a"], [SamplingParams()] * 2)


def test_ignore_eos_goes_on_after_an_end_token(engine: Engine) -> None:
    free = generate(engine, ["abc"], SamplingParams(max_tokens=10, ignore_eos=True))[0]
    ends = Engine(engine.model, ByteTokenizer(), end_ids=frozenset(free.token_ids))
    same = generate(ends, ["abc"], SamplingParams(max_tokens=10, ignore_eos=True))[0]
    assert (same.token_ids, same.finish_reason) == (free.token_ids, "length")
    assert len(generate(ends, ["abc"], SamplingParams(max_tokens=10))[0].token_ids) == 1


def test_ids_are_taken_as_they_are(engine: Engine) -> None:
    params = SamplingParams(max_tokens=6)
    text, ids = generate(engine, ["abc", [256, *b"abc"]], params)
    assert (text.text, text.token_ids, text.prompt_tokens) == (ids.text, ids.token_ids, ids.prompt_tokens)
    assert ids.prompt == "abc"


def test_a_stream_that_is_left_gives_its_row_back(engine: Engine) -> None:
    pieces = stream(engine, "abc", SamplingParams(max_tokens=40, ignore_eos=True))
    next(pieces)
    assert engine.counts().running == 1
    pieces.close()
    assert engine.idle
    assert engine.counts().running == engine.counts().kv_used_frac == 0


@pytest.mark.parametrize("steps", [0, 1, 2, 5])
def test_an_abort_ends_a_request_wherever_it_stands(engine: Engine, steps: int) -> None:
    engine = Engine(engine.model, ByteTokenizer(), limits=Limits(max_rows=2, prefill_tokens=20))
    outputs: list[list[RequestOutput]] = [[] for _ in range(5)]
    params = SamplingParams(max_tokens=10, ignore_eos=True)
    numbers = [engine.submit("a" * 40, params, one.append) for one in outputs]
    for _ in range(steps):
        engine.step()
    for number in numbers:
        engine.abort(number)
    assert not engine.step()
    assert [one[-1].finish_reason for one in outputs] == ["abort"] * 5
    assert engine.counts().kv_used_frac == 0
    assert engine._runner._cache.requests() == []
    assert not engine._runner._prompts


@pytest.mark.slow
def test_greedy_equals_transformers(engine: Engine, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = engine.model.config
    save_folder(tmp_path, config, engine.model.state_dict(), eod_id=256, dtype=torch.float32)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    theirs.generation_config.eos_token_id = None
    ids = [[256, *prompt.encode()] for prompt in [*PROMPTS, "x" * 30]]
    params = SamplingParams(max_tokens=16, ignore_eos=True)
    for one, answer in zip(ids, generate(engine, ids, params), strict=True):
        with torch.no_grad():
            out = theirs.generate(
                torch.tensor([one]),
                attention_mask=torch.ones(1, len(one), dtype=torch.long),
                max_new_tokens=16,
                do_sample=False,
                pad_token_id=0,
            )
        assert tuple(out[0, len(one) :].tolist()) == answer.token_ids


def test_an_id_without_a_token_is_never_chosen() -> None:
    tokenizer = tokenizer_with_unused_ids()
    model = tiny_model(llama_config(vocab_size=tokenizer.vocab_size + 8))
    (hole, *_) = tokenizer.unused_ids
    with torch.no_grad():  # the likeliest by far, were it allowed
        model.embed.weight[hole] = 10 * model.embed.weight[tokenizer.eod_id]
    engine = Engine(model, tokenizer)
    params = SamplingParams(max_tokens=40, temperature=2.0, logprobs=100, ignore_eos=True)
    answer = generate(engine, ["x"], params)[0]
    assert len(answer.token_ids) == 40
    assert not tokenizer.unused_ids & set(answer.token_ids)
    assert not tokenizer.unused_ids & {token for one in answer.tokens for token, _ in one.top}
    with pytest.raises(UserError, match=f"{hole} is not in the vocabulary"):
        generate(engine, [[1, hole]])


@pytest.mark.slow
def test_the_engine_starts_without_what_only_training_needs() -> None:
    """Two thirds of what was imported beside torch; only a new process shows what an import brings."""
    unwanted = {"torch._dynamo", "torch.distributed.checkpoint"}
    code = f"import sys, smalti.serve.engine.engine as _; print({unwanted} & {{*sys.modules}})"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "set()\n"
