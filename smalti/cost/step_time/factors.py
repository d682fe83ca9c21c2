"""Factors of ``cost/step_time/step.py``: how much longer work takes inside a training step than alone.

Those of GPUs are fitted to published steps (``tests/cost/published_steps.py``), which the interval contains; those of a
CPU are provisional. For kinds of steps that are not among the rows they are not verified.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from smalti.base.errors import UserError
from smalti.config.hardware import Hardware
from smalti.config.measured import Format
from smalti.cost.step_time.work import KINDS, Work


@dataclass(frozen=True)
class Factors:
    """Seconds inside a step for each second of the roofline, and the range of measured / predicted."""

    product: float
    attention: float
    memory: float
    low_frac: float
    """Smallest measured / predicted step."""
    high_frac: float
    """Largest measured / predicted step."""
    source: str


AMPERE = Factors(1.143, 2.732, 1.489, 0.89, 1.22, "A100 80GB: 21 published MPT steps, rms error 7 %")
HOPPER = Factors(1.184, 4.638, 2.279, 0.90, 1.25, "H100 SXM: 26 published MPT steps, rms error 6 %")
OTHERS = Factors(1.198, 2.918, 1.978, 0.70, 1.50, "A100 and H100 together, for a device of another kind")
"""Like the two above, least squares over LLM Foundry's published MPT throughputs (scripts/train/benchmarking/README.md,
commit 061f2c7: 125M to 70B, 512 to 8,192 tokens, with and without recomputation, 8 to 64 GPUs under FSDP, bf16), of the
roofline of products, attention and the rest. So they include PyTorch 2.0 or 2.1 without torch.compile, that stack's
attention kernel, and the part of FSDP's network that is not hidden behind the work."""

_DEVICES = {"a100": AMPERE, "a800": AMPERE, "h100": HOPPER, "h800": HOPPER, "h200": HOPPER, "gh200": HOPPER}

CPU: Mapping[str, float] = {
    "product": 1.05,
    "experts": 3.03,
    "attention": 0.371,
    "kernel": 2.39,
    "update": 2.34,
    "unit_s": 0.0,
}
"""Seconds inside a step for each second of such work alone, and host time of one FSDP unit in one pass.

Fitted to the eight recipes outside the six of ``bench/plan_time.py`` (``bench/results/plan_time.json``), on one core of
a Xeon with AMX. Those recipes hardly separate attention from kernels: only their sum is known."""

CPU_FRACS = (0.89, 1.33)
"""Measured / predicted of the 14 steps of that run: dense ones 0.89 to 1.06, with experts 1.06 to 1.33."""


EXPERTS_HIGH = 1.31
"""Factor on the upper end for a model with experts: nanochat's fell from 46 % MFU to 35 % with 8 experts
on 8 H100 (its dev/LOG.md, 2026-02-19). None of the fitted rows has experts."""


def of_gpu(hardware: Hardware, compute: Format) -> Factors:
    """Return the factors of a device with published figures; all rows are in bf16."""
    return _DEVICES.get(hardware.name.split("-")[0], OTHERS) if compute == "bf16" else OTHERS


def interval(hardware: Hardware, compute: Format, *, experts: bool) -> tuple[float, float]:
    """Return the interval of a measured step, as shares of the predicted."""
    if hardware.measured is not None:
        return CPU_FRACS
    factors = of_gpu(hardware, compute)
    return factors.low_frac, factors.high_frac * (EXPERTS_HIGH if experts else 1.0)


def of_cpu(measured: Mapping[str, float]) -> dict[str, float]:
    """Return the factors of a measured machine; ``measured``: those of its own measurement."""
    if unknown := sorted(measured.keys() - CPU.keys()):
        raise UserError(f"measured.factors names {', '.join(unknown)}", allowed=", ".join(CPU))
    return {**CPU, **measured}


def class_of(work: Work) -> str:
    """Return ``product``, ``experts`` (products of as many rows as an expert has tokens), ``attention``, ``kernel``, or
    ``update`` (work on parameters)."""
    if work.part in ("weights", "clip", "optimizer"):
        return "update"
    if work.ragged:
        return "experts"
    if work.kind in KINDS:
        return "kernel"
    return "attention" if work.kind.startswith("attention") else "product"
