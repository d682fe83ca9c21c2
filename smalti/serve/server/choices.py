"""One choice of an answer as it grows: its text, its scored tokens, how it ended."""

from dataclasses import dataclass, field

from smalti.serve.engine.engine import Engine
from smalti.serve.engine.sequence import Piece
from smalti.serve.server.scores import Placed, ScoreRow


@dataclass(frozen=True)
class Delta:
    """What a piece adds to a choice."""

    index: int
    text: str
    tokens: list[Placed]
    finish_reason: str | None


@dataclass
class Choice:
    """Collects the pieces of one sequence."""

    index: int
    engine: Engine
    scored: bool
    """True when the client asked for log-probabilities."""
    prompt_ids: tuple[int, ...]
    echo: str | None = None
    """The prompt's text, where it is shown before the answer."""
    added: int = 0
    """How many tokens at the head of the prompt the client did not write."""
    strip: bool = False
    """True when blanks before the first word belong to the form and not to the answer."""
    n_tokens: int = 0
    _shown: int = 0
    _first: bool = True
    _last_id: int | None = None
    _row: ScoreRow = field(init=False)

    def __post_init__(self) -> None:
        self._row = ScoreRow(self.engine.tokenizer, self.engine.decoder_after(self.prompt_ids))

    def add(self, piece: Piece) -> Delta:
        """Take a piece; returns what may be shown because of it."""
        text, tokens = piece.text, list[Placed]()
        if self._first and self.echo is not None:
            if self.scored:
                tokens = self._row.prompt(piece.prompt[self.added :], self.echo)
            text = self.echo + text
        self._first = False
        self._shown += len(text)
        if self.strip:
            text = text.lstrip()
            self.strip = not text
        self.n_tokens += len(piece.tokens)
        if piece.tokens:
            self._last_id = piece.tokens[-1].id
        if self.scored:
            self._row.add(piece.tokens)
            # A stop text swallows its tokens; an end token has no text and is reported.
            ended = piece.finish_reason is not None
            swallowed = piece.finish_reason == "stop" and self._last_id not in self.engine.end_ids
            tokens += self._row.take(self._shown, rest=ended and not swallowed)
        return Delta(self.index, text, tokens, piece.finish_reason)
