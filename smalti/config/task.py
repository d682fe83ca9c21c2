"""The schema of an evaluation task: a JSONL file, what is in its columns, and how a prompt is made of a row."""

from typing import Literal, Self

from pydantic import Field, model_validator

from smalti.config.schema import Config, NotAllowed, Real, Whole

Kind = Literal["choice", "schema", "exact", "generation", "ifeval"]
Mode = Literal["fixed", "v0.3"]


class Columns(Config):
    """The names of a file's columns; absent: those of LLM Foundry's files."""

    context: str | None = None
    """The question; absent: ``query`` for choices, else ``context``."""
    choices: str | None = None
    """Kind choice: the list of options; absent: ``choices``."""
    contexts: str | None = None
    """Kind schema: the list of contexts, of which one fits the continuation; absent: ``context_options``."""
    gold: str | None = None
    """Kinds choice and schema: the number of the right option, from 0, or its text; absent: ``gold``."""
    continuation: str | None = None
    """Kinds schema and exact: the text that follows; absent: ``continuation``."""
    answer: str | None = None
    """Kind generation: the right answer; absent: ``answer``."""
    aliases: str | None = None
    """Kind generation: a list of other right answers; absent: ``aliases`` where the file has it."""
    reasoning: str | None = None
    """Kind generation: the chain of thought before the answer; absent: ``chain_of_thought`` where the file has it."""
    messages: str | None = None
    """Kinds generation and exact: a conversation in OpenAI's format in place of context and answer. Its last message,
    of the assistant, is the right answer, and those before it are the prompt."""
    id: str | None = None
    """A unique name of each row; absent: rows have only numbers."""
    cluster: str | None = None
    """The passage or subject that several rows share, for standard errors; absent: rows are independent."""
    category: str | None = None
    """The part of the task that a row belongs to: accuracy is the mean over parts, and shots are of the same part."""


class TaskConfig(Config):
    """A task of a JSONL file. The prompt is the preamble, the shots and the row's own context."""

    kind: Kind
    """``choice``: the likeliest option; ``schema``: the context under which a continuation is likeliest; ``exact``: a
    continuation whose every token is the likeliest; ``generation``: a generated answer; ``ifeval``: a generated answer
    that follows instructions, in the columns of IFEval."""
    file: str
    """The JSONL file; a relative path starts at the folder of the YAML file."""
    name: str | None = Field(None, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """Name in the results; absent: that of the YAML file, or of ``file``."""
    columns: Columns = Columns()
    preamble: str = ""
    """Text before everything else, such as an instruction."""
    prelimiter: str = ""
    """Text before each context: ``"Question: "``."""
    continuation_delimiter: str = " "
    """Text between a context and its answer."""
    example_delimiter: str = "\n"
    """Text between two examples."""
    shots: Whole = Field(0, ge=0)
    """Number of other rows of the file that precede the question, with their answers."""
    seed: Whole = 1234
    """Seed of the choice of shots, of the order of options, and of the rows that ``limit`` takes."""
    chance: Real | None = Field(None, ge=0, lt=1)
    """Accuracy of a random answer; absent: the mean of 1 / options, and 0 for answers without options."""
    rank_by: Literal["per_token", "per_byte", "sum"] = "per_token"
    """What ranks options: the log-likelihood per token, per UTF-8 byte, or the sum."""
    answer_delimiter: str = ""
    """Kind generation: text between the chain of thought and the answer (``"The answer is "``); empty: no reasoning."""
    stop: tuple[str, ...] = ()
    """Kind generation: texts that end an answer; absent: in mode ``fixed`` the end of its first line, if there is no
    reasoning; through a chat template the end of the turn."""
    normalize: bool = True
    """Kind generation: compare without case, punctuation and articles."""
    verbatim: bool = False
    """Kind generation: an answer is right only if all of its text is that of a right answer, also where it is a number
    or has several lines."""
    max_new_tokens: Whole | None = Field(None, ge=1)
    """Kind generation: longest answer; absent: the longest in the file, with its reasoning, and 10 more. Kind ifeval:
    absent: 1280."""
    limit: Whole | None = Field(None, ge=1)
    """Use at most this many rows; absent: all."""

    @model_validator(mode="after")
    def _ifeval_has_its_own_columns(self) -> Self:
        if self.kind == "ifeval" and (self.shots or self.columns != Columns()):
            raise NotAllowed(
                "columns and shots have no effect with kind: ifeval",
                allowed="the columns key, prompt, instruction_id_list and kwargs; no shots",
                hint="remove them, or write the rows in the columns of IFEval",
            )
        return self

    @model_validator(mode="after")
    def _options_have_an_effect(self) -> Self:
        if self.columns.messages is not None:
            unused = [name for name in ("preamble", "prelimiter", "shots", "answer_delimiter") if getattr(self, name)]
            others = ("context", "answer", "continuation", "reasoning")
            unused += [f"columns.{name}" for name in others if getattr(self.columns, name)]
            unused += [] if self.kind in ("generation", "exact") else [f"kind: {self.kind}"]
            if unused:
                raise NotAllowed(
                    f"{', '.join(unused)} cannot be given with columns.messages",
                    allowed="kind: generation or exact, whose prompt is the conversation alone",
                    hint="remove them, or name the columns context and answer instead of messages",
                )
        if self.verbatim and (self.kind != "generation" or self.answer_delimiter):
            raise NotAllowed(
                "verbatim is for kind: generation without answer_delimiter",
                allowed="an answer that is compared as it is",
                hint="remove verbatim",
            )
        return self
