"""Compiles the mixture of a config (stages, ramps and batch sizes) to spans with whole-number weights.

Guarantees: weights are rounded by largest remainder, and never to zero; a weight that is a short decimal or a ratio of
small numbers is exact. Each span is compiled by itself, so later spans do not change earlier ones.
"""

from collections.abc import Mapping, Sequence
from fractions import Fraction
from itertools import pairwise
from math import floor, gcd, lcm
from typing import NamedTuple

from smalti.base.errors import UserError
from smalti.config.data import DataConfig, StageConfig
from smalti.config.durations import RunLength
from smalti.data.order.spans import Span

RAMP_SPANS = 64
"""Number of spans of a stage whose weights change linearly (at most one per step)."""
_REPEAT_STEPS = 1024
"""Maximum number of steps after which an exact mixture must repeat."""
_PARTS = 1 << 16
"""A mixture that is not exact is rounded to at least this many parts, or to fewer so that it repeats within
``_REPEAT_STEPS``."""
_MIN_REPEAT_STEPS = 64
"""Minimum number of steps in which a mixture that is not exact repeats: a source's share of a step is rounded to a
multiple of 1/64 of a sequence, or finer, in large batches too."""
_RAMP_REPEAT_STEPS = 256
"""``_REPEAT_STEPS`` of the spans of a ramp."""
_RAMP_PARTS = 1 << 14
"""``_PARTS`` of the spans of a ramp, which are many and approximate a line anyway."""


class _StageSpan(NamedTuple):
    """Steps of a stage with the same batch and weights; the next span begins where it ends."""

    start_step: int
    rows: int
    seq_len: int
    weights: dict[str, int]
    stage: int
    """Index in ``data.stages``."""


def compile_spans(data: DataConfig, length: RunLength, sources: Sequence[str], *, from_step: int = 0) -> list[Span]:
    """Return the spans of a run from a step on, in order; the weights of each sum to the same unit.

    Stages end at whole steps (the nearest). Raises UserError for a stage without a step, for one that ends beyond the
    run, and for a global batch that is not whole sequences.
    """
    spans: list[_StageSpan] = []
    begin = 0
    for index, stage in enumerate(data.stages):
        end = _end_step(index, stage, begin, length)
        seq_len = data.seq_lens[index]
        ramp = dict(_ramp(stage, begin, end))
        exact: dict[str, Fraction] = {}
        starts = sorted({*ramp, *(start for start, _ in length.batches if begin < start < end)})
        for start, stop in zip(starts, [*starts[1:], end], strict=True):
            exact = ramp.get(start, exact)
            if stop > from_step:
                first = max(start, from_step)
                rows = _rows(length.batch_tokens(first), seq_len, index)
                parts = parts_of(exact, rows, ramp=stage.weights_end is not None)
                spans.append(_StageSpan(first, rows, seq_len, quantise(exact, parts), index))
        begin = end
    unit = lcm(*(sum(span.weights.values()) for span in spans))
    return [
        Span(span.start_step, span.rows, span.seq_len, _scaled(span.weights, sources, unit), span.stage)
        for span in spans
    ]


def parts_of(shares: Mapping[str, Fraction], rows: int, *, ramp: bool = False) -> int:
    """Return the number of parts that express ``shares``: exactly if a batch of ``rows`` then repeats soon, else a
    multiple of ``rows``."""
    parts, repeat_steps = (_RAMP_PARTS, _RAMP_REPEAT_STEPS) if ramp else (_PARTS, _REPEAT_STEPS)
    exact = lcm(*(share.denominator for share in shares.values()))
    whole = (rows * share.numerator * (exact // share.denominator) for share in shares.values())
    if exact // gcd(exact, *whole) <= repeat_steps:
        return exact
    return rows * min(max(-(-parts // rows), _MIN_REPEAT_STEPS), repeat_steps)


def quantise(weights: Mapping[str, float | Fraction], unit: int) -> dict[str, int]:
    """Round weights to whole numbers that sum to ``unit``, by largest remainder, at least 1 (ties: earlier name)."""
    if len(weights) > unit:
        raise UserError(f"{len(weights):,} sources are too many for one stage", allowed=f"at most {unit:,}")
    exact = fractions(weights)
    floors = {name: max(1, floor(share * unit)) for name, share in exact.items()}
    rest = {name: exact[name] * unit - floors[name] for name in exact}
    missing = unit - sum(floors.values())
    for name in sorted(exact, key=lambda name: (-rest[name], name))[: max(missing, 0)]:
        floors[name] += 1
    while missing < 0:
        # Raising shares to 1 overshot the unit: take from the source rounded up the most.
        most_over = max(
            (name for name in floors if floors[name] > 1), key=lambda name: (floors[name] - exact[name] * unit, name)
        )
        floors[most_over] -= 1
        missing += 1
    return floors


def fractions(weights: Mapping[str, float | Fraction]) -> dict[str, Fraction]:
    """Convert weights to exact shares that sum to 1."""
    # str returns the decimal of the config: 0.1 is a tenth, not 3602879701896397 / 2**55
    parts = {name: Fraction(str(weight)) for name, weight in weights.items() if weight}
    total = sum(parts.values())
    return {name: part / total for name, part in parts.items()}


def _ramp(stage: StageConfig, begin: int, end: int) -> list[tuple[int, dict[str, Fraction]]]:
    """Return (first step, exact shares) of the parts of a stage: one part, or the steps of a linear ramp."""
    first = fractions(stage.weights)
    if stage.weights_end is None:
        return [(begin, first)]
    last = fractions(stage.weights_end)
    steps = end - begin
    n = min(RAMP_SPANS, steps)
    cuts = [begin + steps * part // n for part in range(n + 1)]
    parts = []
    for start, stop in pairwise(cuts):
        progress = Fraction(start + stop - 2 * begin, 2 * steps)
        names = sorted({*first, *last})
        parts.append(
            (start, {name: (1 - progress) * first.get(name, 0) + progress * last.get(name, 0) for name in names})
        )
    return parts


def _end_step(index: int, stage: StageConfig, begin: int, length: RunLength) -> int:
    end = length.step_at(stage.until)
    if not begin < end <= length.total_steps:
        raise UserError(
            f"data.stages[{index}] ends at '{stage.until}', which is step {end:,}; it begins at step {begin:,}",
            allowed=f"an end after step {begin:,} and not after the last step, {length.total_steps:,}",
            hint=f"give data.stages[{index}].until {'a later' if end <= begin else 'an earlier'} end, "
            "or make the run longer (train.duration)",
        )
    return end


def _rows(batch_tokens: int, seq_len: int, stage: int) -> int:
    if batch_tokens % seq_len:
        raise UserError(
            f"the global batch of {batch_tokens:,} tokens in data.stages[{stage}] is not a multiple of its seq_len",
            allowed=f"a multiple of {seq_len:,}",
            hint=f"train.global_batch_tokens={max(1, round(batch_tokens / seq_len)) * seq_len}",
        )
    return batch_tokens // seq_len


def _scaled(weights: Mapping[str, int], sources: Sequence[str], unit: int) -> tuple[int, ...]:
    factor = unit // sum(weights.values())
    return tuple(weights.get(name, 0) * factor for name in sources)
