"""Offline generation: answers to a list of prompts, or to one as a stream, without a server or a thread.

Both functions step the engine themselves, so they must not be called while an ``EngineLoop`` runs it.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from smalti.base.errors import UserError
from smalti.serve.engine.engine import Engine
from smalti.serve.engine.request import FinishReason, Request, RequestOutput, TokenScore
from smalti.serve.engine.sampling import SamplingParams


@dataclass(frozen=True)
class Completion:
    """The whole answer to one prompt."""

    prompt: str
    text: str
    token_ids: tuple[int, ...]
    """Every generated token, an end token included."""
    finish_reason: FinishReason
    prompt_tokens: int
    """Tokens of the prompt, the begin token included."""
    tokens: tuple[TokenScore, ...] = ()
    """``token_ids`` with their scores; empty unless ``logprobs`` was requested."""
    prompt_scores: tuple[TokenScore, ...] = ()
    """Every token of the prompt with its score; empty unless ``prompt_logprobs`` was requested."""


def generate(
    engine: Engine,
    prompts: Sequence[str | Sequence[int]],
    params: SamplingParams | Sequence[SamplingParams] | None = None,
    adapters: Sequence[str | None] | None = None,
) -> list[Completion]:
    """Answer each prompt; ``params`` for all, or one for each (default: greedy, up to 128 tokens).

    adapters: the name of the adapter for each prompt, None for the base; default: the base for all.

    All prompts are queued at once, so on an engine that also serves others ``submit`` may raise QueueFull meanwhile.
    Raises UserError for a prompt that leaves no room for an answer, before any is answered.
    """
    params = SamplingParams() if params is None else params
    params_of = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
    if len(params_of) != len(prompts):
        raise UserError(f"{len(params_of)} sampling params for {len(prompts)} prompts", allowed="one, or one for each")
    outputs: list[list[RequestOutput]] = [[] for _ in prompts]
    requests = [
        engine.prepare(prompt, params, output.append, adapter)
        for prompt, params, output, adapter in zip(
            prompts, params_of, outputs, adapters or [None] * len(prompts), strict=True
        )
    ]
    engine.enqueue(requests)
    try:
        while not all(_has_ended(output) for output in outputs):
            engine.step()
    finally:
        for request in requests:
            engine.end(request, "abort")
    texts = [
        prompt if isinstance(prompt, str) else engine.tokenizer.decode(request.prompt_ids)
        for prompt, request in zip(prompts, requests, strict=True)
    ]
    return [_completion(*answer) for answer in zip(texts, requests, outputs, strict=True)]


def stream(
    engine: Engine, prompt: str | Sequence[int], params: SamplingParams | None = None, adapter: str | None = None
) -> Iterator[str]:
    """Yield the answer to one prompt in whole characters; joined they are the text that ``generate`` returns."""
    outputs: deque[RequestOutput] = deque()
    request = engine.prepare(prompt, params or SamplingParams(), outputs.append, adapter)
    engine.enqueue([request])
    try:
        while True:
            while not outputs:
                engine.step()
            output = outputs.popleft()
            if output.error is not None:
                raise output.error
            if output.text:
                yield output.text
            if output.finish_reason is not None:
                return
    finally:
        engine.end(request, "abort")


def _has_ended(outputs: list[RequestOutput]) -> bool:
    """Return whether the last output is there; raises the error that ended the request."""
    if not outputs or outputs[-1].finish_reason is None:
        return False
    if outputs[-1].error is not None:
        raise outputs[-1].error
    return True


def _completion(prompt: str, request: Request, outputs: list[RequestOutput]) -> Completion:
    """Join the outputs of one request."""
    assert request.finish_reason is not None
    tokens = tuple(token for output in outputs for token in output.tokens)
    return Completion(
        prompt,
        "".join(output.text for output in outputs),
        tuple(token.id for token in tokens),
        request.finish_reason,
        len(request.prompt_ids),
        tokens if request.params.logprobs is not None else (),
        tuple(score for output in outputs for score in output.prompt_scores),
    )
