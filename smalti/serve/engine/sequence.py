"""One request on its way: its tokens, its parameters, where it stands, and the text that may already be shown."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from smalti.data.tokenizer.encode import StreamDecoder
from smalti.serve.engine.sampling import SamplingParams
from smalti.serve.engine.text import StopText

FinishReason = Literal["stop", "length", "abort", "error"]
"""``stop``: an end token or a stop text; ``length``: max_tokens or the model's longest context; ``abort``: somebody
called ``abort``; ``error``: see ``Piece.error``."""


@dataclass(frozen=True)
class TokenScore:
    """One token with what the model thought of it.

    The model's own distribution over its whole vocabulary, before temperature, top-k and top-p.
    """

    id: int
    logprob: float | None
    """Natural logarithm; None for the first token of a prompt, and where no scores were asked."""
    top: tuple[tuple[int, float], ...] = ()
    """The likeliest ids with their logprobs, best first; as many as asked."""


@dataclass(frozen=True)
class Piece:
    """What one engine step adds to one request. The last piece of a request, and no other, has a ``finish_reason``."""

    text: str
    """May be shown: stop texts and their beginnings are held back."""
    tokens: tuple[TokenScore, ...] = ()
    """Generated since the last piece, an end token included."""
    prompt: tuple[TokenScore, ...] = ()
    """Every token of the prompt, in the first piece with tokens or an end, if prompt scores were asked."""
    finish_reason: FinishReason | None = None
    error: BaseException | None = None
    """Present with finish_reason ``error``: what ended this request."""


OnPiece = Callable[[Piece], None]


@dataclass(frozen=True)
class Completion:
    """The whole answer to one prompt."""

    prompt: str
    text: str
    token_ids: tuple[int, ...]
    """Every token that was generated, an end token included."""
    finish_reason: FinishReason
    prompt_tokens: int
    """Tokens of the prompt, the begin token included."""
    tokens: tuple[TokenScore, ...] = ()
    """``token_ids`` with their scores; empty unless ``logprobs`` was asked."""
    prompt_scores: tuple[TokenScore, ...] = ()
    """Every token of the prompt with its score; empty unless ``prompt_logprobs`` was asked."""


@dataclass(eq=False)
class Sequence:
    """A prompt and what has been generated for it. ``limit_tokens`` is the longest that prompt and answer may be."""

    request: int
    prompt_ids: list[int]
    params: SamplingParams
    end_ids: frozenset[int]
    limit_tokens: int
    decoder: StreamDecoder
    """Its own: it holds the bytes of a character that is not finished."""
    on_piece: OnPiece
    cached_tokens: int = 0
    """Tokens of the prompt that the cache holds so far."""
    prompt_scores: list[TokenScore] = field(default_factory=list)
    """Of the prompt, as far as it has been read; empty where they were not asked."""
    output_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None

    def __post_init__(self) -> None:
        self._stop = StopText(self.params.stop)

    @property
    def position(self) -> int:
        """The place of the next token."""
        return len(self.prompt_ids) + len(self.output_ids)

    @property
    def most_tokens(self) -> int:
        """Tokens that the cache must hold at the most: the last one that is generated is never fed."""
        return min(len(self.prompt_ids) + max(self.params.max_tokens - 1, 0), self.limit_tokens)

    def take_prompt_scores(self) -> tuple[TokenScore, ...]:
        """The scores of the prompt, once."""
        taken, self.prompt_scores = tuple(self.prompt_scores), []
        return taken

    def append(self, token: int) -> str:
        """Take the next token; returns the piece of text that may now be shown (often empty)."""
        assert self.finish_reason is None, "a finished sequence takes no token"
        self.output_ids.append(token)
        shown = ""
        if token in self.end_ids and not self.params.ignore_eos:
            self.finish_reason = "stop"
        else:
            shown = self._stop.add(self.decoder.push(token))
            if self._stop.found:
                self.finish_reason = "stop"
            elif len(self.output_ids) >= self.params.max_tokens or self.position >= self.limit_tokens:
                self.finish_reason = "length"
        if self.finish_reason and not self._stop.found:
            shown += self._stop.add(self.decoder.finish())
            if self._stop.found:
                self.finish_reason = "stop"
            shown += self._stop.flush()
        return shown
