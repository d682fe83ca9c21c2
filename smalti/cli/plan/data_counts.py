"""Counts for ``smalti plan data``: sizes of sources, sequences of stages, how a job reads.

Combines the schedule and the folders of ``data/`` with the arithmetic of ``plan/data.py``.
"""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from smalti.config.run import RunConfig
    from smalti.data.order.schedule import Schedule
    from smalti.data.sources.source import Source
    from smalti.plan.data import DataPlan, EpochCounts, Reading, SourceCounts, StageCounts

_BY_HAND_FILE_TOKENS = 1 << 28
"""Tokens in a file of a source that does not exist yet."""
_MAX_TOKENS = 10**18
"""A thousand times the estimated size of all text; more is taken for a typing error."""


def given_tokens(arguments: Sequence[str], config: "RunConfig") -> dict[str, int]:
    """Parse ``--tokens`` into source -> tokens. Raises UserError for unknown sources and invalid counts."""
    import yaml

    from smalti.base.errors import DataError, UserError, nearest

    values: dict[str, Any] = {}
    for argument in arguments:
        name, sign, value = argument.partition("=")
        if sign:
            values[name] = value
            continue
        if not Path(argument).is_file():
            raise DataError(
                f"--tokens {argument} is neither SOURCE=N nor a file",
                allowed="SOURCE=N, or a .yaml file of 'SOURCE: N' lines",
            )
        try:
            content = yaml.safe_load(Path(argument).read_text())
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            raise DataError(f"--tokens {argument} is not YAML: {error}") from error
        if not isinstance(content, dict):
            raise DataError(f"--tokens {argument} holds no 'SOURCE: N' lines")
        values.update(content)
    counts = {}
    for name, value in values.items():
        if name not in config.data.sources:
            near = nearest(str(name), config.data.sources)
            raise UserError(
                f"--tokens names '{name}', which is not a source",
                allowed=", ".join(config.data.sources),
                hint=f"--tokens {near}={value}" if near else None,
            )
        counts[name] = _count(name, value)
    return counts


def _count(name: str, value: Any) -> int:
    from smalti.base.errors import UserError
    from smalti.plan.quantities import parse_quantity

    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise UserError(f"--tokens {name}={value} is not a number", allowed="such as 464e9, 10b, 1.4T")
    return int(parse_quantity(f"--tokens {name}", value, (1, _MAX_TOKENS)).value)


def known_sources(config: "RunConfig", n_tokens: Mapping[str, int]) -> dict[str, "SourceCounts"]:
    """Return the sizes of each source: from ``n_tokens``, else from its folder (``make_plan`` adds the sequences).

    Raises DataError for a source with neither.
    """
    from smalti.data.tokens import format as layout
    from smalti.plan.data import SourceCounts

    counts = {}
    for name in sorted(config.data.sources):
        if name not in n_tokens:
            counts[name] = _from_folder(config, name)
            continue
        n = n_tokens[name]
        width = layout.token_bytes_for(config.model.vocab_size)
        files, rest = divmod(n, _BY_HAND_FILE_TOKENS)
        counts[name] = SourceCounts(
            name,
            n,
            token_bytes=width,
            stored_bytes=files * layout.file_bytes(_BY_HAND_FILE_TOKENS, width) + layout.file_bytes(rest, width),
            index_bytes=500 + 43 * (files + 1),  # a manifest: its fields, and a SHA-256 in base64 for each file
            block_bytes=layout.BLOCK_BYTES,
            payload_bytes=layout.PAYLOAD_BYTES,
        )
    return counts


def _from_folder(config: "RunConfig", name: str) -> "SourceCounts":
    from smalti.base.errors import DataError
    from smalti.data.sources.open import open_source, read_index

    source_config = config.data.sources[name]
    fetch = config.data.fetch
    tokenizer = config.data.tokenizer
    try:
        index = read_index(source_config, fetch, tokenizer=tokenizer)
        source = open_source(source_config, index, fetch, tokenizer=tokenizer)
        return counts_of(name, source, len(index))
    except DataError as error:
        raise DataError(
            f"data.sources.{name} = {source_config.path}: {error.message}",
            allowed=error.allowed,
            hint=f"give its size to smalti plan data: --tokens {name}=1e9",
        ) from error


