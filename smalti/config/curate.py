"""The configs of ``smalti data curate`` and ``smalti data tokenize``."""

import re
from typing import Literal, Self

from pydantic import Field, model_validator

from smalti.config.places import LocalFolder
from smalti.config.schema import Config, NotAllowed, Real, Whole

Preset = Literal[
    "none",
    "safe",
    "prose-light",
    "code-light",
    "gopher-2021",
    "gopher-repetition-2021",
    "c4-2019",
    "fineweb-code-0.01",
    "fineweb-paper-0.1",
    "refinedweb-2023",
]
"""Names of the rule presets, which are defined in ``smalti/data/prepare/curate/rules``."""

SplitPattern = Literal["gpt2", "cl100k", "o200k"]
"""Patterns that split text into words before bytes are merged (``smalti/data/tokenizer/patterns.py``)."""


class CurateSourceConfig(Config):
    """A source of raw documents."""

    path: str
    """A folder of text, Markdown or code files, a JSONL file (also .gz, .zst), a Parquet file, or a folder of such."""
    text_field: str = "text"
    """Field with the text, in JSONL and Parquet."""
    id_field: str | None = None
    """Field with the id of the document; absent: file and row."""
    include: tuple[str, ...] = ()
    """Glob patterns (``*.md``, ``docs/*``) of files to read from a folder; empty: all files of a known kind."""
    keep_fields: tuple[str, ...] = ()
    """Numeric fields, in JSONL and Parquet, to keep as columns of the output, e.g. for ``score_field`` of a
    deduplication. Values must be numbers or null."""
    rules: tuple[Preset, ...] = ("prose-light",)
    """Presets of quality rules, applied in this order; a document must pass all. ``[none]``: keep every document."""

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
            raise ValueError(f"rules={list(self.rules)}: 'none' cannot be combined with others")
        twice = sorted({name for name in self.rules if self.rules.count(name) > 1})
        if twice:
            raise ValueError(f"rules name '{twice[0]}' twice")
        return self


class CurateConfig(Config):
    """Raw documents -> clean, unique documents; every dropped document is recorded."""

    sources: dict[str, CurateSourceConfig] = Field(min_length=1)
    """Name -> source of documents."""
    output: LocalFolder
    """Local folder that receives ``documents/``, ``drops/``, ``report.json`` and ``report.md``; replaced by a rerun."""
    max_document_bytes: Whole = Field(1_000_000, ge=1000)
    """Maximum size of a document in bytes; longer ones are cut into parts (ids ``ID#1``, ``ID#2`` ...): at the last
    blank line in the second half of a part, else at the last line end, else at the last blank, else between
    characters."""
    heldout_frac: Real = Field(0.05, ge=0, lt=0.5)
    """Fraction of groups (documents, without group_field) to hold out from training."""
    group_field: str | None = None
    """Field whose values are held out as a whole, over all sources. Absent: each document, and each part of a cut one,
    by itself. Text files have no fields: with a group_field their group is their path."""
    seed: Whole = 17
    """Seed of the choice of held-out groups."""
    normalize: bool = True
    """Normalise Unicode (NFC), line ends, control characters, trailing blanks, and blank lines at both ends."""
    dedup: Literal["exact", "none"] = "exact"
    """``exact``: keep one of equal texts, over all sources: a held-out one before a training one, then the first by
    name of source, file and row. So no training document equals a held-out one."""
    drop_documents: str | None = None
    """JSON-lines file of documents to drop, with ``source`` and ``document`` (its id), such as the list that ``smalti
    eval contamination`` writes. With ``dedup: exact`` their duplicates are dropped too."""
    unreadable: Literal["stop", "drop"] = "stop"
    """For a record that cannot be read (broken JSON, bad UTF-8, no text): stop with an error, or drop it and record
    why."""

    @model_validator(mode="after")
    def _sources_name_folders(self) -> Self:
        for name in self.sources:
            if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", name) or name == "tokenizer":
                raise ValueError(
                    f"source '{name}' cannot name a folder; use letters, digits, '.', '_' and '-' (not 'tokenizer')"
                )
        return self


class TokensConfig(Config):
    """The tokenizer and the folder of token files."""

    output: LocalFolder
    """Local folder for ``tokenizer/`` and a folder of token files for each source and split."""
    tokenizer: str = "train"
    """``train``: train a byte-level BPE on the training split; else the path of a ``tokenizer.json`` (or its folder),
    or of a tiktoken rank file."""
    vocab_size: Whole = Field(4096, ge=260)
    """Size of the trained vocabulary, special tokens included; only with ``tokenizer: train``."""
    extend: Whole | None = Field(None, ge=1)
    """Number of entries to add to a loaded byte-level BPE, trained on the training split; old ids stay as they are."""
    train_bytes: Whole = Field(50_000_000, ge=1)
    """Maximum of text to train the tokenizer on, in bytes, spread over the sources."""
    pattern: SplitPattern | None = None
    """Pattern that splits text into words. Absent: ``cl100k`` for training; for a rank file, the one of its size."""
    eod_token: str | None = None
    """Token that ends a document, for a loaded tokenizer; absent: the one that it declares."""

    @model_validator(mode="after")
    def _options_have_an_effect(self) -> Self:
        if self.tokenizer == "train":
            if self.eod_token is not None:
                raise ValueError("eod_token has no effect on a tokenizer that is trained here ('<|endoftext|>')")
            if self.extend is not None:
                raise NotAllowed(
                    f"extend={self.extend} has no effect on a tokenizer that is trained here",
                    allowed="extend with the path of a tokenizer",
                    hint=f"vocab_size={self.vocab_size + self.extend}, or tokenizer=FOLDER",
                )
            return self
        for name in ("vocab_size", "train_bytes"):
            if name in self.model_fields_set and not (name == "train_bytes" and self.extend is not None):
                raise NotAllowed(
                    f"{name} has no effect on a tokenizer that is loaded ('{self.tokenizer}')",
                    allowed="vocab_size with tokenizer=train only, train_bytes with that or extend",
                    hint=f"leave '{name}' out of the recipe and of the command",
                )
        return self


class TokenizeConfig(TokensConfig):
    """Documents -> token files."""

    documents: LocalFolder
    """The output folder of ``smalti data curate``, ``dedup`` or ``build``."""
