"""One choice of an answer while it is generated: its text, its scored tokens, its finish reason."""

from dataclasses import dataclass, field

from smalti.serve.engine.engine import Engine
from smalti.serve.engine.request import RequestOutput
from smalti.serve.server.scores import Placed, ScoreRow


@dataclass(frozen=True)
class Delta:
    """The part of a choice that one engine output adds."""

    index: int
    text: str
    tokens: list[Placed]
    finish_reason: str | None


@dataclass
class Choice:
    """Collects the outputs of one sequence."""

    index: int
    engine: Engine
    scored: bool
    """True when the client asked for log-probabilities."""
    prompt_ids: tuple[int, ...]
    echo: str | None = None
    """The prompt's text, if it is shown before the answer."""
    added: int = 0
    """Tokens at the start of the prompt that the client did not write."""
    adapter: str | None = None
    """The adapter that answers; None: the base."""
    strip: bool = False
    """True when whitespace before the first word belongs to the chat format, not to the answer."""
    n_tokens: int = 0
    _shown: int = 0
    _first: bool = True
    _last_id: int | None = None
    _row: ScoreRow = field(init=False)

    def __post_init__(self) -> None:
        self._row = ScoreRow(self.engine.tokenizer, self.engine.decoder_after(self.prompt_ids))

    def add(self, output: RequestOutput) -> Delta:
        """Add an output; returns what may be shown because of it."""
        text = output.text
        tokens: list[Placed] = []
        if self._first and self.echo is not None:
            if self.scored:
                tokens = self._row.prompt(output.prompt_scores[self.added :], self.echo)
            text = self.echo + text
        self._first = False
        self._shown += len(text)
        if self.strip:
            text = text.lstrip()
            self.strip = not text
        self.n_tokens += len(output.tokens)
        if output.tokens:
            self._last_id = output.tokens[-1].id
        if self.scored:
            self._row.add(output.tokens)
            # The tokens of a stop text are not reported; an end token has no text and is.
            by_stop_text = output.finish_reason == "stop" and self._last_id not in self.engine.end_ids(self.adapter)
            tokens += self._row.take(self._shown, rest=output.finish_reason is not None and not by_stop_text)
        return Delta(self.index, text, tokens, output.finish_reason)
