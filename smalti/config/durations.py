"""Durations in steps. A run is as long as it is; a cadence in wall-clock time is the loop's affair."""

from smalti.config.schema import NotAllowed, split_duration


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


def check_schedule(duration: str, warmup: str, decay: str, *, global_batch_tokens: int) -> None:
    """Raise NotAllowed where warmup and decay together do not fit into a run of ``duration``."""
    total = total_steps(duration, global_batch_tokens=global_batch_tokens)
    rise, fall = (_exact_steps(part, total, global_batch_tokens) for part in (warmup, decay))
    run = f"the run, train.duration={duration}, has {total:,} step{'s' if total > 1 else ''}"
    # A share of the run may be half a step more than it says once it is rounded; what is written decides.
    if rise > total * (1 + 1e-9):
        raise NotAllowed(
            f"schedule.warmup={warmup} is {rise:,.0f} steps; {run}",
            allowed=f"at most {total}step, less the decay",
            hint="train.schedule.warmup=0.02run, or make the run longer (train.duration)",
        )
    if rise + fall > total * (1 + 1e-9):
        raise NotAllowed(
            f"schedule.warmup={warmup} and schedule.decay={decay} are {rise:,.0f} + {fall:,.0f} steps; {run}",
            allowed=f"together at most {total}step, or 1run",
            hint="train.schedule.warmup=0.02run train.schedule.decay=0.2run, or make the run longer (train.duration)",
        )


def _exact_steps(duration: str, total: int, global_batch_tokens: int) -> float:
    amount, unit = split_duration(duration)
    return amount * {"run": total, "tok": 1 / global_batch_tokens, "step": 1}[unit]


def to_seconds(cadence: str) -> float | None:
    """Seconds of a cadence in wall-clock time; None for one in steps, tokens or a share of the run."""
    amount, unit = split_duration(cadence)
    factor = {"s": 1, "min": 60, "h": 3600}.get(unit)
    return None if factor is None else amount * factor
