"""Causes of Llama 3 405B's interruptions with their counts, and which of them take a node away.

Source: Llama Team 2024 (arXiv 2407.21783). Detection and restart times by cause are not published: those of the job are
used unless the user gives others. Which cause takes the node away is our reading, not the paper's.
"""

from dataclasses import dataclass, replace
from typing import Any, Literal

from smalti.base.errors import UserError, nearest
from smalti.plan.failures.goodput import Recovery

Kind = Literal["gpu", "host", "network", "software", "unknown"]

UNEXPECTED, PLANNED, GPUS, DAYS = 419, 47, 16_384, 54
"""Unplanned and planned interruptions, GPUs, and days of the period that the paper counts."""


@dataclass(frozen=True)
class Cause:
    """One cause of failures; a time of None is that of the job."""

    name: str
    """Name as typed: ``faulty-gpu``."""
    n: int
    """Count among the 419 interruptions."""
    kind: Kind
    """Kind of component that failed."""
    loses_node: bool
    """True if the node goes to repair and a spare takes its place."""
    detect_s: float | None = None
    """Time from the failure to the decision to restart."""
    restart_s: float | None = None
    """Time from that decision to the first step."""
    repair_days: float | None = None
    """Time until the node is back."""


LLAMA_3 = (
    Cause("faulty-gpu", 148, "gpu", True),
    Cause("hbm3", 72, "gpu", True),
    Cause("software-bug", 54, "software", False),
    Cause("switch-or-cable", 35, "network", True),
    Cause("host-maintenance", 32, "host", True),
    Cause("gpu-sram", 19, "gpu", True),
    Cause("gpu-system-processor", 17, "gpu", True),
    Cause("nic", 7, "host", True),
    Cause("nccl-watchdog", 7, "unknown", False),
    Cause("silent-corruption", 6, "gpu", True),
    Cause("thermal", 6, "gpu", True),
    Cause("ssd", 3, "host", True),
    Cause("power-supply", 3, "host", True),
    Cause("chassis", 2, "host", True),
    Cause("io-board", 2, "host", True),
    Cause("dependency", 2, "software", False),
    Cause("cpu", 2, "host", True),
    Cause("memory", 2, "host", True),
)
"""Table 5 of the paper: 419 unexpected interruptions in 54 days on 16,384 H100.

The paper prints 30.1 % beside the 148 faulty GPUs, but 148 of 419 are 35.3 %: 30.1 %, and the 58.7 % that its text
gives for all GPU issues, would be 126, with which the counts add up to 397."""

TIMES = ("detect_s", "restart_s", "repair_days")
"""Times that may be given for one cause."""


def with_times(values: dict[tuple[str, str], float]) -> tuple[Cause, ...]:
    """Return the causes with the times ``(cause, time) -> value`` set. Raises UserError for an unknown cause."""
    names = [cause.name for cause in LLAMA_3]
    for name, _ in values:
        if name not in names:
            close = nearest(name, names)
            raise UserError(
                f"'{name}' is not a known cause of failures",
                allowed=", ".join(names),
                hint=f"did you mean '{close}'?" if close else None,
            )
    times: dict[str, dict[str, Any]] = {name: {} for name in names}
    for (name, time), value in values.items():
        times[name][time] = value
    return tuple(replace(cause, **times[cause.name]) for cause in LLAMA_3)


def recoveries(causes: tuple[Cause, ...], detect_s: float, restart_s: float) -> tuple[Recovery, ...]:
    """Return the recovery from each cause, with its share of the failures."""
    total = sum(cause.n for cause in causes)
    return tuple(
        Recovery(
            detect_s=detect_s if cause.detect_s is None else cause.detect_s,
            restart_s=restart_s if cause.restart_s is None else cause.restart_s,
            frac=cause.n / total,
        )
        for cause in causes
    )


def node_loss_frac(causes: tuple[Cause, ...]) -> float:
    """Return the share of the failures that take a node away."""
    return sum(cause.n for cause in causes if cause.loses_node) / sum(cause.n for cause in causes)
