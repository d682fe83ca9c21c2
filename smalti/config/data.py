"""The ``data:`` section of a run: which tokens, in which mixture and order, read from where."""

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
    """One source: where its tokens lie and in which form. A plain path stands for ``{path: PATH}``."""

    path: Place = placement()
    """Folder or URL (``s3://``, ``gs://``, ``az://``, ``https://``, ``hf://``). What lies there is named by its digest,
    so the same data may move."""
    mirrors: tuple[Place, ...] = placement(())
    """Copies of the same folder, asked in this order when ``path`` does not answer."""
    format: Literal["auto", FormatName] = "auto"
    """Who wrote it; auto: told by the files."""
    column: str | None = None
    """Of ``mds``: the column that holds the tokens (absent: the only one that can); of ``text``: the one that holds the
    text (absent: ``text``)."""
    dtype: TokenDtype | None = None
    """Numbers in files that do not say it: ``raw`` without a header, ``mds`` with a column of plain bytes."""
    files: tuple[str, ...] = ()
    """Of ``raw``, ``megatron`` and ``text``: which files below ``path``, in this order (``megatron``: without their
    ``.bin``); locally also patterns (``*.npy``), each in sorted order. In a store all must be named: nothing is
    listed."""
    eod_id: Whole | None = Field(None, ge=0, lt=1 << 32)
    """The token that closes a document, in forms that do not say it."""
    vocab_size: Whole | None = Field(None, ge=1, le=1 << 32)
    """Ids must lie below, in forms that do not say it: checked wherever tokens are read; up to 65,536 a token takes 2
    bytes in memory."""
    document_ends: str | None = None
    """Of ``raw``: a file named as the token file with this at its end (datatrove: ``.index``) holds the ends of its
    documents, in tokens, as 8-byte numbers."""

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
        """A section that says no more than its path is written as the path."""
        return self.path if self == SourceConfig(path=self.path) else full(self)


def _source(value: Any) -> Any:
    return {"path": value} if isinstance(value, str) else value


Source = Annotated[SourceConfig, BeforeValidator(_source)]


class StageConfig(Config):
    """A span of training with its own mixture."""

    until: Duration = "1run"
    """Where the stage ends: ``0.8run``, ``400step`` or ``1e9tok``, counted from the start of the run."""
    weights: dict[str, Real] = Field(min_length=1)
    """Share of each source by name; any positive numbers, only their ratios count. Absent sources get none."""
    weights_end: dict[str, Real] | None = Field(None, min_length=1)
    """Weights at the end of the stage, reached in a straight line; absent: they stay as they are."""
    seq_len: Whole | None = Field(None, ge=2)
    """Tokens in a sequence of this stage; absent: ``data.seq_len``. A change starts every source's order anew."""

    @model_validator(mode="after")
    def _weights_make_sense(self) -> Self:
        ends = [self.weights] if self.weights_end is None else [self.weights, self.weights_end]
        for weights in ends:
            for name, weight in weights.items():
                if weight < 0 or not any(end.get(name) for end in ends):
                    what = f"{weight}" if weight < 0 or len(ends) == 1 else "0 at both ends of the stage"
                    raise ValueError(
                        f"weight of '{name}' is {what}; it must be above 0 (leave the source out for none)"
                    )
            if not any(weights.values()):
                raise ValueError("all weights are 0 at one end of the stage; one must be above")
        return self

    @property
    def names(self) -> set[str]:
        """Sources that the stage reads."""
        return {*self.weights, *(self.weights_end or {})}


