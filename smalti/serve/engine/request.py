"""One request: its prompt, its sampling parameters, the tokens generated so far, and the text that may be shown."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from smalti.data.tokenizer.encode import StreamDecoder
from smalti.model.adapters.several import NONE
from smalti.serve.engine.sampling import SamplingParams
from smalti.serve.engine.text import StopText

FinishReason = Literal["stop", "length", "abort", "error"]
"""``stop``: an end token or a stop text; ``length``: max_tokens or the model's longest context; ``abort``: the request
was aborted; ``error``: see ``RequestOutput.error``."""


@dataclass(frozen=True)
class TokenScore:
    """A token with its log-probability under the model's full distribution, before temperature, top-k and top-p."""

    id: int
    logprob: float | None
    """Natural logarithm; None for the first token of a prompt, and where no scores were requested."""
    top: tuple[tuple[int, float], ...] = ()
    """The likeliest ids with their logprobs, best first; as many as requested."""


@dataclass(frozen=True)
class RequestOutput:
    """The output of one engine step for one request. Only the last output of a request has a ``finish_reason``."""

    text: str
    """Text that may be shown: stop texts and their prefixes are held back."""
    tokens: tuple[TokenScore, ...] = ()
    """Tokens generated since the last output, an end token included."""
    prompt_scores: tuple[TokenScore, ...] = ()
    """Every token of the prompt, in the first output with tokens or an end, if prompt scores were requested."""
    finish_reason: FinishReason | None = None
    error: BaseException | None = None
    """The error that ended this request; present with finish_reason ``error``."""


OnOutput = Callable[[RequestOutput], None]


@dataclass(eq=False)
class Request:
    """A prompt and what has been generated for it. ``limit_tokens`` is the longest that prompt and answer may be."""

    request_id: int
    prompt_ids: list[int]
    params: SamplingParams
    end_ids: frozenset[int]
    limit_tokens: int
    decoder: StreamDecoder
    """Holds the bytes of an incomplete character; not shared between requests."""
    on_output: OnOutput
    adapter: int = NONE
    """Number of the adapter that it uses."""
    cached_tokens: int = 0
    """Tokens of the prompt that the cache holds so far."""
    prompt_scores: list[TokenScore] = field(default_factory=list)
    """Scores of the prompt as far as it has been prefilled; empty where none were requested."""
    output_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None

    def __post_init__(self) -> None:
        self._stop = StopText(self.params.stop)

    @property
    def position(self) -> int:
        """Position of the next token."""
        return len(self.prompt_ids) + len(self.output_ids)

    @property
    def max_cached_tokens(self) -> int:
        """Most tokens that the cache may have to hold: the last generated token is never fed."""
        return min(len(self.prompt_ids) + max(self.params.max_tokens - 1, 0), self.limit_tokens)

    def take_prompt_scores(self) -> tuple[TokenScore, ...]:
        """Return the scores of the prompt, and clear them, so that they are reported once."""
        scores = tuple(self.prompt_scores)
        self.prompt_scores = []
        return scores

    def append(self, token: int) -> str:
        """Append the next token; returns the text that may now be shown (often empty)."""
        assert self.finish_reason is None, "a finished request takes no token"
        self.output_ids.append(token)
        shown = ""
        if token in self.end_ids and not self.params.ignore_eos:
            self.finish_reason = "stop"
        else:
            shown = self._stop.add(self.decoder.push(token))
            if self._stop.stopped:
                self.finish_reason = "stop"
            elif len(self.output_ids) >= self.params.max_tokens or self.position >= self.limit_tokens:
                self.finish_reason = "length"
        if self.finish_reason and not self._stop.stopped:
            shown += self._stop.add(self.decoder.finish())
            if self._stop.stopped:
                self.finish_reason = "stop"
            shown += self._stop.flush()
        return shown
