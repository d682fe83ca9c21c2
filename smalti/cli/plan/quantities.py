"""Formats the quantities and assumptions of a plan."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from smalti.plan.budget.problem import Assumption


def format_quantity(name: str, value: float | str) -> str:
    """Return a value as text, in the format of the quantity ``name``: 7e9 params -> ``7B``."""
    from smalti.base.units import format_count
    from smalti.plan.quantities import format_number

    if isinstance(value, str):
        return value
    if name in ("params", "active_params") or name.endswith("tokens"):
        return format_count(value)
    if name.endswith("_usd") or name.startswith("usd_"):
        return f"{value:,.0f}" if value >= 1000 else f"{value:.2f}"
    if name in ("gpus", "days", "gpu_hours", "pairs", "chats", "comparisons") and 1000 <= value < 1e9:
        return f"{value:,.0f}"
    return format_number(value)


def assumption_text(assumption: "Assumption") -> str:
    """Return an assumption as a line of text."""
    name = assumption.name
    value = format_quantity(name, assumption.value)
    value = value if value.startswith("=") else f"= {value}"
    span = ""
    if assumption.interval:
        low, high = assumption.interval
        span = f" ({format_quantity(name, low)} to {format_quantity(name, high)})"
    return f"{name} {value}{span}: {assumption.why}"
