"""The configs of ``smalti data curate`` and ``smalti data tokenize``."""

import re
from typing import Literal, Self

from pydantic import Field, model_validator

from smalti.config.places import LocalFolder
from smalti.config.schema import Config, NotAllowed, Real, Whole

Preset = Literal[
    "none",
    "prose-light",
    "code-light",
    "gopher-2021",
    "gopher-repetition-2021",
    "c4-2019",
    "fineweb-code-0.01",
    "fineweb-paper-0.1",
]
"""The names of the rule presets; what they hold stands in ``smalti/data/prepare/curate/rules``."""

SplitPattern = Literal["gpt2", "cl100k", "o200k"]
"""How text is cut into words before bytes are merged; the expressions: ``smalti/data/tokenizer/patterns.py``."""


class CurateSourceConfig(Config):
    """One source of raw documents."""

    path: str
    """A folder of text, Markdown or code files, a JSONL file (also .gz, .zst), a Parquet file, or a folder of such."""
    text_field: str = "text"
    """The field that holds the text, in JSONL and Parquet."""
    id_field: str | None = None
    """The field that names the document; absent: file and row."""
    include: tuple[str, ...] = ()
    """Glob patterns (``*.md``, ``docs/*``) of paths to take from a folder; empty takes every kind that is known."""
    keep_fields: tuple[str, ...] = ()
    """Numeric fields, in JSONL and Parquet, that stay with the document as columns of the output; ``score_field`` of a
    deduplication may name one. Null is allowed in them, nothing else that is not a number."""
    rules: tuple[Preset, ...] = ("prose-light",)
    """Quality rules, as named presets that run in this order; all of them must pass. ``[none]`` keeps everything."""

    @model_validator(mode="after")
    def _names_make_sense(self) -> Self:
        taken = sorted({"id", "text", "group", "n_bytes"} & set(self.keep_fields))
        if taken:
            raise ValueError(f"keep_fields name '{taken[0]}', which is a column of every document already")
        if len(set(self.keep_fields)) < len(self.keep_fields):
            raise ValueError(f"keep_fields={list(self.keep_fields)} names a field twice")
        if not self.rules:
            raise ValueError("rules=[] names no rules; write [none] for none")
        if "none" in self.rules and len(self.rules) > 1:
            raise ValueError(f"rules={list(self.rules)}: 'none' stands alone")
        twice = sorted({name for name in self.rules if self.rules.count(name) > 1})
        if twice:
            raise ValueError(f"rules name '{twice[0]}' twice")
        return self


class CurateConfig(Config):
    """Raw documents -> clean, unique documents, with every drop recorded."""

    sources: dict[str, CurateSourceConfig] = Field(min_length=1)
    """Name -> where the documents come from."""
    output: LocalFolder
    """Local folder that receives ``documents/``, ``drops/``, ``report.json`` and ``report.md``; replaced by a rerun."""
    max_document_bytes: Whole = Field(1_000_000, ge=1000)
    """Longer documents are cut into parts of at most so many bytes (ids ``ID#1``, ``ID#2`` ...): at the last blank line
    in the second half of so many bytes, else at the last line end, else at the last blank, else between characters."""
    heldout_frac: Real = Field(0.05, ge=0, lt=0.5)
    """Share of groups (documents, where no group_field is given) set aside before anything is learned."""
    group_field: str | None = None
    """The field by which held-out documents are chosen (all documents of a group fall on one side, over all sources).
    Absent: each document by itself, and each part of one that was cut. Files of text have no fields: with a group_field
    their group is their path."""
    seed: Whole = 17
    """Chooses the held-out groups."""
    normalize: bool = True
    """Unicode NFC, line ends, control characters, trailing blanks, blank lines at both ends."""
    dedup: Literal["exact", "none"] = "exact"
    """``exact``: of equal texts one stays, over all sources: a held-out one before a training one, then the first by
    name of source, file and row. A training document that equals a held-out one is always dropped this way."""
    unreadable: Literal["stop", "drop"] = "stop"
    """A record that cannot be read (broken JSON, bad UTF-8, no text): stop and name it, or drop it and record why."""

    @model_validator(mode="after")
    def _sources_name_folders(self) -> Self:
        for name in self.sources:
            if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", name) or name == "tokenizer":
                raise ValueError(
                    f"source '{name}' cannot name a folder; use letters, digits, '.', '_' and '-' (not 'tokenizer')"
                )
        return self


class TokenizeConfig(Config):
    """Documents -> token files."""

    documents: LocalFolder
    """The output folder of ``smalti data curate``."""
    output: LocalFolder
    """Local folder that receives ``tokenizer/`` and one folder of token files for each source and split."""
    tokenizer: str = "train"
    """``train`` a byte-level BPE on the training split, or the path of a ``tokenizer.json`` (or its folder), or of a
    tiktoken rank file."""
    vocab_size: Whole = Field(4096, ge=260)
    """Size of a vocabulary that is trained here, special tokens included."""
    train_bytes: Whole = Field(50_000_000, ge=1)
    """At most this much text is read to train the tokenizer, spread over the sources."""
    pattern: SplitPattern | None = None
    """How text is cut into words. Absent: ``cl100k`` for training; for a rank file, the one that goes with its size."""
    eod_token: str | None = None
    """The token that ends a document, of a tokenizer that is loaded; absent: the one it declares."""

    @model_validator(mode="after")
    def _options_have_an_effect(self) -> Self:
        if self.tokenizer == "train":
            if self.eod_token is not None:
                raise ValueError("eod_token has no effect on a tokenizer that is trained here ('<|endoftext|>')")
            return self
        for name in ("vocab_size", "train_bytes"):
            if name in self.model_fields_set:
                raise NotAllowed(
                    f"{name} has no effect on a tokenizer that is loaded ('{self.tokenizer}')",
                    allowed="vocab_size and train_bytes with tokenizer=train only",
                    hint=f"leave '{name}' out of the recipe and of the command",
                )
        return self
