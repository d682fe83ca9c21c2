"""The ``data:`` section of a run, and the configs of ``smalti data curate`` and ``smalti data tokenize``."""

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


Preset = Literal["none", "prose-light", "code-light", "gopher-2021", "gopher-repetition-2021", "c4-2019",
                 "fineweb-code-0.01", "fineweb-paper-0.1"]


class CurateSourceConfig(Config):
    """One source of raw documents."""

    path: str
    """A folder of text, Markdown or code files, a JSONL file (also .gz, .zst), a Parquet file, or a folder of such."""
    text_field: str = "text"
    """The field that holds the text, in JSONL and Parquet."""
    id_field: str | None = None
    """The field that names the document; absent: file and row."""
    include: tuple[str, ...] = ()
    """Glob patterns of file names to take from a folder; empty takes every kind that is known."""
    rules: tuple[Preset, ...] = ("prose-light",)
    """Quality rules, as named presets; all of them must pass."""


class CurateConfig(Config):
    """Raw documents -> clean, unique documents, with every drop recorded."""

    sources: dict[str, CurateSourceConfig] = Field(min_length=1)
    """Name -> where the documents come from."""
    output: str
    """Folder that receives documents, drops and the report."""
    heldout_frac: Real = Field(0.05, ge=0, lt=0.5)
    """Share of groups (files) set aside before anything is learned."""
    group_field: str | None = None
    """The field by which held-out documents are chosen (all documents of a group fall on one side); absent: the id."""
    seed: Whole = 17
    """Chooses the held-out groups."""
    normalize: bool = True
    """Unicode NFC, line ends, control characters, trailing blanks."""
    dedup: Literal["exact", "none"] = "exact"
    """``exact``: of equal normalised texts the one with the smallest id stays, over all sources."""


class TokenizeConfig(Config):
    """Documents -> token files."""

    documents: str
    """The output folder of ``smalti data curate``."""
    output: str
    """Folder that receives ``tokenizer/`` and one folder of token files for each source and split."""
    tokenizer: str = "train"
    """``train`` a byte-level BPE on the training split, or the path of a ``tokenizer.json`` or a tiktoken rank file."""
    vocab_size: Whole = Field(4096, ge=260)
    """Size of a vocabulary that is trained here, special tokens included."""
    train_bytes: Whole = Field(50_000_000, ge=1)
    """At most this much text is read to train the tokenizer, spread over the sources."""
