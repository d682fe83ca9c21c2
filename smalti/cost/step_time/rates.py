"""Seconds of one unit of work on one device, from measurements or by the roofline of published figures.

They are positive and never fall with the size of the work. With published figures the time is the longer of
``compute_s`` and ``memory_s`` (Williams et al. 2009, "Roofline").
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
"""Share of the bytes of elementwise kernels that torch.compile leaves, because it keeps values in registers between
neighbours (an estimate: of the three numbers of an addition the one just written and half of the others)."""

LAUNCH_S = 5e-6
"""Launch of a kernel in eager mode (CUDA's launch and PyTorch's dispatch; published figures are 3 to 10 us)."""

ASSUMED_FRAC = 0.75
"""Share of the peak that a large product reaches, for devices without a published figure."""


def bytes_of(work: Work, compute: Format) -> float:
    """Return the minimum bytes that one unit of work reads and writes."""
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
    """Return the launches of one unit of work."""
    return KINDS[work.kind].kernels if work.kind in KINDS else work.launches


def compute_s(work: Work, hardware: Hardware, compute: Format) -> float:
    """Return FLOPs / (share of a large product x published peak)."""
    flops = work.flops + work.again_flops
    if not flops:
        return 0.0
    return flops / (hardware.require_peak("fp32" if work.fp32 else compute) * (hardware.matmul_frac or ASSUMED_FRAC))


def memory_s(work: Work, hardware: Hardware, compute: Format, *, fused: bool = False) -> float:
    """Return bytes / bandwidth."""
    share = FUSED_FRAC if fused and work.kind in KINDS and KINDS[work.kind].fuses else 1.0
    return bytes_of(work, compute) * share / hardware.memory_bytes_per_s


def bound_of(work: Work, hardware: Hardware, compute: Format) -> str:
    """Return ``compute``, ``memory`` or ``overhead``: what limits one unit of work."""
    if hardware.measured is None:
        return "compute" if compute_s(work, hardware, compute) > memory_s(work, hardware, compute) else "memory"
    if work.kind not in KINDS:
        return "compute"
    table = hardware.measured.kernels["fp32" if work.fp32 else compute].get(work.kind)
    return "overhead" if table and curve(table, work.elements) < 2 * table[0][1] else "memory"


# ---- measured -------------------------------------------------------------------------------------------------------


def measured_s(work: Work, machine: Measured, compute: Format, *, threads: int | None = None) -> float:
    """Return the seconds of one unit of work alone, from the micro-benchmarks of the machine.

    Products by shape: the rate is interpolated in log M, log K, log N. Kernels by their elements, and attention by row
    and head width: seconds are interpolated in the logarithm of both, and proportional beyond the largest size; below
    the smallest they are the smallest's. threads: of the rank, if fewer than in the measurement.
    """
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
    """Return the seconds at a size, interpolated between the measured ones in the logarithm of both."""
    if at <= points[0][0]:
        return points[0][1]
    if at >= points[-1][0]:
        return points[-1][1] * at / points[-1][0]
    index = bisect_right([size for size, _ in points], at)
    (low, low_s), (high, high_s) = points[index - 1], points[index]
    position = math.log(at / low) / math.log(high / low)
    return float(low_s * (high_s / low_s) ** position)


def rate(points: Sequence[tuple[int, int, int, float]], m: float, k: float, n: float) -> float:
    """Return the FLOP/s of a product. Below the grid its time is that of the edge; above it the rate is."""
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
    """Return the rate at a corner; if it was too large to be measured, that with the largest side one smaller."""
    while tuple(corner) not in known:
        side = max(range(3), key=lambda axis: corner[axis])
        corner[side] = axes[side][axes[side].index(corner[side]) - 1]
    return known[corner[0], corner[1], corner[2]]


def _attention_s(points: Sequence[tuple[int, int, float, float]], tokens: float, width: float, at: int) -> float:
    """Return the seconds of one head over one causal row, interpolated in width, then in tokens.

    Beyond the longest row they grow with its square.
    """
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
