"""What the routes share: the engine with its limits, and the way from a request's choices to its answer."""

import asyncio
import secrets
from collections.abc import AsyncIterator
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
    max_choices: int = 128
    """Choices (prompts times n) that one request may ask for; never more than the engine takes in."""
    template_turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held by the chat whose template is rendered. Others wait here and not in a thread, which could not be ended."""
    created: int = field(default_factory=lambda: int(wall_s()))

    def check_model(self, name: str | None) -> None:
        """Raises ApiError 404 for another model than ours; a request that names none means ours."""
        if name is not None and name != self.name:
            raise ApiError(
                404, f"the model '{name[:80]}' is not here; this server has '{self.name}'",
                param="model", code="model_not_found",
            )  # fmt: skip

    def check_choices(self, n_choices: int) -> None:
        """Raises ApiError where one request asks for too many answers."""
        limits = self.engine.limits
        most = min(self.max_choices, limits.max_rows + limits.max_waiting)
        if n_choices > most:
            raise ApiError(
                400,
                f"{n_choices} choices (prompts times n); one request may ask for {most}",
                param="n",
                code="invalid_value",
            )


@dataclass(frozen=True)
class Asked:
    """A request made ready for the engine."""

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

    def jobs(self) -> list[Job]:
        """The choices, those of one prompt side by side. The first of a prompt has the request's own seed.

        A seed makes the answer to a prompt the same wherever it stands in the request; without one it is drawn.
        """
        seeds = [self.seed] if self.seed is not None else [secrets.randbits(62)]
        seeds += [derive_key("choice", seeds[0], index) for index in range(1, self.n)]
        if self.seed is None:
            return [
                Job(prompt.ids, replace(self.params, seed=derive_key("prompt", seed, place)))
                for place, prompt in enumerate(self.prompts)
                for seed in seeds
            ]
        return [Job(prompt.ids, replace(self.params, seed=seed)) for prompt in self.prompts for seed in seeds]


async def answer(serving: Serving, request: Request, asked: Asked) -> Response:
    """Run a request to its end, whole or as a stream."""
    jobs = asked.jobs()
    choices = [
        Choice(
            index,
            serving.engine,
            asked.scored,
            prompt.ids,
            prompt.text if asked.echo else None,
            prompt.added,
            asked.strip,
        )
        for index, prompt in enumerate(prompt for prompt in asked.prompts for _ in range(asked.n))
    ]  # fmt: skip
    answers = Answers(serving.loop, serving.metrics, jobs)
    answers.start()
    headers = {IGNORED_HEADER: asked.ignored} if asked.ignored else {}
    if asked.stream:
        return EventStream(_events(answers, choices, asked), answers.stop, headers)
    try:
        async with Watch(request.receive, answers.stop):
            return JSONResponse(await _whole(answers, choices, asked), headers=headers)
    except ClientGone:
        return Response(status_code=499)
    finally:
        answers.stop()


async def _whole(answers: Answers, choices: list[Choice], asked: Asked) -> dict[str, object]:
    parts: list[list[Delta]] = [[] for _ in choices]
    async for index, piece in answers.pieces():
        parts[index].append(choices[index].add(piece))
    joined = [
        Delta(
            index,
            "".join(delta.text for delta in deltas),
            [token for delta in deltas for token in delta.tokens],
            deltas[-1].finish_reason,
        )
        for index, deltas in enumerate(parts)
    ]
    return asked.shape.whole(joined, _used(asked, choices))


async def _events(answers: Answers, choices: list[Choice], asked: Asked) -> AsyncIterator[str]:
    """Chunks, and at the end usage if it was asked for; an error that comes late is an event of its own."""
    shape = asked.shape
    for opening in shape.first(len(choices)):
        yield event(shape.chunk([opening]))
    try:
        async for index, piece in answers.pieces():
            delta = choices[index].add(piece)
            if delta.text or delta.tokens or delta.finish_reason:
                yield event(shape.chunk([shape.part(delta)]))
        if asked.usage_in_stream:
            yield event(shape.chunk([], _used(asked, choices)))
    except ClientGone:
        return
    except ApiError as error:
        yield event(error.body())
    except Exception as error:
        log.get("serve").exception("a stream ended with a bug")
        yield event(from_bug(error).body())
    yield DONE


def _used(asked: Asked, choices: list[Choice]) -> dict[str, int]:
    return usage(sum(len(prompt.ids) for prompt in asked.prompts), sum(choice.n_tokens for choice in choices))