class PastConfig(PastLength):
    """What a fork left behind: the schedule that the steps before ``at_step`` were learned by."""

    seq_len: Whole = Field(ge=2)
    """``data.seq_len`` until then."""
    stages: tuple[StageConfig, ...] = Field(min_length=1)
    """``data.stages`` until then; what they say of later steps was never learned."""
    skip: tuple[tuple[Whole, Whole], ...] = ()
    """``data.skip`` until then."""
    lr: Real = Field(gt=0)
    """``train.optimizer.lr`` until then."""
    schedule: ScheduleConfig = ScheduleConfig()
    """``train.schedule`` until then."""
    digest: str = ""
    """Names the future that the run had then; its newest checkpoint carries it."""
    accepted: str = ""
    """Names the data of the future that the fork gave it instead; until a checkpoint carries that, no other will do."""
    order_continues: bool = False
    """The order of the data is that of the later config from the first step on, which the steps until then agree with;
    false: shares of sources are counted anew from the fork, as by versions that did not know this field."""


class ShuffleConfig(Config):
    """How far the order mixes a source."""

    mode: Literal["full", "window"] = "full"
    """``full``: any sequence of the source may stand anywhere. ``window``, for disks that cannot seek: chunks of
    neighbouring sequences are shuffled, and sequences within a window of chunks."""
    chunk_tokens: Whole = Field(524_288, ge=1)
    """Tokens that lie together on disk and are read together, in window mode."""
    window_chunks: Whole = Field(64, ge=2)
    """Chunks among whose sequences the order mixes, in window mode."""

    @model_validator(mode="after")
    def _options_have_an_effect(self) -> Self:
        for name in ("chunk_tokens", "window_chunks"):
            if self.mode == "full" and getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(f"shuffle.{name} has no effect with shuffle.mode=full; shuffle.mode=window uses it")
        return self


class FetchConfig(Config):
    """How bytes are read from a store over a network; local folders use none of it but ``prefetch``."""

    prefetch: WallTime = placement("10s")
    """Seconds of training that are read ahead."""
    prefetch_bytes: Whole = placement(1 << 30, ge=1)
    """At most this much is read ahead on one rank."""
    concurrency: Whole = placement(32, ge=1)
    """Requests under way at one time on one rank."""
    requests_per_s: Real = placement(1000.0, gt=0)
    """Requests that the whole job starts in a second, over all ranks."""
    timeout: WallTime = placement("20s")
    """A request without an answer for so long has failed."""
    give_up: WallTime = placement("10min")
    """A range that no mirror has given for so long ends the attempt."""
    cache: str | None = placement(None)
    """Local folder that keeps what was read, for all ranks of a node; absent: nothing is kept."""
    cache_bytes: Whole = placement(100 << 30, ge=1)
    """The oldest files of the cache go when it holds more."""

    @model_validator(mode="after")
    def _options_have_an_effect(self) -> Self:
        if self.cache is None and self.cache_bytes != type(self).model_fields["cache_bytes"].default:
            raise ValueError("fetch.cache_bytes has no effect without fetch.cache=FOLDER")
        return self


