"""Data of a run: epochs and repeats of every source and stage, requests, bytes, dollars, start-up time.

It is computed from counts alone. Sequences and epochs are exact; requests are an upper bound, one for each range
(merged neighbours and caches lower it; for packed sequences it is a mean). Where a change of seq_len shuffles a source
anew, the number of repeated tokens is an expectation.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from fractions import Fraction
from typing import Any

REPEATS_HALF_LIFE = 15.387756
"""R*_D: repeats after which a repeated token has lost 1 - 1/e of its value. Muennighoff et al., "Scaling
Data-Constrained Language Models", JMLR 26(53), 2025 (arXiv 2305.16264), appendix A; fitted on models of up to 9B
parameters and 900B tokens."""

WORTH_FORMULA = "D' = U + U R* (1 - exp(-R_D / R*)), R* = 15.39, R_D = repeats of U tokens (Muennighoff et al. 2025)"

MANY_EPOCHS = 4
"""Up to here repeated tokens are almost as good as new ones (ibid., abstract)."""
TOO_MANY_EPOCHS = 16
"""R* repeats: by the formula the next repeat is worth 1/e of new tokens."""

GIB = 1 << 30


@dataclass(frozen=True)
class EpochCounts:
    """One epoch of a source, cut into sequences of one length."""

    sequences: int
    ranges_per_sequence: float = 1.0
    """More than 1 where a sequence is packed from pieces."""
    padding_frac: float = 0.0
    """Share of the sequences that is padding."""


@dataclass(frozen=True)
class SourceCounts:
    """Counts of a source, known before it is read."""

    name: str
    n_tokens: int
    """Tokens of all documents."""
    segments: tuple[EpochCounts, ...] = ()
    """Counts for each segment (a span of training with one seq_len)."""
    token_bytes: int = 2
    stored_bytes: int = 0
    index_bytes: int = 0
    """Bytes of the index, which is read once for the whole job."""
    block_bytes: int = 1
    """Bytes of the smallest unit of reading, with its checksum."""
    payload_bytes: int = 1
    """Bytes of tokens in a block."""
    digest: str | None = None
    """Digest of the source, for its pack index; None for a size given by hand."""
    layout_known: bool = True
    """False for foreign formats, whose bytes to read, and so the cost, are unknown."""
    epoch_of: Callable[[int], EpochCounts] | None = None
    """Maps a sequence length to the counts of an epoch, of examples, which are packed when they are opened."""


@dataclass(frozen=True)
class StageCounts:
    """Counts of one stage of the schedule; tuples are by source."""

    name: str
    start_step: int
    end_step: int
    seq_len: int
    segment: int
    weights: tuple[Fraction, ...]
    """Quantised weights at the beginning of the stage."""
    weights_end: tuple[Fraction, ...]
    """Weights at its end; equal to ``weights`` without a ramp."""
    sequences: tuple[int, ...]
    passed: tuple[int, ...] | None = None
    """``sequences`` plus those of ``data.skip``, which also advance in a source; None: nothing is skipped."""


@dataclass(frozen=True)
class Reading:
    """How a job reads, and the prices."""

    ranks: int
    first_batch_sequences: int
    """Sequences of all ranks."""
    concurrency: int
    """Concurrent requests of one rank."""
    requests_per_s: float
    """Limit of the whole job."""
    request_latency_s: float = 0.05
    usd_per_million_requests: float = 0.4
    """Defaults of this and the next: S3 Standard, us-east-1 (aws.amazon.com/s3/pricing, 2026)."""
    usd_per_gib_month: float = 0.023
    usd_per_gib_egress: float = 0.0
    """0 inside one region; about 0.09 out of S3."""


@dataclass(frozen=True)
class Share:
    """Part of one stage that comes from one source."""

    name: str
    weight: Fraction
    weight_end: Fraction
    sequences: int
    tokens: int
    epochs: float
    """Epochs of this stage alone."""
    epochs_after: float
    """Epochs of the run up to the end of this stage."""


@dataclass(frozen=True)
class StagePlan:
    """Plan of one stage."""

    name: str
    start_step: int
    end_step: int
    seq_len: int
    segment: int
    tokens: int
    shares: tuple[Share, ...]


@dataclass(frozen=True)
class SourcePlan:
    """Plan of one source over the whole run."""

    name: str
    n_tokens: int
    sequences: int
    tokens: int
    """Tokens taken, padding included."""
    share_frac: float
    """Share of all tokens of the run."""
    epochs: float
    """Epochs, including sequences of ``data.skip``."""
    taken_epochs: float
    """Epochs without sequences of ``data.skip``."""
    unique_frac: float
    """Share of the source that is seen at least once; an expectation where seq_len changes."""
    restart_tokens: float
    """Tokens repeated only because a change of seq_len shuffled the source anew before it was exhausted."""
    effective_tokens: float
    """Value of the taken tokens in new tokens, by ``WORTH_FORMULA``."""
    padding_frac: float
    requests: int | None
    """Number of requests; None, as for the next two: unknown."""
    read_bytes: int | None
    stored_bytes: int | None

    @property
    def worth_frac(self) -> float:
        """Value of a taken token relative to a new one."""
        taken = self.taken_epochs * self.n_tokens
        return self.effective_tokens / taken if taken else 1.0


@dataclass(frozen=True)
class DataPlan:
    """Plan of the data of a run; values that depend on the layout of a source are None if that is unknown."""

    tokens: int
    steps: int
    sources: tuple[SourcePlan, ...]
    stages: tuple[StagePlan, ...]
    index_requests: int | None
    index_bytes: int | None
    first_batch_s: float | None
    """Time from the first request to the first whole batch on every rank, with nothing cached."""
    tokens_per_s_limit: float | None
    """Speed that ``requests_per_s`` allows."""
    requests: int | None
    """Requests for sequences and indexes over the whole run."""
    read_bytes: int | None
    """Bytes of these requests."""
    stored_bytes: int | None
    """Stored bytes of all sources."""
    requests_usd: float | None
    egress_usd: float | None
    storage_usd_per_month: float | None

    @property
    def padding_frac(self) -> float:
        """Share of all tokens of the run that are padding."""
        return sum(source.tokens * source.padding_frac for source in self.sources) / self.tokens

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object with units in the names; weights are fractions, as they are used."""
        value = asdict(self)
        for stage in value["stages"]:
            stage["era"] = stage.pop("segment")  # the key that scripts read, as in 'smalti data explain --json'
            for share in stage["shares"]:
                share.update({key: str(share[key]) for key in ("weight", "weight_end")})
        for row, source in zip(value["sources"], self.sources, strict=True):
            row["worth_frac"] = source.worth_frac
        return {**value, "padding_frac": self.padding_frac, "worth_formula": WORTH_FORMULA}

    def above(self, epochs: float) -> tuple[SourcePlan, ...]:
        """Return the sources with more than ``epochs`` epochs."""
        return tuple(source for source in self.sources if source.epochs > epochs)

    def repeats_text(self, source: SourcePlan, epochs: float) -> str:
        """Return a line with the epochs of a source, and the stages in which it exceeds ``epochs``."""
        k = self.sources.index(source)
        details = []
        for stage in self.stages:
            alone, after = stage.shares[k].epochs, stage.shares[k].epochs_after
            if alone > epochs and len(self.stages) > 1:
                details.append(f"{alone:.2f} in stage {stage.name} alone")
            elif after > epochs >= after - alone:
                details.append(f"passes {epochs:g} in stage {stage.name}")
        return (
            f"source '{source.name}' is repeated for {source.epochs:.2f} epochs ({', '.join(details)}); "
            f"a token of it is worth {source.worth_frac:.0%} of a new one"
        )


