"""The state that the routes share, and how a prepared request becomes an answer."""

import asyncio
import secrets
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field, replace

from fastapi import Request
from fastapi.responses import JSONResponse, Response

from smalti.base import log
from smalti.base.clock import wall_s
from smalti.base.rng import derive_key
from smalti.data.tokenizer.chat import ChatFormat
from smalti.serve.engine.engine import Engine
from smalti.serve.engine.loop import EngineLoop
from smalti.serve.engine.sampling import SamplingParams
from smalti.serve.server.answers import Answers, ClientGone, Job
from smalti.serve.server.choices import Choice, Delta
from smalti.serve.server.errors import ApiError, from_bug
from smalti.serve.server.metrics import Metrics
from smalti.serve.server.prompts import Prompt
from smalti.serve.server.shapes import CompletionShape, usage
from smalti.serve.server.streaming import DONE, EventStream, Watch, event

IGNORED_HEADER = "X-Smalti-Ignored-Fields"


@dataclass
class Serving:
    """One model being served."""

    engine: Engine
    loop: EngineLoop
    chat: ChatFormat
    metrics: Metrics
    name: str
    adapter_chats: Mapping[str, ChatFormat] = field(default_factory=dict)
    """The chat formats of adapters; one that is not in it has the base's."""
    max_choices: int = 128
    """Choices (prompts times n) that one request may ask for; also bounded by the engine's limits."""
    template_turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while a chat template is rendered. The others wait here, not in a thread, which could not be cancelled."""
    created: int = field(default_factory=lambda: int(wall_s()))

    @property
    def names(self) -> list[str]:
        """The names of the base and of its adapters."""
        return [self.name, *self.engine.adapters]

    def adapter_of(self, name: str | None) -> str | None:
        """Return the adapter that a request's model names, None for the base.

        Raises ApiError 404 for the name of another model; None means the base.
        """
        if name is not None and name not in self.names:
            there = ", ".join(f"'{other}'" for other in self.names)
            raise ApiError(
                404, f"the model '{name[:80]}' does not exist; this server has {there}",
                param="model", code="model_not_found",
            )  # fmt: skip
        return None if name == self.name else name

    def chat_of(self, adapter: str | None) -> ChatFormat:
        """Return the chat format of an adapter, or with None of the base."""
        return self.chat if adapter is None else self.adapter_chats.get(adapter, self.chat)

    def check_choices(self, n_choices: int) -> None:
        """Raise ApiError where one request asks for too many choices."""
        limits = self.engine.limits
        max_choices = min(self.max_choices, limits.max_rows + limits.max_waiting)
        if n_choices > max_choices:
            raise ApiError(
                400,
                f"{n_choices} choices (prompts times n); one request may ask for {max_choices}",
                param="n",
                code="invalid_value",
            )


@dataclass(frozen=True)
class PreparedRequest:
    """A validated request: prompts, sampling parameters and the form of its answer."""

    prompts: list[Prompt]
    params: SamplingParams
    n: int
    seed: int | None
    shape: CompletionShape
    scored: bool
    echo: bool = False
    strip: bool = False
    stream: bool = False
    usage_in_stream: bool = False
    ignored: str = ""
    adapter: str | None = None

    def jobs(self) -> list[Job]:
        """Return the choices, those of one prompt in sequence. The first of each prompt has the request's seed.

        With a seed the answer to a prompt does not depend on its place in the request; without one the seed is random.
        """
        seeds = [self.seed] if self.seed is not None else [secrets.randbits(62)]
        seeds += [derive_key("choice", seeds[0], index) for index in range(1, self.n)]
        if self.seed is None:
            return [
                Job(prompt.ids, replace(self.params, seed=derive_key("prompt", seed, place)), self.adapter)
                for place, prompt in enumerate(self.prompts)
                for seed in seeds
            ]
        return [
            Job(prompt.ids, replace(self.params, seed=seed), self.adapter) for prompt in self.prompts for seed in seeds
        ]


async def answer(serving: Serving, request: Request, prepared: PreparedRequest) -> Response:
    """Answer a request, whole or as a stream."""
    jobs = prepared.jobs()
    choices = [
        Choice(
            index,
            serving.engine,
            prepared.scored,
            prompt.ids,
            prompt.text if prepared.echo else None,
            prompt.added,
            prepared.adapter,
            prepared.strip,
        )
        for index, prompt in enumerate(prompt for prompt in prepared.prompts for _ in range(prepared.n))
    ]  # fmt: skip
    answers = Answers(serving.loop, serving.metrics, jobs)
    answers.start()
    headers = {IGNORED_HEADER: prepared.ignored} if prepared.ignored else {}
    if prepared.stream:
        return EventStream(_events(answers, choices, prepared), answers.stop, headers)
    try:
        async with Watch(request.receive, answers.stop):
            return JSONResponse(await _whole(answers, choices, prepared), headers=headers)
    except ClientGone:
        return Response(status_code=499)
    finally:
        answers.stop()


async def _whole(answers: Answers, choices: list[Choice], prepared: PreparedRequest) -> dict[str, object]:
    deltas_of: list[list[Delta]] = [[] for _ in choices]
    async for index, output in answers.outputs():
        deltas_of[index].append(choices[index].add(output))
    joined = [
        Delta(
            index,
            "".join(delta.text for delta in deltas),
            [token for delta in deltas for token in delta.tokens],
            deltas[-1].finish_reason,
        )
        for index, deltas in enumerate(deltas_of)
    ]
    return prepared.shape.whole(joined, _usage(prepared, choices))


async def _events(answers: Answers, choices: list[Choice], prepared: PreparedRequest) -> AsyncIterator[str]:
    """Yield chunks, then usage if requested; an error after the start of the stream is an event of its own."""
    shape = prepared.shape
    for opening in shape.first(len(choices)):
        yield event(shape.chunk([opening]))
    try:
        async for index, output in answers.outputs():
            delta = choices[index].add(output)
            if delta.text or delta.tokens or delta.finish_reason:
                yield event(shape.chunk([shape.part(delta)]))
        if prepared.usage_in_stream:
            yield event(shape.chunk([], _usage(prepared, choices)))
    except ClientGone:
        return
    except ApiError as error:
        yield event(error.body())
    except Exception as error:
        log.get("serve").exception("a stream ended with a bug")
        yield event(from_bug(error).body())
    yield DONE


def _usage(prepared: PreparedRequest, choices: list[Choice]) -> dict[str, int]:
    return usage(sum(len(prompt.ids) for prompt in prepared.prompts), sum(choice.n_tokens for choice in choices))
