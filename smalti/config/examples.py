"""The config of tuning: where the examples come from, and how they become tokens."""

from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from smalti.config.schema import Config, NotAllowed, Real, Whole

ExampleFormat = Literal["chat", "sharegpt", "instruction", "prompt", "preference", "kto", "text"]
LossRole = Literal["assistant", "system", "developer", "user", "tool"]


class ExampleColumns(Config):
    """The names of a file's columns; absent: the name of the field itself."""

    messages: str | None = None
    """Format chat: the list of messages."""
    conversations: str | None = None
    """Format sharegpt: the list of messages."""
    tools: str | None = None
    """The functions that the assistant may call, as a list or JSON text; optional in every format of messages."""
    system: str | None = None
    """The system message; optional in the formats sharegpt, instruction and prompt."""
    instruction: str | None = None
    """Format instruction: what to do."""
    input: str | None = None
    """Format instruction: what to do it with; optional, and put below the instruction."""
    output: str | None = None
    """Format instruction: the answer."""
    prompt: str | None = None
    """Formats prompt, preference and kto: a text, or a list of messages; optional in preferences of messages."""
    completion: str | None = None
    """Formats prompt and kto: the answer, a text or a list of messages; absent: ``completion`` or ``response``."""
    chosen: str | None = None
    """Format preference: the better answer, a text or a list of messages."""
    rejected: str | None = None
    """Format preference: the worse answer."""
    margin: str | None = None
    """Format preference: how much better, a number; optional."""
    label: str | None = None
    """Format kto: whether the answer is good, true or false."""
    text: str | None = None
    """Format text: a document."""
    id: str | None = None
    """A name of each row; optional, and taken only if it is named here."""


class ExamplesConfig(Config):
    """Files of chats, instructions or preferences, and how they become tokens with a loss mask."""

    files: tuple[str, ...] = Field(min_length=1)
    """JSONL (also .gz, .zst) and Parquet files, or folders of them; one path may be given without brackets."""
    format: Literal["auto"] | ExampleFormat = "auto"
    """What a row is. ``chat``: OpenAI's messages; ``sharegpt``: conversations of from and value; ``instruction``:
    instruction, input and output; ``prompt``: prompt and completion; ``preference``: prompt, chosen and rejected;
    ``kto``: prompt, completion and label; ``text``: a document; ``auto``: found by the columns of each file's first
    row."""
    columns: ExampleColumns = ExampleColumns()
    template: str = "model"
    """The chat template: ``model`` (the one in the model's folder), ``chatml``, ``none`` (prompt and completion are
    joined as they are, and the end token follows), or the path of a .jinja file."""
    roles: tuple[LossRole, ...] = Field(("assistant",), min_length=1)
    """The roles whose messages are in the loss. Of another role than assistant all is that the template writes."""
    turns: Literal["all", "last", "each"] = "all"
    """Which messages of these roles are in the loss: ``all``; the ``last``; ``each`` in an example of its own, with the
    messages before it, as templates need that change earlier turns."""
    max_tokens: Whole | None = Field(None, ge=2)
    """Longest example, in tokens after the first one, of both answers of a pair together; absent: ``data.seq_len``."""
    too_long: Literal["truncate", "drop", "stop"] = "truncate"
    """What to do with a longer one. ``truncate``: leave out its oldest turns (a user's message and what follows, up to
    the next user's), never the system message, until it fits, and drop it if its last turn alone does not fit; of a
    text, keep the beginning. Both answers of a pair lose the same turns."""
    unreadable: Literal["stop", "drop"] = "stop"
    """What to do with a row that is wrong: stop with its line, or drop it and count it."""
    heldout_frac: Real = Field(0.02, ge=0, lt=1)
    """Fraction of prompts to hold out, by a hash of the conversation's first user message: all examples that begin with
    it are on one side."""
    seed: Whole = 17
    """Seed of the choice of held-out prompts."""
    dedup: Literal["near"] | bool = True
    """Drop examples with exactly the tokens, mask and values of an earlier one. ``near``: also training rows whose
    words are nearly those of a held-out or an earlier row (Jaccard similarity of runs of three words 0.65 or more, as
    'smalti data dedup')."""
    decontaminate: tuple[str, ...] = ()
    """YAML files of evaluation tasks ('smalti eval run'): examples that hold one of their items are dropped, by the
    rules of 'smalti eval contamination'."""

    @field_validator("files", mode="before")
    @classmethod
    def _one_file(cls, files: Any) -> Any:
        return (files,) if isinstance(files, str) else files

    @model_validator(mode="after")
    def _options_have_an_effect(self) -> Self:
        if self.format == "text" and (self.template != "model" or self.turns != "all" or self.roles != ("assistant",)):
            raise NotAllowed(
                "template, turns and roles have no effect with format: text",
                allowed="their defaults",
                hint="remove them: all of a text is in the loss",
            )
        return self
