"""The picture of ``smalti plan failures``: goodput over the checkpoint interval, and over the number of GPUs."""

from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from smalti.plan.failures.reliability import Outlook

_POINTS = 97
_MOST_GPUS = 131_072


def picture(found: "Outlook") -> str:
    """An SVG file of two charts, one above the other."""
    from smalti.base.chart import column, standalone

    title = f"Goodput of {found.setup.gpus:,} GPUs that fail"
    return standalone(column([_by_interval(found), _by_gpus(found)], title=title))


def _by_interval(found: "Outlook") -> str:
    from smalti.base.chart import Series, line_chart
    from smalti.base.units import format_frac, format_seconds
    from smalti.plan.failures.goodput import goodput_frac, mtbf_s

    setup = found.setup
    middle = found.optimal_s or found.interval_s
    x = [middle * 20 ** (2 * i / (_POINTS - 1) - 1) for i in range(_POINTS)]
    x = [value for value in x if value >= setup.checkpoint_upload_s]
    lines = []
    for number, gpus in enumerate(dict.fromkeys((max(1, setup.gpus // 4), setup.gpus, setup.gpus * 4))):
        timing = replace(setup.timing, mtbf_s=mtbf_s(setup.failures_per_1000_gpu_days, gpus))
        y = [goodput_frac(replace(timing, interval_s=value)) for value in x]
        lines.append(Series(f"{gpus:,} GPUs", x, y, colour=(1, 0, 2)[number]))
    best = _best(found, x[0], x[-1])
    lines.append(Series("the best", [at for at, _ in best], [share for _, share in best], dashed=True, colour=7))
    here = found.shares.useful_frac
    label = f"here: every {format_seconds(found.interval_s)}, {format_frac(here)}"
    lines.append(Series(label, [found.interval_s], [here], colour=6))
    if found.optimal_s is not None and abs(found.interval_s / found.optimal_s - 1) > 0.01:
        top = goodput_frac(replace(setup.timing, interval_s=found.optimal_s))
        label = f"best: every {format_seconds(found.optimal_s)}, {format_frac(top)}"
        lines.append(Series(label, [found.optimal_s], [top], colour=5))
    title = "Goodput by checkpoint interval" + " (dashed: the best, for more and fewer GPUs)" * bool(best)
    return line_chart(lines, title=title, x_label="seconds of work between checkpoints",
                      log_x=True, format_y=format_frac)  # fmt: skip


def _best(found: "Outlook", low_s: float, high_s: float) -> list[tuple[float, float]]:
    """The best interval and its goodput for other numbers of GPUs, inside the picture; none where none is best."""
    from smalti.plan.failures.goodput import goodput_frac, optimal_s

    setup, points = found.setup, []
    if found.optimal_s is None:
        return []
    for power in range(-16, 17):
        mean = found.mtbf_s * 2 ** (power / 4)
        at = optimal_s(setup.checkpoint_stall_s, mean)
        if low_s <= at <= high_s:
            points.append((at, goodput_frac(replace(setup.timing, mtbf_s=mean, interval_s=at))))
    return points


def _by_gpus(found: "Outlook") -> str:
    from smalti.base.chart import Series, line_chart
    from smalti.base.units import format_frac
    from smalti.plan.failures.rates import failure_rate
    from smalti.plan.failures.reliability import goodput_at

    setup, own = found.setup, found.setup.failures_per_1000_gpu_days
    low, high = min(64, setup.gpus), max(_MOST_GPUS, setup.gpus)
    x = [float(round(low * (high / low) ** (i / (_POINTS - 1)))) for i in range(_POINTS)]
    rates = {f"{own:.3g} failures in 1,000 GPU-days": own}
    for name in ("dbrx", "llama-3", "ft-hsdp"):
        rate = failure_rate(name).per_1000_gpu_days
        if abs(rate - own) > 0.03 * rate:
            rates[f"{rate:.2g} ({name})"] = rate
    lines = []
    for label, rate in rates.items():
        y = [goodput_at(setup, gpus=int(gpus), failures_per_1000_gpu_days=rate) for gpus in x]
        lines.append(Series(label, x, y))
    here = found.shares.useful_frac
    lines.append(Series(f"here: {setup.gpus:,} GPUs, {format_frac(here)}", [setup.gpus], [here], colour=6))
    title = "Goodput by GPUs, each with its best interval"
    if setup.checkpoint_interval_s is not None:
        title = "Goodput by GPUs, at the interval that is given"
    return line_chart(lines, title=title, x_label="GPUs", log_x=True, format_y=format_frac)
