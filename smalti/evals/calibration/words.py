"""A calibration as text cells, for the terminal and the page."""

import math

from smalti.evals.calibration.calibrate import LEVEL, MIN_SCALES, SNR_BOUND, Calibration, Row, TaskGroup
from smalti.evals.calibration.points import MEASURES

COLUMNS = (
    "task", "shots", "measure", "runs", "signal", "range", "noise", "seeds", "SNR", "rho", "tau", "p", "class",
    "above chance from",
)  # fmt: skip


def cells(calibration: Calibration, row: Row) -> tuple[str, ...]:
    """Return the cells of a row under ``COLUMNS``."""
    spearman, kendall, p = row.ranks or (None, None, None)
    return (
        calibration.labels[row.variant],
        shots(row),
        row.measure.replace("_", " "),
        str(len(row.points)),
        _frac(row.signal),
        _frac(row.range),
        _frac(row.checkpoint_noise),
        _frac(row.seed_noise),
        snr(row),
        "-" if spearman is None else f"{spearman:.2f}",
        "-" if kendall is None else f"{kendall:.2f}",
        "-" if p is None else f"{p:.3f}",
        row.kind or row.missing,
        above_chance(row),
    )


def shots(row: Row) -> str:
    """Return the number of shots, or ``-``."""
    return "-" if row.variant.shots is None else str(row.variant.shots)


def snr(row: Row) -> str:
    """Return signal / noise as text; ``no noise`` where the last scores of every run are equal."""
    if row.snr is None:
        return "-"
    return "no noise" if math.isinf(row.snr) else f"{row.snr:.1f}" if row.snr < 100 else f"{row.snr:.0f}"


def above_chance(row: Row) -> str:
    """Return the FLOPs from which on the scores are above chance, ``never``, or ``-`` without a known chance."""
    if row.measure != "accuracy" or row.chance is None:
        return "-"
    return "never" if row.above_chance_from is None else flops(row.above_chance_from)


def flops(value: float) -> str:
    """Return FLOPs with three digits, in powers of ten as the literature has them: ``2.70e22``."""
    return f"{value:.2e}".replace("e+", "e")


def group_name(group: TaskGroup) -> str:
    """Return the group of a task, with the shots that are enough."""
    if group.group == "given enough shots":
        return f"given enough shots: {group.enough_shots} or more"
    return group.group or "not decided"


def group_rows(calibration: Calibration) -> list[tuple[str, ...]]:
    """Return (task, measure, shots, group) of each measure of a task."""
    return [
        (
            calibration.labels[group.rows[0].variant],
            group.rows[0].measure.replace("_", " "),
            " ".join(map(shots, group.rows)),
            group_name(group),
        )
        for group in calibration.groups
    ]


def recommendation_rows(calibration: Calibration) -> list[tuple[str, str, str]]:
    """Return (FLOPs, measure, tasks with their shots) of what to use from these FLOPs on."""
    lines = []
    for each in calibration.recommendations:
        start = flops(each.flops)
        for measure in MEASURES:
            uses = [use(calibration, row) for row in each.rows if row.measure == measure]
            if uses:
                lines.append((start, measure.replace("_", " "), ", ".join(sorted(uses))))
        if not each.rows:
            lines.append((start, "-", "nothing: no row is well behaved at this scale"))
    return lines


def use(calibration: Calibration, row: Row) -> str:
    """Return a row as the name of what to use: ``arithmetic (5 shots)``."""
    number = row.variant.shots
    of_shots = "" if number is None else f" ({number} shot{'' if number == 1 else 's'})"
    return f"{calibration.labels[row.variant]}{of_shots}"


def notes(calibration: Calibration) -> list[str]:
    """Return what the columns mean, and what is not known."""
    lines = [
        "signal, range: standard deviation and greatest difference of the runs' last scores, over their mean",
        f"noise: standard deviation over the last {calibration.last} scores of a run, over their mean; seeds: between "
        "runs that differ in nothing but the seed; SNR: signal / the larger of the two",
        "rho, tau, p: rank correlation (Spearman, Kendall) with FLOPs, positive where more FLOPs are better, and its "
        "one-sided p by permutation",
        f"well behaved: SNR at least {SNR_BOUND:g}, p at most {LEVEL:g}, and above chance; poorly behaved: not in the "
        "order of FLOPs",
    ]
    n_scales = len(calibration.scales)
    if n_scales < MIN_SCALES:
        lines.append(f"no order by FLOPs: it needs runs of {MIN_SCALES} different FLOPs, and there are {n_scales}")
    without = sum(row.checkpoint_noise is None for row in calibration.rows)
    if without:
        lines.append(
            f"no noise of checkpoints in {without} of {len(calibration.rows)} rows: it needs {calibration.last} scores "
            "of a run at different steps (evals.every in the recipe)"
        )
    return lines


def _frac(value: float | None) -> str:
    return "-" if value is None else f"{value * 100:.1f} %" if value < 10 else f"{value * 100:.0f} %"
