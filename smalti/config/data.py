"""The ``data:`` section of a run, and the configs of ``smalti data curate`` and ``smalti data tokenize``."""

import re
from typing import Literal, Self

from pydantic import Field, model_validator

from smalti.config.schema import Config, Duration, Real, Whole, placement, split_duration


class StageConfig(Config):
    """A span of training with its own mixture."""

    until: Duration = "1run"
    """Where the stage ends: ``0.8run``, ``400step`` or ``1e9tok``, counted from the start of the run."""
    weights: dict[str, Real] = Field(min_length=1)
    """Share of each source by name; any positive numbers, only their ratios count. Absent sources get none."""

    @model_validator(mode="after")
    def _weights_positive(self) -> Self:
        for name, weight in self.weights.items():
            if not 0 < weight < float("inf"):
                raise ValueError(f"weight of '{name}' is {weight}; it must be above 0 (leave the source out for none)")
        return self


class DataConfig(Config):
    """Which tokens, in which mixture, cut into which sequences."""

    sources: dict[str, str] = Field(min_length=1)
    """Name -> folder of token files (as written by ``smalti data tokenize``)."""
    tokenizer: str | None = placement(None)
    """Folder of the tokenizer that wrote them; it is checked and copied into the run, so that the model can be exported
    with it. Absent: the run trains, but has no tokenizer to export."""
    seq_len: Whole = Field(ge=2)
    """Tokens in a sequence."""
    stages: tuple[StageConfig, ...] = Field(min_length=1)
    """The mixture over time; the last stage ends with the run."""
    heldout: dict[str, str] = Field(default_factory=dict)
    """Name -> folder of token files that are never trained on; measured in the loop and by ``smalti eval``."""
    mask_documents: bool = True
    """Attention stays inside a document; false lets a sequence see all that stands before."""
    prefetch_steps: Whole = placement(2, ge=0)
    """Batches read ahead of the step, in a thread."""

    @model_validator(mode="after")
    def _names_known(self) -> Self:
        for name in (*self.sources, *self.heldout):
            if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", name):
                raise ValueError(
                    f"source '{name}' cannot be a part of a metric's name; use letters, digits, '.', '_' and '-'"
                )
        for index, stage in enumerate(self.stages):
            unknown = sorted(set(stage.weights) - set(self.sources))
            if unknown:
                raise ValueError(
                    f"stage {index} weighs '{unknown[0]}', which is not a source; sources: {', '.join(self.sources)}"
                )
        used = {name for stage in self.stages for name in stage.weights}
        unused = sorted(set(self.sources) - used)
        if unused:
            raise ValueError(f"source '{unused[0]}' has no weight in any stage, so it would have no effect")
        if split_duration(self.stages[-1].until) != (1.0, "run"):
            raise ValueError(f"the last stage ends at '{self.stages[-1].until}'; it must end at '1run'")
        return self


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
"""The names of the rule presets; what they hold stands in ``smalti/data/curate/rules``."""

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
    output: str
    """Local folder that receives ``documents/``, ``drops/``, ``report.json`` and ``report.md``; replaced by a rerun."""
    heldout_frac: Real = Field(0.05, ge=0, lt=0.5)
    """Share of groups (files) set aside before anything is learned."""
    group_field: str | None = None
    """The field by which held-out documents are chosen (all documents of a group fall on one side, over all sources);
    absent: the id. Files of text have no fields: their group is their path."""
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

    documents: str
    """The output folder of ``smalti data curate``."""
    output: str
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
                raise ValueError(f"{name} has no effect on a tokenizer that is loaded ('{self.tokenizer}')")
        return self
