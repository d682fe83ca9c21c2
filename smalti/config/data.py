"""The ``data:`` section of a run: sources, mixture, order, and how they are read."""

import re
from collections.abc import Iterable
from itertools import pairwise
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, SerializerFunctionWrapHandler, model_serializer, model_validator

from smalti.base.errors import UserError
from smalti.config.durations import PastLength, RunLength
from smalti.config.places import Place
from smalti.config.schema import Config, Duration, NotAllowed, Real, WallTime, Whole, placement, split_duration
from smalti.config.token_formats import FORMATS, FormatName
from smalti.config.train import ScheduleConfig

TokenDtype = Literal["uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"]


class SourceConfig(Config):
    """A source: the place and format of its tokens. A plain path is short for ``{path: PATH}``."""

    path: Place = placement()
    """Folder or URL (``s3://``, ``gs://``, ``az://``, ``https://``, ``hf://``). The data is identified by its digest,
    so it may be moved."""
    mirrors: tuple[Place, ...] = placement(())
    """Copies of the same folder, tried in this order when ``path`` does not respond."""
    format: Literal["auto", FormatName] = "auto"
    """Format of the files; auto: detected."""
    column: str | None = None
    """For ``mds``: column with the tokens (absent: the only possible one); for ``text``: column with the text (absent:
    ``text``)."""
    dtype: TokenDtype | None = None
    """Type of the tokens in files that do not record it: ``raw`` without a header, ``mds`` with a column of plain
    bytes."""
    files: tuple[str, ...] = ()
    """For ``raw``, ``megatron`` and ``text``: files below ``path``, in this order (``megatron``: without ``.bin``); in
    a local folder also patterns (``*.npy``), each sorted. In an object store every file must be named."""
    eod_id: Whole | None = Field(None, ge=0, lt=1 << 32)
    """Id of the token that ends a document, for formats that do not record it."""
    vocab_size: Whole | None = Field(None, ge=1, le=1 << 32)
    """Upper bound of the ids, for formats that do not record it; checked when tokens are read. Up to 65,536 a token
    takes 2 bytes in memory."""
    document_ends: str | None = None
    """For ``raw``: suffix of the file beside each token file that holds the ends of its documents, in tokens, as 8-byte
    integers (datatrove: ``.index``)."""

    @model_validator(mode="after")
    def _options_have_an_effect(self) -> Self:
        if self.format != "auto":
            self.check_format(self.format)
        return self

    def check_format(self, name: FormatName) -> None:
        """Raise ValueError for an option that has no effect in the format ``name``."""
        for option in sorted({option for traits in FORMATS.values() for option in traits.options}):
            is_given = getattr(self, option) != type(self).model_fields[option].default
            if is_given and option not in FORMATS[name].options:
                allowed = ", ".join(other for other, traits in FORMATS.items() if option in traits.options)
                raise ValueError(f"{option} has no effect with format={name}; it is for {allowed}")

    @model_serializer(mode="wrap")
    def _short(self, full: SerializerFunctionWrapHandler) -> Any:
        """Write a section that has only a path as that path."""
        return self.path if self == SourceConfig(path=self.path) else full(self)


def _source(value: Any) -> Any:
    return {"path": value} if isinstance(value, str) else value


Source = Annotated[SourceConfig, BeforeValidator(_source)]


class StageConfig(Config):
    """A span of training with its own mixture."""

    until: Duration = "1run"
    """End of the stage: ``0.8run``, ``400step`` or ``1e9tok``, counted from the start of the run."""
    weights: dict[str, Real] = Field(min_length=1)
    """Source -> weight; only the ratios matter. A source that is not listed is not used."""
    weights_end: dict[str, Real] | None = Field(None, min_length=1)
    """Weights at the end of the stage, reached linearly; absent: constant weights."""
    seq_len: Whole | None = Field(None, ge=2)
    """Tokens in each sequence of this stage; absent: ``data.seq_len``. A change restarts the order of every source."""

    @model_validator(mode="after")
    def _weights_make_sense(self) -> Self:
        ends = [self.weights] if self.weights_end is None else [self.weights, self.weights_end]
        for weights in ends:
            for name, weight in weights.items():
                if weight < 0 or not any(end.get(name) for end in ends):
                    what = f"{weight}" if weight < 0 or len(ends) == 1 else "0 at both ends of the stage"
                    raise ValueError(f"weight of '{name}' is {what}; it must be above 0; remove the source instead")
            if not any(weights.values()):
                raise ValueError("all weights are 0 at one end of the stage; at least one must be above 0")
        return self

    @property
    def names(self) -> set[str]:
        """Names of the sources that the stage uses."""
        return {*self.weights, *(self.weights_end or {})}