def plan_data(sources: Sequence[SourceCounts], stages: Sequence[StageCounts], reading: Reading) -> DataPlan:
    """Plan a run whose stages take ``stages[i].sequences[k]`` sequences of ``sources[k]``."""
    planned = _stages(sources, stages)
    tokens = sum(stage.tokens for stage in planned)
    by_source = tuple(
        _source(
            source, [(stage.segment, stage.seq_len, stage.sequences[k], _passed(stage)[k]) for stage in stages], tokens
        )
        for k, source in enumerate(sources)
    )
    return DataPlan(
        tokens=tokens,
        steps=stages[-1].end_step,
        sources=by_source,
        stages=planned,
        **_costs(sources, by_source, min(stage.seq_len for stage in stages), reading),
    )


def _costs(
    sources: Sequence[SourceCounts], planned: Sequence[SourcePlan], shortest: int, reading: Reading
) -> dict[str, Any]:
    """Return the costs, which depend on the layout of the sources; None where a layout is unknown."""
    known = all(source.layout_known for source in sources)
    requests = len(sources) + sum(source.requests or 0 for source in planned)
    index_bytes = sum(source.index_bytes for source in sources)
    read_bytes = index_bytes + sum(source.read_bytes or 0 for source in planned)
    stored_bytes = sum(source.stored_bytes or 0 for source in planned)
    most_ranges = max(segment.ranges_per_sequence for source in sources for segment in source.segments)
    costs = {
        "index_requests": len(sources),
        "index_bytes": index_bytes,
        "first_batch_s": _first_batch_s(reading, most_ranges),
        "tokens_per_s_limit": shortest * reading.requests_per_s / most_ranges,
        "requests": requests,
        "read_bytes": read_bytes,
        "stored_bytes": stored_bytes,
        "requests_usd": requests / 1e6 * reading.usd_per_million_requests,
        "egress_usd": read_bytes / GIB * reading.usd_per_gib_egress,
        "storage_usd_per_month": stored_bytes / GIB * reading.usd_per_gib_month,
    }
    return costs if known else dict.fromkeys(costs)


