"""Seconds of one unit of work on one device, from its measurements or by the roofline of its published figures.

They are positive and never fall with the size of the work. What a whole step adds is in ``cost/step_time/step.py``.

``measured_s``: products by shape, the rate interpolated in log M, log K, log N; kernels by their elements and attention
by row and head width, seconds interpolated in the logarithm of both; beyond the largest size in proportion, below the
smallest the smallest's. ``compute_s`` and ``memory_s``, of published figures: the longer of FLOPs / rate and
bytes / bandwidth is the time (Williams et al. 2009, "Roofline").
"""

import itertools
import math
from bisect import bisect_right
from collections.abc import Sequence

from smalti.base.errors import UserError
from smalti.config.hardware import Hardware
from smalti.config.measured import Format, Measured
from smalti.cost.step_time.work import KINDS, Work
from smalti.cost.units import FORMAT_BYTES

FUSED_FRAC = 0.5
"""Bytes of elementwise kernels that torch.compile leaves: it keeps what a neighbour reads in registers (an estimate:
of the three numbers of an addition the one that was just written, and half of the others)."""

LAUNCH_S = 5e-6
"""A kernel that a GPU is given eagerly (CUDA's launch and PyTorch's dispatch; published figures are 3 to 10)."""

ASSUMED_FRAC = 0.75
"""Share of the peak that a large product reaches, for devices without a published figure."""


def bytes_of(work: Work, compute: Format) -> float:
    """Minimum bytes that one unit of work reads and writes."""
    size = 4 if work.fp32 else FORMAT_BYTES[compute]
    if work.kind in KINDS:
        kind = KINDS[work.kind]
        return work.elements * (kind.values * size + kind.fp32_values * 4)
    if work.kind.startswith("attention"):
        tokens, width, _ = work.shape
        return tokens * width * (4 if work.kind == "attention" else 8) * size  # q k v o; and do dq dk dv
    m, k, n = work.shape
    return (m * k + k * n + m * n) * size


def kernels_of(work: Work) -> float:
    """Launches of one work."""
    return KINDS[work.kind].kernels if work.kind in KINDS else work.launches


def compute_s(work: Work, hardware: Hardware, compute: Format) -> float:
    """FLOPs over what a large product reaches of the published peak."""
    flops = work.flops + work.again_flops
    if not flops:
        return 0.0
    return flops / (hardware.require_peak("fp32" if work.fp32 else compute) * (hardware.matmul_frac or ASSUMED_FRAC))


def memory_s(work: Work, hardware: Hardware, compute: Format, *, fused: bool = False) -> float:
    """Bytes over the bandwidth."""
    share = FUSED_FRAC if fused and work.kind in KINDS and KINDS[work.kind].fuses else 1.0
    return bytes_of(work, compute) * share / hardware.memory_bytes_per_s


def bound_of(work: Work, hardware: Hardware, compute: Format) -> str:
    """``compute``, ``memory`` or ``overhead``: what the time of one work goes to."""
    if hardware.measured is None:
        return "compute" if compute_s(work, hardware, compute) > memory_s(work, hardware, compute) else "memory"
    if work.kind not in KINDS:
        return "compute"
    table = hardware.measured.kernels["fp32" if work.fp32 else compute].get(work.kind)
    return "overhead" if table and curve(table, work.elements) < 2 * table[0][1] else "memory"


# ---- measured -------------------------------------------------------------------------------------------------------


def measured_s(work: Work, machine: Measured, compute: Format, *, threads: int | None = None) -> float:
    """Of one work alone; ``threads``: of the rank, where they are fewer than those that measured."""
    compute = "fp32" if work.fp32 else compute
    slower = max(1.0, machine.threads / threads) if threads else 1.0
    if work.kind in ("nt", "nn", "tn"):
        m, k, n = work.shape
        grid = machine.matmul[compute][work.kind]  # type: ignore[index]
        return float(2 * m * k * n / rate(grid, m, k, n) * slower)
    if work.kind.startswith("attention"):
        tokens, width, pairs = work.shape
        at = 2 if work.kind == "attention" else 3
        full_s = _attention_s(machine.attention[compute], tokens, width, at)
        return full_s * pairs / (tokens**2 / 2) * slower
    table = machine.kernels[compute].get(work.kind)
    if table is None:
        raise UserError(
            f"the measurement of this machine has no kernel '{work.kind}'",
            hint="measure again: smalti plan hardware this-machine --save machine.yaml",
        )
    alone = table[0][1]
    return alone + (curve(table, work.elements) - alone) * slower


def curve(points: Sequence[tuple[float, float]], at: float) -> float:
    """Seconds at a size, between the measured ones in the logarithm of both."""
    if at <= points[0][0]:
        return points[0][1]
    if at >= points[-1][0]:
        return points[-1][1] * at / points[-1][0]
    index = bisect_right([size for size, _ in points], at)
    (low, low_s), (high, high_s) = points[index - 1], points[index]
    position = math.log(at / low) / math.log(high / low)
    return float(low_s * (high_s / low_s) ** position)


def rate(points: Sequence[tuple[int, int, int, float]], m: float, k: float, n: float) -> float:
    """FLOP/s of a product. Below the grid a product takes as long as at its edge; above it the rate is the edge's."""
    known = {point[:3]: point[3] for point in points}
    axes = [sorted(set(sides)) for sides in zip(*known, strict=True)]
    small: float = 1.0
    weights: list[list[tuple[int, float]]] = []
    for axis, size in zip(axes, (m, k, n), strict=True):
        small *= min(1.0, size / axis[0])
        weights.append(_between(axis, min(max(size, axis[0]), axis[-1])))
    total: float = 0.0
    for corner in itertools.product(*weights):
        share = math.prod(weight for _, weight in corner)
        if share:
            total += share * math.log(_nearest(known, axes, [size for size, _ in corner]))
    return math.exp(total) * small


def _between(axis: Sequence[int], size: float) -> list[tuple[int, float]]:
    index = min(bisect_right(axis, size), len(axis) - 1)
    low, high = axis[index - 1], axis[index]
    position = math.log(size / low) / math.log(high / low)
    return [(low, 1 - position), (high, position)]


def _nearest(known: dict[tuple[int, int, int], float], axes: Sequence[Sequence[int]], corner: list[int]) -> float:
    """The rate at a corner; where it was too large to be measured, that of the largest side made one smaller."""
    while tuple(corner) not in known:
        side = max(range(3), key=lambda axis: corner[axis])
        corner[side] = axes[side][axes[side].index(corner[side]) - 1]
    return known[corner[0], corner[1], corner[2]]


def _attention_s(points: Sequence[tuple[int, int, float, float]], tokens: float, width: float, at: int) -> float:
    """Of one head over one causal row: in width, then in tokens; beyond the longest row with the square of it."""
    widths = sorted({point[1] for point in points})
    by_tokens = []
    for length in sorted({point[0] for point in points}):
        of_width = {point[1]: float(point[at]) for point in points if point[0] == length}
        by_tokens.append((float(length), curve([(float(size), of_width[size]) for size in widths], width)))
    longest, longest_s = by_tokens[-1]
    if tokens >= longest:
        return longest_s * (tokens / longest) ** 2
    if tokens <= by_tokens[0][0]:
        return by_tokens[0][1] * tokens / by_tokens[0][0]
    return curve(by_tokens, tokens)
