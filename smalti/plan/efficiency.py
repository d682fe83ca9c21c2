"""What share of a plain matmul's rate a whole training step reaches: a calibrated table, no theory.

Promises a prediction within about a factor of 1.3 for the shapes it was calibrated on; ``smalti plan verify RUN`` says
how far off it was for a run. Small models lose to everything that is not a matmul (norms, optimizer, Python), so the
share grows with the width.
"""

import itertools
import math
from typing import Literal

from smalti.config.model import ModelConfig

Table = tuple[tuple[int, float], ...]

CPU_FRAC: Table = ((64, 0.15), (128, 0.30), (256, 0.50), (384, 0.66), (1024, 0.72))
"""Width -> share of the measured bf16 matmul rate, eager, dense. Measured on 2 cores (EPYC, avx512_bf16): the recipe
``demo`` (width 128, mixture of experts) reaches 0.23 of 450 GFLOP/s; width 384, 6 layers, dense 0.66 to 0.71
(bench/train_cpu.py). The others are drawn between and beyond these."""

CUDA_FRAC: Table = ((256, 0.10), (768, 0.28), (1536, 0.44), (2048, 0.52), (4096, 0.58))
"""Width -> share of what a large matmul reaches (0.8 of the published peak). From LLM Foundry's published H100 bf16
table, MFU / 0.8: 760M 34.9 %, 1B 41.8 %, 7B 46.4 %; below 1,536 drawn by hand."""

MOE_FACTOR = 0.76
"""Routing, permutation and ragged matmuls: a mixture of experts reaches about this share of a dense model's rate."""

FP32_SPEEDUP = 1.7
"""In fp32 the matmuls take longer (2.15 times on the machine above) and the rest less so: the same table then gives
0.77 for fp32 at width 384, as measured there."""


def efficiency_frac(
    model: ModelConfig, *, device: Literal["cpu", "cuda"] = "cpu", compute: Literal["bf16", "fp32"] = "bf16"
) -> float:
    """The share (0..1) of the matmul rate in the ``compute`` format that a training step is expected to reach."""
    frac = _interpolate(CPU_FRAC if device == "cpu" else CUDA_FRAC, model.hidden_size)
    if model.moe is not None:
        frac *= MOE_FACTOR
    if compute == "fp32":
        frac = 1 / (1 + (1 / frac - 1) / FP32_SPEEDUP)
    return frac


def _interpolate(table: Table, width: int) -> float:
    """Linear in log2(width) between the points, in proportion to the width below them, constant above."""
    first_width, first = table[0]
    if width <= first_width:
        return first * width / first_width
    for (low_width, low), (high_width, high) in itertools.pairwise(table):
        if width <= high_width:
            position = math.log2(width / low_width) / math.log2(high_width / low_width)
            return low + (high - low) * position
    return table[-1][1]
