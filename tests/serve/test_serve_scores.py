"""Log-probabilities: of the prompt, of the answer, equal to the scoring pass of the evals."""

import numpy as np
import pytest
import torch
from tiny_models import ByteTokenizer, dbrx_config, llama_config, tiny_model

from smalti.base.errors import UserError
from smalti.evals.likelihood import Window, score
from smalti.serve.engine.engine import Engine
from smalti.serve.engine.offline import generate
from smalti.serve.engine.request import RequestOutput
from smalti.serve.engine.sampling import NotFinite, SamplingParams
from smalti.serve.engine.scheduler import Limits
from smalti.serve.engine.scores import SampledIds, score_hidden

TEXTS = ["x", "hello world", "a" * 40, "def add(a, b):\n    return a + b\n"]


@pytest.fixture(params=[llama_config, dbrx_config], ids=["llama", "dbrx"])
def engine(request) -> Engine:
    return Engine(tiny_model(request.param(vocab_size=272)), ByteTokenizer(), limits=Limits(prefill_tokens=16))


def test_prompt_scores_equal_those_of_the_evals(engine: Engine) -> None:
    params = SamplingParams(max_tokens=0, prompt_logprobs=3)
    answers = generate(engine, TEXTS, params)
    windows = [Window(np.array([256, *text.encode()]), 1) for text in TEXTS]
    nats = score(engine.model, windows)
    for text, answer, expected in zip(TEXTS, answers, nats, strict=True):
        assert (answer.text, answer.token_ids, answer.finish_reason) == ("", (), "length")
        assert [token.id for token in answer.prompt_scores] == [256, *text.encode()]
        assert answer.prompt_scores[0].logprob is None
        assert -sum(token.logprob for token in answer.prompt_scores[1:]) == pytest.approx(expected, rel=1e-5)


def test_scores_equal_a_log_softmax_over_the_whole_vocabulary(engine: Engine) -> None:
    params = SamplingParams(max_tokens=12, logprobs=4, prompt_logprobs=2, temperature=1.0, top_k=3, ignore_eos=True)
    answer = generate(engine, ["hello, world, hello, world"], params)[0]
    ids = [token.id for token in answer.prompt_scores] + list(answer.token_ids)
    with torch.no_grad():
        logprobs = engine.model(torch.tensor([ids])).value[0].float().log_softmax(-1)
    for place, token in enumerate((*answer.prompt_scores, *answer.tokens)):
        if place == 0:
            assert token.top == ()
            continue
        row = logprobs[place - 1]
        assert token.logprob == pytest.approx(float(row[token.id]), abs=1e-4)
        n_top = 2 if place < len(answer.prompt_scores) else 4
        best = row[:257].topk(n_top)
        assert [id for id, _ in token.top] == best.indices.tolist()
        assert [logprob for _, logprob in token.top] == pytest.approx(best.values.tolist(), abs=1e-4)
    assert all(token.id in dict(token.top) for token in answer.tokens)


def test_scores_are_given_only_where_asked(engine: Engine) -> None:
    plain = generate(engine, ["abc"], SamplingParams(max_tokens=3, ignore_eos=True))[0]
    assert plain.tokens == plain.prompt_scores == ()
    chosen = generate(engine, ["abc"], SamplingParams(max_tokens=3, logprobs=0, ignore_eos=True))[0]
    assert chosen.token_ids == plain.token_ids
    assert all(token.logprob is not None and token.top == () for token in chosen.tokens)
    assert chosen.prompt_scores == ()


def test_a_prompt_of_the_full_context_can_be_scored_but_not_continued(engine: Engine) -> None:
    ids = list(range(64))
    scored = generate(engine, [ids], SamplingParams(max_tokens=0, prompt_logprobs=0))[0]
    assert [token.id for token in scored.prompt_scores] == ids
    with pytest.raises(UserError, match="64 tokens"):
        generate(engine, [ids], SamplingParams(max_tokens=1, prompt_logprobs=0))
    with pytest.raises(UserError, match="max_tokens=0"):
        SamplingParams(max_tokens=0)
    with pytest.raises(UserError, match="logprobs=-1"):
        SamplingParams(logprobs=-1)
    with pytest.raises(UserError, match="prompt_logprobs=101"):
        SamplingParams(prompt_logprobs=101)


def test_scores_that_are_not_finite_end_their_request_alone(engine: Engine) -> None:
    params = SamplingParams(max_tokens=0, prompt_logprobs=0)
    expected = generate(engine, ["hello"], params)[0]
    with torch.no_grad():
        engine.model.embed.weight[7] = torch.nan
    bad, good = list[RequestOutput](), list[RequestOutput]()
    engine.submit([1, 7, *[2] * 30], params, bad.append)
    engine.submit("hello", params, good.append)
    while engine.step():
        pass
    assert bad[-1].finish_reason == "error"
    assert isinstance(bad[-1].error, NotFinite)
    assert good[-1].prompt_scores == expected.prompt_scores
    with pytest.raises(NotFinite):
        generate(engine, [[1, 7, 2]], params)


def test_ids_without_a_token_are_not_listed() -> None:
    hidden, weight = torch.ones(3, 4), torch.arange(10.0)[:, None].expand(10, 4)
    for scored in score_hidden(hidden, weight, [0, 9, 7], 8, SampledIds(9, frozenset({7, 2}))):
        assert [token for token, _ in scored.top] == [8, 6, 5, 4, 3, 1, 0]