def counts_of(name: str, source: "Source", index_bytes: int) -> "SourceCounts":
    """Return the counts of an opened source; what reading costs is only known for Smalti's token files."""
    from smalti.data.examples.source import ExampleSource
    from smalti.data.pack.examples import ExampleRows
    from smalti.data.tokens import TokenSource
    from smalti.data.tokens import format as layout
    from smalti.plan.data import EpochCounts, SourceCounts

    if isinstance(source, ExampleSource):
        opened = source

        def epoch_of(seq_len: int) -> EpochCounts:
            rows, record = ExampleRows(opened, seq_len, 0), opened.record
            targets = record.n_tokens - record.n_sequences
            return EpochCounts(rows.size, record.n_sequences / rows.size, 1 - targets / (rows.size * seq_len))

        return SourceCounts(name, source.n_tokens, digest=source.digest, layout_known=False, epoch_of=epoch_of)
    if not isinstance(source, TokenSource):
        return SourceCounts(name, source.n_tokens, digest=source.digest, layout_known=False)
    manifest = source.manifest
    return SourceCounts(
        name,
        source.n_tokens,
        token_bytes=source.dtype.itemsize,
        index_bytes=index_bytes,
        digest=source.digest,
        stored_bytes=sum(manifest.bytes_of_file(file) for file in range(manifest.n_files)),
        block_bytes=layout.BLOCK_BYTES,
        payload_bytes=layout.PAYLOAD_BYTES,
    )


def make_plan(config: "RunConfig", known: Mapping[str, "SourceCounts"], reading: "Reading") -> "DataPlan":
    """Return the plan of a run over sources of these sizes."""
    from smalti.base.errors import DataError
    from smalti.data.order.schedule import build_schedule
    from smalti.plan.data import plan_data

    schedule = build_schedule(config.data, config.length)
    ends = [*(segment.start_step for segment in schedule.segments[1:]), schedule.total_steps]
    taken = [schedule.counts(end, number).tolist() for number, end in enumerate(ends)]
    sources = []
    for k, name in enumerate(schedule.sources):
        # a source needs only the sequence lengths of the stages that read it
        seq_lens = [segment.seq_len if taken[number][k] else None for number, segment in enumerate(schedule.segments)]
        longest = max(filter(None, seq_lens), default=0)
        if known[name].n_tokens <= longest and known[name].epoch_of is None:
            raise DataError(
                f"source '{name}' has {known[name].n_tokens:,} tokens, less than one sequence",
                allowed=f"at least {longest + 1:,} tokens, for sequences of {longest:,}",
            )
        sources.append(replace(known[name], segments=tuple(_epoch(config, known[name], length) for length in seq_lens)))
    forks = [past.at_step for past in config.data.history]
    return plan_data(sources, stage_counts(schedule, forks=forks), reading)


def _epoch(config: "RunConfig", source: "SourceCounts", seq_len: int | None) -> "EpochCounts":
    """Count one epoch at a sequence length (None: not read). A source of ``--tokens`` counts as unpadded."""
    from smalti.data.pack import n_sequences
    from smalti.data.pack.index import PackRecord, read_record
    from smalti.plan.data import EpochCounts

    if seq_len is None:
        return EpochCounts(1)
    if source.epoch_of is not None:
        return source.epoch_of(seq_len)
    if config.data.packing == "concat" or source.digest is None:
        return EpochCounts(n_sequences(source.n_tokens, seq_len))
    path = config.data.sources[source.name].path
    record = PackRecord.parse(
        read_record(path, seq_len), path, source_digest=source.digest, source=path, seq_len=seq_len
    )
    return EpochCounts(record.n_rows, record.n_pieces / record.n_rows, record.padding_frac)


def stage_counts(schedule: "Schedule", *, forks: Sequence[int] = ()) -> list["StageCounts"]:
    """Return the stages of a schedule as counts.

    forks: the steps at which the run was forked; stages before the last of them are marked as past.
    """
    from smalti.plan.data import StageCounts

    ends = [*(span.start_step for span in schedule.spans[1:]), schedule.total_steps]
    stages = []
    for (future, number, seq_len), group in groupby(
        zip(schedule.spans, ends, strict=True),
        key=lambda pair: (bisect_right(forks, pair[0].start_step), pair[0].stage, pair[0].seq_len),
    ):
        past = "" if future == len(forks) else " (past)" if len(forks) == 1 else f" (past {future + 1})"
        spans = list(group)
        (first, _), (last, end_step) = spans[0], spans[-1]
        segment = schedule.segment(first.start_step)
        taken = schedule.counts(end_step, segment) - schedule.counts(first.start_step, segment)
        passed = schedule.ordinals_end(end_step, segment) - schedule.ordinals_end(first.start_step, segment)
        stages.append(
            StageCounts(
                name=f"{number}{past}",
                start_step=first.start_step,
                end_step=end_step,
                seq_len=seq_len,
                segment=segment,
                weights=tuple(Fraction(weight, schedule.unit) for weight in first.weights),
                weights_end=tuple(Fraction(weight, schedule.unit) for weight in last.weights),
                sequences=tuple(taken.tolist()),
                passed=tuple(passed.tolist()),
            )
        )
    return stages


def reading_of(config: "RunConfig") -> "Reading":
    """Return how a run reads, from its config; prices and latency are the defaults."""
    from smalti.plan.data import Reading

    return Reading(
        ranks=config.train.parallel.ranks,
        first_batch_sequences=config.length.batch_tokens(0) // config.data.seq_lens[0],
        concurrency=config.data.fetch.concurrency,
        requests_per_s=config.data.fetch.requests_per_s,
    )