def effective_tokens(n_tokens: float, epochs: float, unique_frac: float = 1.0) -> float:
    """Return ``WORTH_FORMULA`` for ``epochs`` of ``n_tokens``, of which the share ``unique_frac`` was seen."""
    unique_frac = min(unique_frac, epochs)
    if unique_frac <= 0:
        return 0.0
    repeats = epochs / unique_frac - 1
    return n_tokens * unique_frac * (1 + REPEATS_HALF_LIFE * -math.expm1(-repeats / REPEATS_HALF_LIFE))


def _stages(sources: Sequence[SourceCounts], stages: Sequence[StageCounts]) -> tuple[StagePlan, ...]:
    after = [0.0] * len(sources)
    planned = []
    for stage in stages:
        shares = []
        for k, source in enumerate(sources):
            epochs = _passed(stage)[k] / source.segments[stage.segment].sequences
            after[k] += epochs
            taken = stage.sequences[k]
            weights = stage.weights[k], stage.weights_end[k]
            shares.append(Share(source.name, *weights, taken, taken * stage.seq_len, epochs, after[k]))
        tokens = sum(share.tokens for share in shares)
        planned.append(
            StagePlan(stage.name, stage.start_step, stage.end_step, stage.seq_len, stage.segment, tokens, tuple(shares))
        )
    return tuple(planned)


def _passed(stage: StageCounts) -> tuple[int, ...]:
    return stage.sequences if stage.passed is None else stage.passed


def _source(source: SourceCounts, taken: Sequence[tuple[int, int, int, int]], run_tokens: int) -> SourcePlan:
    """Plan a source; ``taken``: (segment, seq_len, sequences, sequences with skipped ones) of each stage."""
    by_segment = [0.0] * len(source.segments)
    requests = read_bytes = padding = taken_epochs = 0.0
    for number, seq_len, n, passed in taken:
        segment = source.segments[number]
        by_segment[number] += passed / segment.sequences
        taken_epochs += n / segment.sequences
        requests += n * segment.ranges_per_sequence
        read_bytes += n * _sequence_bytes(source, segment, seq_len)
        padding += n * seq_len * segment.padding_frac
    epochs = sum(by_segment)
    # each segment shuffles anew, independently of the segments before it
    unique_frac = min(_seen_frac([part for part in by_segment if part]), taken_epochs)
    tokens = sum(seq_len * n for _, seq_len, n, _ in taken)
    return SourcePlan(
        name=source.name,
        n_tokens=source.n_tokens,
        sequences=sum(n for _, _, n, _ in taken),
        tokens=tokens,
        share_frac=tokens / run_tokens,
        epochs=epochs,
        taken_epochs=taken_epochs,
        unique_frac=unique_frac,
        restart_tokens=max(0.0, (min(taken_epochs, 1.0) - unique_frac) * source.n_tokens),
        effective_tokens=effective_tokens(source.n_tokens, taken_epochs, unique_frac),
        padding_frac=padding / tokens if tokens else 0.0,
        requests=math.ceil(requests) if source.layout_known else None,
        read_bytes=math.ceil(read_bytes) if source.layout_known else None,
        stored_bytes=source.stored_bytes if source.layout_known else None,
    )


def _seen_frac(parts: Sequence[float]) -> float:
    """Return the expected share of a source that independent orders of these epochs see; exact for one order."""
    if len(parts) < 2 or max(parts) >= 1:
        return min(sum(parts), 1.0)
    return -math.expm1(sum(math.log1p(-part) for part in parts))


def _sequence_bytes(source: SourceCounts, segment: EpochCounts, seq_len: int) -> float:
    """Return the expected bytes of the blocks of one sequence, whose ranges begin anywhere in a block."""
    wanted_bytes = ((1 - segment.padding_frac) * seq_len + segment.ranges_per_sequence) * source.token_bytes
    first_tokens = segment.ranges_per_sequence * source.token_bytes
    blocks = segment.ranges_per_sequence + max(0.0, wanted_bytes - first_tokens) / source.payload_bytes
    return blocks * source.block_bytes


def _first_batch_s(reading: Reading, ranges_per_sequence: float) -> float:
    """Return the seconds for the indexes, then for the ranges of a rank in rounds or within the job's request limit."""
    of_rank = -(-reading.first_batch_sequences // reading.ranks) * ranges_per_sequence
    rounds = math.ceil(of_rank / reading.concurrency)
    limit_s = reading.first_batch_sequences * ranges_per_sequence / reading.requests_per_s
    return reading.request_latency_s + max(rounds * reading.request_latency_s, limit_s)
