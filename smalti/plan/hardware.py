"""The record of a matmul rate measured on a machine by ``smalti.fleet.probes.matmul``. Published figures of devices lie
in ``smalti/config/presets/hardware``."""

from dataclasses import asdict, dataclass
from typing import Any

from smalti.base.errors import DataError


@dataclass(frozen=True)
class MeasuredRate:
    """A matmul rate measured on this machine by ``smalti.fleet.probes.matmul``."""

    device: str
    """Name of the device ('cpu' or as the driver reports it)."""
    threads: int
    """CPU threads used."""
    dtype: str
    """``bf16`` or ``fp32``."""
    flops_per_s: float
    """Best rate seen over the sizes tried."""
    size: int
    """Side of the square matrices at that rate."""

    def to_json(self) -> dict[str, Any]:
        """A JSON object with the fields."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: Any) -> "MeasuredRate":
        """Read what ``to_json`` or the probe wrote; DataError when a field is missing or of the wrong kind."""
        try:
            rate = cls(
                device=str(value["device"]),
                threads=int(value["threads"]),
                dtype=str(value["dtype"]),
                flops_per_s=float(value["flops_per_s"]),
                size=int(value["size"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(
                f"{value!r} is not a measured rate ({error!r})",
                allowed="an object with device, threads, dtype, flops_per_s, size",
            ) from error
        if not 0 < rate.flops_per_s < float("inf"):
            raise DataError(f"a measured rate of {rate.flops_per_s} FLOP/s cannot be", allowed="a number above 0")
        return rate