class PastConfig(PastLength):
    """The schedule of the steps before a fork."""

    seq_len: Whole = Field(ge=2)
    """``data.seq_len`` until then."""
    stages: tuple[StageConfig, ...] = Field(min_length=1)
    """``data.stages`` until then; their later steps were never trained."""
    skip: tuple[tuple[Whole, Whole], ...] = ()
    """``data.skip`` until then."""
    lr: Real = Field(gt=0)
    """``train.optimizer.lr`` until then."""
    schedule: ScheduleConfig = ScheduleConfig()
    """``train.schedule`` until then."""
    digest: str = ""
    """Digest of the data schedule until then; the newest checkpoint has it."""
    accepted: str = ""
    """Digest of the data schedule after the fork; required until a checkpoint has it."""
    order_continues: bool = False
    """true: the data order is that of the later config from the first step on; false: shares of sources are counted
    from the fork on, as by versions without this field."""


class ShuffleConfig(Config):
    """How the sequences of a source are shuffled."""

    mode: Literal["full", "window"] = "full"
    """``full``: over the whole source. ``window``, for disks with slow seeks: chunks of neighbouring sequences are
    shuffled, and sequences within a window of chunks."""
    chunk_tokens: Whole = Field(524_288, ge=1)
    """Tokens in each chunk, which is read at once, in window mode."""
    window_chunks: Whole = Field(64, ge=2)
    """Number of chunks whose sequences are shuffled together, in window mode."""

    @model_validator(mode="after")
    def _options_have_an_effect(self) -> Self:
        for name in ("chunk_tokens", "window_chunks"):
            if self.mode == "full" and getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(f"shuffle.{name} has no effect with shuffle.mode=full; shuffle.mode=window uses it")
        return self


class FetchConfig(Config):
    """How data is read from stores over a network; local folders use only ``prefetch``."""

    prefetch: WallTime = placement("10s")
    """Duration of training whose data is read ahead."""
    prefetch_bytes: Whole = placement(1 << 30, ge=1)
    """Maximum of bytes read ahead on each rank."""
    concurrency: Whole = placement(32, ge=1)
    """Maximum of concurrent requests on each rank."""
    requests_per_s: Real = placement(1000.0, gt=0)
    """Maximum rate of requests, in requests per second over all ranks."""
    timeout: WallTime = placement("20s")
    """Time without a response after which a request has failed."""
    give_up: WallTime = placement("10min")
    """Time after which a range that no mirror has returned ends the attempt."""
    cache: str | None = placement(None)
    """Local folder that caches the data, shared by the ranks of a node; absent: no cache."""
    cache_bytes: Whole = placement(100 << 30, ge=1)
    """Maximum size of the cache in bytes; beyond it the oldest files are deleted."""

    @model_validator(mode="after")
    def _options_have_an_effect(self) -> Self:
        if self.cache is None and self.cache_bytes != type(self).model_fields["cache_bytes"].default:
            raise ValueError("fetch.cache_bytes has no effect without fetch.cache=FOLDER")
        return self


