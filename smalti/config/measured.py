"""What micro-benchmarks found on a machine: the section ``measured`` of a device.

Guarantees: plain numbers in SI units, each with the sizes that it was measured at; ``smalti.cost.step_time.rates``
reads between them. Measures nothing itself (``smalti plan hardware this-machine`` does).
"""

from typing import Literal

from pydantic import Field

from smalti.config.schema import Config

Format = Literal["bf16", "fp32"]
Operands = Literal["nt", "nn", "tn"]
"""How a product's operands lie: of a linear layer forward (the weight transposed), of its input's gradient, and of its
weight's gradient (the first transposed)."""


class Collective(Config):
    """An all-reduce among ranks of this machine."""

    ranks: int = Field(ge=2)
    """Processes that took part."""
    latency_s: float = Field(gt=0)
    """Of a few bytes."""
    bytes_per_s: float = Field(gt=0)
    """Bytes of the tensor, over what a large one takes beyond the latency."""


class Measured(Config):
    """Seconds and rates of this machine, by kind and size of the work."""

    date: str
    """When, as 2026-11-22."""
    software: str
    """Of what the kernels are, as ``torch 2.13.0``."""
    threads: int = Field(ge=1)
    """CPU threads of the process that measured; 1 for a GPU."""
    matmul: dict[Format, dict[Operands, tuple[tuple[int, int, int, float], ...]]]
    """[M, K, N, FLOP/s] of products [M, K] x [K, N]; M, K and N of a full grid, but for its largest products."""
    attention: dict[Format, tuple[tuple[int, int, float, float], ...]]
    """[tokens, head width, forward s, backward s] of one head over one row: what a batch of many takes, shared out."""
    kernels: dict[Format, dict[str, tuple[tuple[int, float], ...]]]
    """Kind of kernel -> [elements, seconds], rising."""
    collective: Collective | None = None
    """None: one rank."""
    factors: dict[str, float] = Field(default_factory=dict)
    """``product``, ``experts``, ``attention``, ``kernel``, ``update`` -> seconds inside a step for each second of such
    work alone; and ``unit_s``, host time of one sharded unit in a pass. Absent ones are those of
    ``smalti.cost.step_time.factors``."""
