"""Inputs of ``smalti plan failures``: a job, its cluster, its checkpoints and restarts.

Missing values are named assumptions (``Setup.assumed``) with their source; impossible, contradictory and ineffective
values raise UserError. The figures are computed in ``plan/failures/reliability.py``.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from smalti.base.errors import UserError
from smalti.cost import failures
from smalti.cost.failures import DAY_S
from smalti.plan.failures.causes import LLAMA_3, Cause, recoveries
from smalti.plan.failures.goodput import Recovery, Timing

ASSUMED: dict[str, tuple[float, str]] = {
    "failures_per_1000_gpu_days": (failures.FAILURES_PER_1000_GPU_DAYS, "as on DBRX's cluster"),
    "gpus_per_node": (8, "a usual node"),
    "detect_s": (600.0, "MegaScale: under 10 minutes with its tests (arXiv 2402.15627)"),
    "restart_s": (900.0, "MegaScale: caught up in under 15 minutes (arXiv 2402.15627)"),
    "checkpoint_stall_s": (30.0, "MosaicML: sharded, several TB in under 30 s"),
    "checkpoint_upload_s": (0.0, "a checkpoint counts as soon as its stall ends"),
    "failures_during_restart": (False, "failures occur only while the job works, as in Young's and Daly's formulas"),
}
"""Name -> assumed value and its source."""

CAUSES_SOURCE = "Llama 3's 419 interruptions (arXiv 2407.21783, table 5)"
"""Source of the mix of causes, which is fixed."""

LIMITS: dict[str, tuple[float, float]] = {
    "gpus": (1, 10_000_000),
    "gpus_per_node": (1, 1024),
    "failures_per_1000_gpu_days": (0, 1000),
    "detect_s": (0, 30 * DAY_S),
    "restart_s": (0, 30 * DAY_S),
    "checkpoint_stall_s": (0, DAY_S),
    "checkpoint_interval_s": (1e-3, 365 * DAY_S),
    "checkpoint_upload_s": (0, 30 * DAY_S),
    "days": (1e-3, 36_500),
    "price_usd_per_gpu_hour": (1e-3, 10_000),
    "spares": (0, 10_000_000),
    "repair_days": (1e-3, 3650),
}
"""Name -> the smallest and largest accepted value."""

WHOLE = ("gpus", "gpus_per_node", "spares")
"""Names of whole numbers."""


@dataclass(frozen=True)
class Setup:
    """A job and the cluster that it runs on. Raises UserError for impossible values."""

    gpus: int
    """GPUs of the job, without spares."""
    failures_per_1000_gpu_days: float = ASSUMED["failures_per_1000_gpu_days"][0]
    """Interruptions of the job for each 1,000 GPU-days."""
    gpus_per_node: int = int(ASSUMED["gpus_per_node"][0])
    """GPUs that are lost together when one of them fails."""
    detect_s: float = ASSUMED["detect_s"][0]
    """Time from a failure to the decision to restart."""
    restart_s: float = ASSUMED["restart_s"][0]
    """Time from that decision to the first step."""
    checkpoint_stall_s: float = ASSUMED["checkpoint_stall_s"][0]
    """Duration of the stall of training at each checkpoint."""
    checkpoint_interval_s: float | None = None
    """Work between two checkpoints; None: the optimum."""
    checkpoint_upload_s: float = 0.0
    """Time from the end of the stall until the checkpoint counts."""
    failures_during_restart: bool = False
    """True if failures also occur while the job is down."""
    days: float | None = None
    """Days of the run without a failure and without a checkpoint."""
    price_usd_per_gpu_hour: float | None = None
    """Price of one GPU."""
    spares: int | None = None
    """Spare nodes; None: unlimited."""
    repair_days: float | None = None
    """Time until a failed node is back."""
    causes: tuple[Cause, ...] = LLAMA_3
    """Mix of the failures."""
    assumed: tuple[str, ...] = ()
    """Names of the values that were not given."""

    def __post_init__(self) -> None:
        for name, (low, high) in LIMITS.items():
            value = getattr(self, name)
            if value is not None:
                _check(name, value, low, high)
        for cause in self.causes:
            for name in ("detect_s", "restart_s", "repair_days"):
                value = getattr(cause, name)
                if value is not None:
                    _check(f"{name}.{cause.name}", value, *LIMITS[name])
        _check_together(self)

    @property
    def nodes(self) -> int:
        """Number of nodes of the job; the last may be shared."""
        return -(-self.gpus // self.gpus_per_node)

    @property
    def mtbf_s(self) -> float:
        """Mean time between failures of the job."""
        return failures.mtbf_s(self.failures_per_1000_gpu_days, self.gpus)

    @property
    def interval_s(self) -> float:
        """Interval between checkpoints: as given, or the optimum, but at least the time of an upload."""
        if self.checkpoint_interval_s is not None:
            return self.checkpoint_interval_s
        return max(failures.optimal_s(self.checkpoint_stall_s, self.mtbf_s), self.checkpoint_upload_s)

    @property
    def recoveries(self) -> tuple[Recovery, ...]:
        """Recovery from each cause."""
        return recoveries(self.causes, self.detect_s, self.restart_s)

    @property
    def timing(self) -> Timing:
        """Inputs of the closed form."""
        return Timing(
            mtbf_s=self.mtbf_s,
            stall_s=self.checkpoint_stall_s,
            interval_s=self.interval_s,
            recoveries=self.recoveries,
            upload_s=self.checkpoint_upload_s,
            restarts_fail=self.failures_during_restart,
        )


def setup_of(values: Mapping[str, Any], causes: tuple[Cause, ...] = LLAMA_3) -> Setup:
    """Build a setup from named values; missing ones are assumed, and listed. ``gpus`` is required."""
    if "gpus" not in values:
        raise UserError("the number of GPUs is not given", hint="smalti plan failures gpus=3072")
    return Setup(**values, causes=causes, assumed=tuple(name for name in ASSUMED if name not in values))


NAMES = tuple(field.name for field in fields(Setup) if field.name not in ("causes", "assumed"))
"""Names of all inputs."""


def _check(name: str, value: Any, low: float, high: float) -> None:
    """Raise UserError unless ``value`` is a number in the range (and whole, where it must be)."""
    whole = name in WHOLE
    number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not number or not low <= value <= high or (whole and value != int(value)):
        raise UserError(
            f"{name}={value} is not valid",
            allowed=f"a {'whole ' * whole}number from {low:g} to {high:,g}".replace(",", ""),
        )


def _check_together(setup: Setup) -> None:
    """Raise UserError for values that contradict each other or have no effect."""
    if setup.checkpoint_interval_s is None:
        if not setup.failures_per_1000_gpu_days:
            raise UserError(
                "failures_per_1000_gpu_days=0 has no optimal checkpoint interval: none is needed",
                hint="give checkpoint_interval_s, or a rate above 0",
            )
        if not setup.checkpoint_stall_s:
            raise UserError(
                "checkpoint_stall_s=0 has no optimal checkpoint interval: save after every step",
                hint="give checkpoint_interval_s, or a stall above 0",
            )
    elif setup.checkpoint_upload_s > setup.checkpoint_interval_s:
        raise UserError(
            f"checkpoint_upload_s={setup.checkpoint_upload_s:g} is longer than "
            f"checkpoint_interval_s={setup.checkpoint_interval_s:g}: uploads would pile up",
            allowed="an interval of at least the upload's time",
        )
    if setup.price_usd_per_gpu_hour is not None and setup.days is None:
        raise UserError("price_usd_per_gpu_hour has no effect without days", hint="days=90")
    if setup.spares is not None and setup.repair_days is None:
        raise UserError("spares has no effect without repair_days", hint="repair_days=2")
    if setup.repair_days is None and any(cause.repair_days is not None for cause in setup.causes):
        raise UserError("the repair time of one cause needs that of the others", hint="repair_days=2")
    if setup.repair_days is not None:
        share = setup.failures_per_1000_gpu_days * setup.gpus / 1000 * setup.repair_days / setup.nodes
        if share >= 1:
            raise UserError(
                f"repair_days={setup.repair_days:g} at {setup.failures_per_1000_gpu_days:g} failures for each 1,000 "
                f"GPU-days has {share:.3g} nodes in repair for each one that works",
                allowed="less than one",
            )