class DataConfig(Config):
    """Which tokens, in which mixture, cut into which sequences."""

    sources: dict[str, Source] = Field(min_length=1)
    """Name -> folder of token files (as written by ``smalti data tokenize``), or a section with ``path`` and more."""
    tokenizer: str | None = placement(None)
    """Folder of the tokenizer that wrote them; it is checked and copied into the run, so that the model can be exported
    with it. Absent: the run trains, but has no tokenizer to export."""
    seq_len: Whole = Field(ge=2)
    """Tokens in a sequence; held-out loss in the loop is measured at this length, whatever a stage has."""
    stages: tuple[StageConfig, ...] = Field(min_length=1)
    """The mixture over time; the last stage ends with the run."""
    shuffle: ShuffleConfig = ShuffleConfig()
    """How far the order mixes a source."""
    packing: Literal["concat", "best-fit"] = "concat"
    """How sequences are cut: ``concat`` chops documents one after another; ``best-fit`` splits no document that fits
    into a sequence (from an index that ``smalti data pack`` writes)."""
    skip: tuple[tuple[Whole, Whole], ...] = ()
    """Spans of positions [begin, end) whose sequences are left out; what follows moves up, the mixture stays exact.
    They apply in the order listed, each to the positions that the ones before leave: ``[[0, 100], [0, 100]]`` leaves
    out the first 200, and spans that overlap are not a union. So a later skip is added at the end, in the positions
    that the run has by then."""
    takedowns: Place | None = placement(None)
    """A file of documents that must not be learned: lines of JSON with ``source`` and ``document``. The file may lie
    anywhere; another set of documents is another future, for ``--fork`` to accept."""
    history: tuple[PastConfig, ...] = ()
    """Written by ``smalti train --fork``, not by hand: by which schedule the first steps were learned."""
    heldout: dict[str, Place] = Field(default_factory=dict)
    """Name -> folder of token files that are never trained on; measured in the loop and by ``smalti eval``."""
    retain: dict[str, Real] = placement({})
    """Of a run with ``init_from``: held-out sets of what its model knew already -> by which share their bits per byte
    may rise until the run warns (0.02: 2 %). The other held-out sets are what it learns anew."""
    mask_documents: bool = True
    """Attention stays inside a document; false lets a sequence see all that stands before."""
    fetch: FetchConfig = FetchConfig()
    """Reading ahead, and from stores over a network."""

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
            raise ValueError(f"at_step of data.history is {steps[1:]}; each fork must lie behind the one before")
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
                    f"data.retain names '{name}', which is not held out",
                    allowed=f"names of data.heldout: {', '.join(self.heldout) or 'there are none'}",
                    hint=f"data.heldout.{name}=FOLDER names its token files",
                )
            if not 0 < allowed_frac <= 1:
                raise NotAllowed(
                    f"data.retain.{name} is {allowed_frac:g}",
                    allowed="a share above 0, at most 1",
                    hint=f"data.retain.{name}={allowed_frac / 100 if allowed_frac > 1 else 0.02:g} is "
                    f"{allowed_frac if allowed_frac > 1 else 2:g} %",
                )
        return self

    @model_validator(mode="after")
    def _names_known(self) -> Self:
        for name in (*self.sources, *self.heldout):
            if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", name):
                raise ValueError(
                    f"source '{name}' cannot be a part of a metric's name; use letters, digits, '.', '_' and '-'"
                )
        for index, stage in enumerate(self.stages):
            unknown = sorted(stage.names - set(self.sources))
            if unknown:
                name = unknown[0]
                raise NotAllowed(
                    f"stage {index} weighs '{name}', which is not a source",
                    allowed=f"names of data.sources: {', '.join(self.sources)}",
                    hint=f"data.stages.{index}.weights.{name}=null takes the weight out; a recipe that takes '{name}' "
                    "out of its base writes its own data.stages",
                )
        gone = sorted(_names(past.stages for past in self.history) - set(self.sources))
        if gone:
            raise ValueError(f"source '{gone[0]}' was learned before a fork, so it must stay among data.sources")
        if split_duration(self.stages[-1].until) != (1.0, "run"):
            raise ValueError(f"the last stage ends at '{self.stages[-1].until}'; it must end at '1run'")
        return self

    def require_every_source_used(self) -> None:
        """UserError for a source that no stage weighs. Not a validator: a recipe may still name what only the past of
        a forked run read, and the run folder alone knows that."""
        unused = sorted(set(self.sources) - _names([self.stages, *(past.stages for past in self.history)]))
        if unused:
            raise UserError(
                f"source '{unused[0]}' has no weight in any stage, so it would have no effect",
                allowed="sources that data.stages weigh",
                hint=f"take data.sources.{unused[0]} out, or give it a weight",
            )

    def before_fork(self) -> tuple["DataConfig", RunLength]:
        """The config as it was before the last fork of ``history``, and the length that the run had."""
        past, earlier = self.history[-1], self.history[:-1]
        names = _names([past.stages, *(one.stages for one in earlier)])
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
        """Tokens in a sequence, stage by stage."""
        return tuple(stage.seq_len or self.seq_len for stage in self.stages)


def _names(every_stages: Iterable[Iterable[StageConfig]]) -> set[str]:
    return {name for stages in every_stages for stage in stages for name in stage.names}
