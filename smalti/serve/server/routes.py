"""The routes of ``/v1``, which convert a request body to prompts and sampling parameters."""

import asyncio

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from smalti.serve.engine.sampling import SamplingParams
from smalti.serve.server.errors import ApiError
from smalti.serve.server.prompts import chat_to_tokens, n_prompts, read_prompt, to_tokens
from smalti.serve.server.schemas import ChatRequest, CompletionRequest, ignored, read
from smalti.serve.server.serving import PreparedRequest, Serving, answer
from smalti.serve.server.shapes import ChatShape, CompletionShape

_COMPLETION_TOKENS = 16
"""OpenAI's default for ``/v1/completions``; a chat may fill the context."""


def routes(serving: Serving) -> APIRouter:
    """Return the API of one model."""
    router = APIRouter(prefix="/v1")

    @router.post("/completions")
    async def completions(request: Request) -> Response:
        return await answer(serving, request, await _completion(serving, await read(request, CompletionRequest)))

    @router.post("/chat/completions")
    async def chat_completions(request: Request) -> Response:
        return await answer(serving, request, await _chat(serving, await read(request, ChatRequest)))

    @router.get("/models")
    async def models() -> Response:
        return JSONResponse({"object": "list", "data": [_model(serving, name) for name in serving.names]})

    @router.get("/models/{name:path}")
    async def model(name: str) -> Response:
        serving.adapter_of(name)
        return JSONResponse(_model(serving, name))

    return router


def _model(serving: Serving, name: str) -> dict[str, object]:
    return {
        "id": name,
        "parent": None if name == serving.name else serving.name,
        "object": "model",
        "created": serving.created,
        "owned_by": "smalti",
        "max_model_len": serving.engine.limit_tokens,
        "has_chat_template": bool(serving.chat_of(serving.adapter_of(name)).source),
    }


async def _completion(serving: Serving, body: CompletionRequest) -> PreparedRequest:
    adapter = serving.adapter_of(body.model)
    n = body.n or 1
    echo = bool(body.echo)
    requested = body.longest()
    serving.check_choices(n_prompts(body.prompt) * n)
    texts = read_prompt(body.prompt, serving.engine.limit_tokens)
    max_tokens = _COMPLETION_TOKENS if requested is None else requested
    if max_tokens == 0 and not echo:
        raise ApiError(400, "'max_tokens': 0 is allowed only with 'echo'", param="max_tokens", code="invalid_value")
    prompts = await asyncio.to_thread(
        lambda: [to_tokens(text, serving.engine, answered=max_tokens > 0) for text in texts]
    )
    wants_prompt_scores = echo and (body.logprobs is not None or max_tokens == 0)
    params = _params(
        body, max_tokens, body.logprobs, prompt_logprobs=(body.logprobs or 0) if wants_prompt_scores else None
    )
    return PreparedRequest(
        prompts,
        params,
        n,
        body.seed,
        CompletionShape(adapter or serving.name, serving.engine.tokenizer, body.logprobs is not None),
        scored=body.logprobs is not None,
        echo=echo,
        stream=bool(body.stream),
        usage_in_stream=body.usage_in_stream(),
        ignored=ignored(body),
        adapter=adapter,
    )


async def _chat(serving: Serving, body: ChatRequest) -> PreparedRequest:
    adapter = serving.adapter_of(body.model)
    serving.check_choices(body.n or 1)
    if body.top_logprobs is not None and not body.logprobs:
        raise ApiError(400, "'top_logprobs' needs 'logprobs': true", param="top_logprobs", code="invalid_value")
    requested = body.longest()
    if requested == 0:
        raise ApiError(400, "'max_tokens' must be 1 or more", param="max_tokens", code="invalid_value")
    chat = serving.chat_of(adapter)
    messages = [message.plain(f"messages.{index}") for index, message in enumerate(body.messages)]
    async with serving.template_turn:
        prompt = await asyncio.to_thread(chat_to_tokens, messages, chat, serving.engine)
    max_tokens = serving.engine.limit_tokens if requested is None else requested
    scored = bool(body.logprobs)
    return PreparedRequest(
        [prompt],
        _params(body, max_tokens, (body.top_logprobs or 0) if scored else None, stops=chat.stops),
        body.n or 1,
        body.seed,
        ChatShape(adapter or serving.name, serving.engine.tokenizer, scored),
        scored=scored,
        strip=not chat.source,
        stream=bool(body.stream),
        usage_in_stream=body.usage_in_stream(),
        ignored=ignored(body),
        adapter=adapter,
    )


def _params(
    body: CompletionRequest | ChatRequest,
    max_tokens: int,
    logprobs: int | None,
    *,
    prompt_logprobs: int | None = None,
    stops: tuple[str, ...] = (),
) -> SamplingParams:
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=1.0 if body.temperature is None else body.temperature,
        top_p=1.0 if body.top_p is None else body.top_p,
        top_k=max(0, body.top_k or 0),
        stop=(*body.stops(), *stops),
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        ignore_eos=bool(body.ignore_eos),
    )
