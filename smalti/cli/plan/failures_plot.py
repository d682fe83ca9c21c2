"""The plot of ``smalti plan failures``: goodput over the checkpoint interval, and over the number of GPUs."""

from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from smalti.plan.failures.reliability import Outlook

_POINTS = 97
_MAX_GPUS = 131_072


def plot_failures(expected: "Outlook") -> str:
    """Return an SVG file of two charts, one above the other."""
    from smalti.base.chart import column, standalone

    title = f"Goodput of {expected.setup.gpus:,} GPUs that fail"
    return standalone(column([_by_interval(expected), _by_gpus(expected)], title=title))


def _by_interval(expected: "Outlook") -> str:
    from smalti.base.chart import Series, line_chart
    from smalti.base.units import format_frac, format_seconds
    from smalti.cost.failures import mtbf_s
    from smalti.plan.failures.goodput import goodput_frac

    setup = expected.setup
    middle = expected.optimal_s or expected.interval_s
    x = [middle * 20 ** (2 * i / (_POINTS - 1) - 1) for i in range(_POINTS)]
    x = [value for value in x if value >= setup.checkpoint_upload_s]
    lines = []
    for number, gpus in enumerate(dict.fromkeys((max(1, setup.gpus // 4), setup.gpus, setup.gpus * 4))):
        timing = replace(setup.timing, mtbf_s=mtbf_s(setup.failures_per_1000_gpu_days, gpus))
        y = [goodput_frac(replace(timing, interval_s=value)) for value in x]
        lines.append(Series(f"{gpus:,} GPUs", x, y, colour=(1, 0, 2)[number]))
    best = _best(expected, x[0], x[-1])
    lines.append(Series("optimum", [at for at, _ in best], [share for _, share in best], dashed=True, colour=7))
    goodput = expected.shares.useful_frac
    label = f"this job: every {format_seconds(expected.interval_s)}, {format_frac(goodput)}"
    lines.append(Series(label, [expected.interval_s], [goodput], colour=6))
    if expected.optimal_s is not None and abs(expected.interval_s / expected.optimal_s - 1) > 0.01:
        top = goodput_frac(replace(setup.timing, interval_s=expected.optimal_s))
        label = f"optimum: every {format_seconds(expected.optimal_s)}, {format_frac(top)}"
        lines.append(Series(label, [expected.optimal_s], [top], colour=5))
    title = "Goodput by checkpoint interval" + " (dashed: the optimum, for more and fewer GPUs)" * bool(best)
    return line_chart(lines, title=title, x_label="seconds of work between checkpoints",
                      log_x=True, format_y=format_frac)  # fmt: skip


def _best(expected: "Outlook", low_s: float, high_s: float) -> list[tuple[float, float]]:
    """Return (optimal interval, its goodput) for other numbers of GPUs, within the plot; empty without an optimum."""
    from smalti.cost.failures import optimal_s
    from smalti.plan.failures.goodput import goodput_frac

    setup = expected.setup
    points = []
    if expected.optimal_s is None:
        return []
    for power in range(-16, 17):
        mean = expected.mtbf_s * 2 ** (power / 4)
        at = optimal_s(setup.checkpoint_stall_s, mean)
        if low_s <= at <= high_s:
            points.append((at, goodput_frac(replace(setup.timing, mtbf_s=mean, interval_s=at))))
    return points


def _by_gpus(expected: "Outlook") -> str:
    from smalti.base.chart import Series, line_chart
    from smalti.base.units import format_frac
    from smalti.plan.failures.rates import failure_rate
    from smalti.plan.failures.reliability import goodput_at

    setup = expected.setup
    rate_of_job = expected.setup.failures_per_1000_gpu_days
    low = min(64, setup.gpus)
    high = max(_MAX_GPUS, setup.gpus)
    x = [float(round(low * (high / low) ** (i / (_POINTS - 1)))) for i in range(_POINTS)]
    rates = {f"{rate_of_job:.3g} failures in 1,000 GPU-days": rate_of_job}
    for name in ("dbrx", "llama-3", "ft-hsdp"):
        rate = failure_rate(name).per_1000_gpu_days
        if abs(rate - rate_of_job) > 0.03 * rate:
            rates[f"{rate:.2g} ({name})"] = rate
    lines = []
    for label, rate in rates.items():
        y = [goodput_at(setup, gpus=int(gpus), failures_per_1000_gpu_days=rate) for gpus in x]
        lines.append(Series(label, x, y))
    goodput = expected.shares.useful_frac
    lines.append(Series(f"this job: {setup.gpus:,} GPUs, {format_frac(goodput)}", [setup.gpus], [goodput], colour=6))
    title = "Goodput by GPUs, each with its optimal interval"
    if setup.checkpoint_interval_s is not None:
        title = "Goodput by GPUs, at the given interval"
    return line_chart(lines, title=title, x_label="GPUs", log_x=True, format_y=format_frac)
