"""One request on its way: its tokens, its parameters, where it stands, and the text that may already be shown."""

from dataclasses import dataclass, field
from typing import Literal

from smalti.data.tokenizer.encode import StreamDecoder
from smalti.serve.engine.sampling import SamplingParams
from smalti.serve.engine.text import StopText

FinishReason = Literal["stop", "length"]
"""``stop``: an end token or a stop text; ``length``: max_tokens or the model's longest context."""


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


@dataclass
class Sequence:
    """A prompt and what has been generated for it. ``limit_tokens`` is the longest that prompt and answer may be."""

    prompt: str
    prompt_ids: list[int]
    params: SamplingParams
    end_ids: frozenset[int]
    limit_tokens: int
    decoder: StreamDecoder
    """Its own: it holds the bytes of a character that is not finished."""
    output_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: FinishReason | None = None

    def __post_init__(self) -> None:
        self._stop = StopText(self.params.stop)

    @property
    def position(self) -> int:
        """The place of the next token."""
        return len(self.prompt_ids) + len(self.output_ids)

    def append(self, token: int) -> str:
        """Take the next token; returns the piece of text that may now be shown (often empty)."""
        assert self.finish_reason is None, "a finished sequence takes no token"
        self.output_ids.append(token)
        piece = ""
        if token in self.end_ids:
            self.finish_reason = "stop"
        else:
            piece = self._stop.add(self.decoder.push(token))
            if self._stop.found:
                self.finish_reason = "stop"
            elif len(self.output_ids) >= self.params.max_tokens or self.position >= self.limit_tokens:
                self.finish_reason = "length"
        if self.finish_reason and not self._stop.found:
            piece += self._stop.add(self.decoder.finish())
            if self._stop.found:
                self.finish_reason = "stop"
            piece += self._stop.flush()
        self.text += piece
        return piece

    def completion(self) -> Completion:
        """The answer; only once it is finished."""
        assert self.finish_reason is not None, "the sequence has not finished"
        return Completion(self.prompt, self.text, tuple(self.output_ids), self.finish_reason, len(self.prompt_ids))
