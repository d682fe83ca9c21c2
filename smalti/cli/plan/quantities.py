"""How quantities and assumptions of a plan are printed."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from smalti.plan.budget.problem import Assumption


def format_quantity(name: str, value: float | str) -> str:
    """A value as it is printed."""
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


def assumption_text(one: "Assumption") -> str:
    """An assumption in a line."""
    value = format_quantity(one.name, one.value)
    value = value if value.startswith("=") else f"= {value}"
    span = (
        f" ({format_quantity(one.name, one.interval[0])} to {format_quantity(one.name, one.interval[1])})"
        if one.interval
        else ""
    )
    return f"{one.name} {value}{span}: {one.why}"
