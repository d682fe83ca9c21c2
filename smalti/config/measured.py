"""The section ``measured`` of a device: results of micro-benchmarks on a machine.

They are plain numbers in SI units, each with the sizes that it was measured at; ``smalti.cost.step_time.rates``
interpolates between them. ``smalti plan hardware this-machine`` measures them.
"""

from typing import Literal

from pydantic import Field

from smalti.config.schema import Config

Format = Literal["bf16", "fp32"]
Operands = Literal["nt", "nn", "tn"]
"""Layout of a product's operands: of a linear layer forward (the weight transposed), of its input's gradient, and of
its weight's gradient (the first transposed)."""


class Collective(Config):
    """An all-reduce among ranks of this machine."""

    ranks: int = Field(ge=2)
    """Number of processes."""
    latency_s: float = Field(gt=0)
    """Seconds of an all-reduce of a few bytes."""
    bytes_per_s: float = Field(gt=0)
    """Bytes of a large tensor / (its seconds - latency)."""


class Measured(Config):
    """Seconds and rates of this machine, by kind and size of the work."""

    date: str
    """Day of the measurement, as 2026-11-22."""
    software: str
    """Library of the kernels, as ``torch 2.13.0``."""
    threads: int = Field(ge=1)
    """CPU threads of the measuring process; 1 for a GPU."""
    matmul: dict[Format, dict[Operands, tuple[tuple[int, int, int, float], ...]]]
    """[M, K, N, FLOP/s] of products [M, K] x [K, N], on a full grid of M, K and N without its largest products."""
    attention: dict[Format, tuple[tuple[int, int, float, float], ...]]
    """[tokens, head width, forward s, backward s] of one head over one row, averaged over a large batch."""
    kernels: dict[Format, dict[str, tuple[tuple[int, float], ...]]]
    """Kind of kernel -> [elements, seconds], ascending."""
    collective: Collective | None = None
    """An all-reduce; None: one rank."""
    factors: dict[str, float] = Field(default_factory=dict)
    """Seconds inside a step for each second of the same work alone: ``product``, ``experts``, ``attention``,
    ``kernel``, ``update``; and ``unit_s``, host time of one sharded unit in a pass. The others are those of
    ``smalti.cost.step_time.factors``."""
