"""Durations in steps. A run is as long as it is; a cadence in wall-clock time is the loop's affair."""

from smalti.config.schema import split_duration


def total_steps(duration: str, *, global_batch_tokens: int) -> int:
    """Steps of a whole run; tokens are rounded up to whole steps, and a run has at least one."""
    amount, unit = split_duration(duration)
    assert unit in ("step", "tok"), duration
    return max(1, int(amount) if unit == "step" else -(-int(amount) // global_batch_tokens))


def to_steps(duration: str, *, total_steps: int, global_batch_tokens: int) -> int:
    """Steps of a part of a run of ``total_steps``: rounded to the nearest, at most the whole."""
    amount, unit = split_duration(duration)
    assert unit in ("step", "tok", "run"), duration
    if unit == "run":
        steps = round(amount * total_steps)
    elif unit == "tok":
        steps = round(amount / global_batch_tokens)
    else:
        steps = int(amount)
    return min(steps, total_steps)


def to_seconds(cadence: str) -> float | None:
    """Seconds of a cadence in wall-clock time; None for one in steps, tokens or a share of the run."""
    amount, unit = split_duration(cadence)
    factor = {"s": 1, "min": 60, "h": 3600}.get(unit)
    return None if factor is None else amount * factor