class DataConfig(Config):
    """Sources, mixture, and how tokens are cut into sequences."""

    sources: dict[str, Source] = Field(min_length=1)
    """Name -> folder of token files (written by ``smalti data tokenize``), or a section with ``path`` and options."""
    tokenizer: str | None = placement(None)
    """Folder of the tokenizer of the token files; it is checked and copied into the run for the export. Absent: the run
    trains, but exports no tokenizer."""
    seq_len: Whole = Field(ge=2)
    """Tokens in each sequence. Held-out loss is measured at this length in every stage."""
    stages: tuple[StageConfig, ...] = Field(min_length=1)
    """The mixture over time; the last stage ends with the run (``1run``)."""
    shuffle: ShuffleConfig = ShuffleConfig()
    """How the sequences of a source are shuffled."""
    packing: Literal["concat", "best-fit"] = "concat"
    """How sequences are filled: ``concat`` cuts the concatenated documents; ``best-fit`` splits no document that fits
    into a sequence, and needs an index written by ``smalti data pack``."""
    skip: tuple[tuple[Whole, Whole], ...] = ()
    """Spans of positions [begin, end) whose sequences are skipped; later sequences move up, and the mixture stays
    exact. Spans apply in the order listed, each to the positions that the earlier ones leave: ``[[0, 100], [0, 100]]``
    skips the first 200. So append a later skip at the end, in the positions that the run has by then."""
    takedowns: Place | None = placement(None)
    """JSON-lines file of documents that must not be trained on, with ``source`` and ``document``. The file may be
    moved; another set of documents changes the run and needs ``--fork``."""
    history: tuple[PastConfig, ...] = ()
    """Schedules before each fork, written by ``smalti train --fork``; not to be edited."""
    heldout: dict[str, Place] = Field(default_factory=dict)
    """Name -> folder of token files to measure held-out loss on, during training and by ``smalti eval``; never trained
    on."""
    retain: dict[str, Real] = placement({})
    """For a run with ``init_from``: held-out set of the old domain -> fraction by which its bits per byte may rise
    before the run warns (0.02 is 2 %). The other held-out sets are the new domain."""
    mask_documents: bool = True
    """Restrict attention to each document; false: a token attends to everything before it in the sequence."""
    fetch: FetchConfig = FetchConfig()
    """Reading ahead, and reading from stores over a network."""

    @model_validator(mode="after")
    def _skips_are_spans(self) -> Self:
        past = {f"data.history[{index}].skip": past.skip for index, past in enumerate(self.history)}
        for key, spans in {"data.skip": self.skip, **past}.items():
            for index, (begin, end) in enumerate(spans):
                if not 0 <= begin < end:
                    raise ValueError(f"{key}[{index}] is [{begin}, {end}]; it must be [begin, end), 0 <= begin < end")
        return self

    @model_validator(mode="after")
    def _history_fits(self) -> Self:
        steps = [0, *(past.at_step for past in self.history)]
        if any(later <= step for step, later in pairwise(steps)):
            raise ValueError(f"at_step of data.history is {steps[1:]}; each fork must be after the one before")
        for index, past in enumerate(self.history):
            total = RunLength.of(past, self.history[:index]).total_steps
            if past.at_step > total:
                raise ValueError(
                    f"data.history[{index}].at_step is {past.at_step:,}, but its run had {total:,} steps "
                    f"(duration {past.duration}); it must be at most that"
                )
        return self

    @model_validator(mode="after")
    def _retained_are_heldout(self) -> Self:
        for name, allowed_frac in self.retain.items():
            if name not in self.heldout:
                raise NotAllowed(
                    f"data.retain has '{name}', which is not in data.heldout",
                    allowed=f"names of data.heldout: {', '.join(self.heldout) or 'there are none'}",
                    hint=f"data.heldout.{name}=FOLDER names its token files",
                )
            if not 0 < allowed_frac <= 1:
                raise NotAllowed(
                    f"data.retain.{name} is {allowed_frac:g}",
                    allowed="a fraction above 0, at most 1",
                    hint=f"data.retain.{name}={allowed_frac / 100 if allowed_frac > 1 else 0.02:g} is "
                    f"{allowed_frac if allowed_frac > 1 else 2:g} %",
                )
        return self

    @model_validator(mode="after")
    def _names_known(self) -> Self:
        for name in (*self.sources, *self.heldout):
            if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", name):
                raise ValueError(
                    f"source '{name}' cannot be part of a metric name; use letters, digits, '.', '_' and '-'"
                )
        for index, stage in enumerate(self.stages):
            unknown = sorted(stage.names - set(self.sources))
            if unknown:
                name = unknown[0]
                raise NotAllowed(
                    f"stage {index} has a weight for '{name}', which is not in data.sources",
                    allowed=f"names of data.sources: {', '.join(self.sources)}",
                    hint=f"data.stages.{index}.weights.{name}=null removes the weight; a recipe that removes '{name}' "
                    "from its base must have its own data.stages",
                )
        gone = sorted(_names(past.stages for past in self.history) - set(self.sources))
        if gone:
            raise ValueError(f"source '{gone[0]}' was used before a fork, so it must remain in data.sources")
        if split_duration(self.stages[-1].until) != (1.0, "run"):
            raise ValueError(f"the last stage ends at '{self.stages[-1].until}'; it must end at '1run'")
        return self

    def require_every_source_used(self) -> None:
        """Raise UserError for a source without a weight in any stage.

        Not a validator: a recipe may name a source that only a forked run's past used, which the run folder records.
        """
        unused = sorted(set(self.sources) - _names([self.stages, *(past.stages for past in self.history)]))
        if unused:
            raise UserError(
                f"source '{unused[0]}' has no weight in any stage, so it would have no effect",
                allowed="sources with a weight in data.stages",
                hint=f"remove data.sources.{unused[0]}, or give it a weight",
            )

    def before_fork(self) -> tuple["DataConfig", RunLength]:
        """Return the config before the last fork of ``history``, and the length of the run then."""
        past, earlier = self.history[-1], self.history[:-1]
        names = _names(fork.stages for fork in self.history)
        changes = {
            "sources": {name: source for name, source in self.sources.items() if name in names},
            "seq_len": past.seq_len,
            "stages": past.stages,
            "skip": past.skip,
            "history": earlier,
        }
        return self.model_copy(update=changes), RunLength.of(past, earlier)

    @property
    def seq_lens(self) -> tuple[int, ...]:
        """Tokens in each sequence, stage by stage."""
        return tuple(stage.seq_len or self.seq_len for stage in self.stages)


def _names(every_stages: Iterable[Iterable[StageConfig]]) -> set[str]:
    return {name for stages in every_stages for stage in stages for name in stage.names}
