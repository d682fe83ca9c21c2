"""The HTML page of a calibration: what to use, groups, signal to noise, scores over FLOPs. All text is escaped."""

from collections.abc import Sequence
from html import escape
from itertools import groupby

from smalti.base.chart import Bar, Cross, Series, bar_chart, line_chart
from smalti.base.units import format_frac
from smalti.cost.flops import FORMULA
from smalti.evals.calibration import words
from smalti.evals.calibration.calibrate import SNR_BOUND, Calibration, Row, TaskGroup
from smalti.evals.calibration.points import MEASURES
from smalti.track.report.html import document, row, table

_KINDS = {"well behaved": "good", "not better than noise": "dim", "poorly behaved": "poor", None: "open"}
"""Class of a row -> its CSS class."""
_SNR_SHOWN = 20.0
"""Bars end here: beyond it, more signal changes no decision."""
_BARS = 40
_BELOW = 7
"""Colour of a bar below the bound."""
_LONG = 18
"""Characters of a name that need wider bar charts."""
_WIDTH, _HEIGHT = 340, 230
_STYLE = """<style>
.cell{display:inline-block;min-width:64px;padding:1px 8px;border-radius:5px;text-align:right;font-weight:600}
td .cell{justify-self:start}.cell.good{background:color-mix(in srgb,var(--good) 24%,transparent)}
.cell.poor{background:color-mix(in srgb,var(--busy) 26%,transparent)}
.cell.dim{background:color-mix(in srgb,var(--soft) 20%,transparent)}
.cell.open{border:1px dashed var(--soft);font-weight:400}
.three{grid-template-columns:repeat(auto-fit,minmax(min(310px,100%),1fr))}
.dense th,.dense td{padding:6px 7px;font-size:12.5px}.dense .wide{border-width:1px 0 0;border-radius:0;margin:0}
.key{margin-right:14px;white-space:nowrap}.key .cell{min-width:28px;margin-right:6px}
.key .cell::before{content:"\\a0"}
</style>"""


def page(calibration: Calibration) -> str:
    """Return the whole page."""
    command = f"smalti eval calibrate {' '.join(run.folder for run in calibration.runs)}"
    sections = (
        _STYLE,
        _header(calibration),
        _use(calibration),
        _groups(calibration),
        _bars(calibration),
        _scores(calibration),
        _rows(calibration),
        f"<footer>Written by <code>{escape(command)}</code> from the run folders' files.</footer>",
    )
    return document(f"Calibration of {len(calibration.runs)} runs - Smalti", sections)


def _header(calibration: Calibration) -> str:
    scales = calibration.scales
    well = sum(each.kind == "well behaved" for each in calibration.rows)
    facts = (
        ("Runs", str(len(calibration.runs)), ""),
        ("FLOPs", f"{words.flops(scales[0])} to {words.flops(scales[-1])}", f"{len(scales)} scales, {FORMULA}"),
        ("Tasks", str(len({(each.variant.suite, each.variant.task) for each in calibration.rows})), ""),
        ("Well behaved", f"{well} of {len(calibration.rows)}", "rows: task, shots, measure"),
    )
    cells = "".join(
        f"<div><dt>{name}</dt><dd>{escape(value)}{f' <small>{escape(more)}</small>' if more else ''}</dd></div>"
        for name, value, more in facts
    )
    names = ", ".join(run.name for run in calibration.runs)
    return (
        f'<header><h1>Calibration of {len(calibration.runs)} runs</h1><p class="note">{escape(names)}</p>'
        f'<dl class="facts">{cells}</dl></header>'
    )


def _use(calibration: Calibration) -> str:
    columns = (("from FLOPs", "k v"), ("measure", "k"), ("tasks", ""))
    rows = "".join(row(columns, cells) for cells in words.recommendation_rows(calibration))
    note = "Of each task, the well behaved shots of highest signal to noise; accuracy only where it is above chance."
    return f'<h2>What to use</h2><p class="note">{note}</p>' + table(columns, rows)


def _groups(calibration: Calibration) -> str:
    counts = sorted({each.variant.shots for each in calibration.rows}, key=lambda shots: -1 if shots is None else shots)
    heads = ["no shots" if shots is None else "1 shot" if shots == 1 else f"{shots} shots" for shots in counts]
    columns = [("task", "k v"), ("measure", "k"), *((head, "n") for head in heads), ("group", "k")]
    rows = "".join(_group(calibration, group, counts, columns) for group in _by_task(calibration))
    keys = "".join(
        f'<span class="key"><span class="cell {style}"></span>{kind or "needs more runs or checkpoints"}</span>'
        for kind, style in _KINDS.items()
    )
    return f'<h2>Groups</h2><p class="note">Signal to noise. {keys}</p>' + table(columns, rows)


def _group(
    calibration: Calibration, group: TaskGroup, counts: Sequence[int | None], columns: Sequence[tuple[str, str]]
) -> str:
    by_shots = {each.variant.shots: each for each in group.rows}
    cells = [escape(calibration.labels[group.rows[0].variant]), group.rows[0].measure.replace("_", " ")]
    for shots in counts:
        each = by_shots.get(shots)
        title = "" if each is None else escape(each.kind or each.missing)
        cells.append(
            "" if each is None else f'<span class="cell {_KINDS[each.kind]}" title="{title}">{words.snr(each)}</span>'
        )
    cells.append(escape(words.group_name(group)))
    named = zip(columns, cells, strict=True)
    return "<tr>" + "".join(f'<td class="{k}" data-of="{escape(n)}">{cell}</td>' for (n, k), cell in named) + "</tr>"


def _bars(calibration: Calibration) -> str:
    known = [each for each in calibration.rows if each.snr is not None]
    if not known:
        return ""
    high = min(_SNR_SHOWN, max(each.snr or 0.0 for each in known)) or None
    is_long = any(len(_bar_name(calibration, each)) > _LONG for each in known)
    charts = []
    for colour, measure in enumerate(MEASURES):
        rows = [each for each in known if each.measure == measure]
        bars = [
            Bar(
                _bar_name(calibration, each),
                min(each.snr or 0.0, _SNR_SHOWN),
                text=words.snr(each),
                colour=colour if (each.snr or 0.0) >= SNR_BOUND else _BELOW,
            )
            for each in rows[:_BARS]
        ]
        more = f": the {_BARS} highest of {len(rows)}" if len(rows) > _BARS else ""
        title = measure.replace("_", " ").capitalize() + more
        charts += (
            [f"<figure>{bar_chart(bars, title=title, high=high, width=480 if is_long else _WIDTH)}</figure>"]
            if bars
            else []
        )
    note = f"Grey: below {SNR_BOUND:g}, too little for a well behaved row. Bars end at {_SNR_SHOWN:g}; (5): shots."
    grid = "grid" if is_long else "grid three"
    return f'<h2>Signal to noise</h2><p class="note">{note}</p><div class="{grid}">{"".join(charts)}</div>'


def _bar_name(calibration: Calibration, each: Row) -> str:
    return calibration.labels[each.variant] + ("" if each.variant.shots is None else f" ({each.variant.shots})")


def _scores(calibration: Calibration) -> str:
    parts = []
    for label, groups in groupby(_by_task(calibration), lambda group: calibration.labels[group.rows[0].variant]):
        figures = "".join(f"<figure>{_chart(group)}</figure>" for group in groups)
        parts.append(f'<h3>{escape(label)}</h3><div class="grid three">{figures}</div>')
    note = (
        "Points: the last score of each run, with the 95 % interval where it has one. Thin lines: scores of each run "
        "over its steps. Dashed: chance."
    )
    return f'<h2>Scores over FLOPs</h2><p class="note">{note}</p>' + "".join(parts)


def _chart(group: TaskGroup) -> str:
    series, crosses = [], []
    for colour, each in enumerate(group.rows):
        finals = each.finals
        name = f"{words.shots(each)} shots" if each.variant.shots is not None else "last scores"
        series.append(Series(name, [p.flops for p in finals], [p.value for p in finals], colour=colour))
        for run in each.points:
            series.append(Series("", [p.flops for p in run], [p.value for p in run], faint=True, colour=colour))
        for point in finals:
            if point.interval is not None:  # a thin line, as whiskers do not extend the axis
                series.append(Series("", [point.flops] * 2, point.interval, faint=True, colour=colour))
            label = f"{name}, step {point.step:,}: {point.value:.4g}"
            crosses.append(Cross(point.flops, point.value, label, y_interval=point.interval, colour=colour))
    ends = [point.flops for each in group.rows for run in each.points for point in run]
    first = group.rows[0]
    if first.measure == "accuracy" and first.chance is not None:
        series.append(Series("chance", [min(ends), max(ends)], [first.chance] * 2, dashed=True, colour=7))
    return line_chart(
        series,
        crosses=crosses,
        title=first.measure.replace("_", " ").capitalize()
        + (" (lower is better)" if first.measure == MEASURES[2] else ""),
        x_label="training FLOPs",
        log_x=True,
        format_y=format_frac if first.measure == "accuracy" else None,
        width=_WIDTH,
        height=_HEIGHT,
    )


def _rows(calibration: Calibration) -> str:
    kinds = ("k", "n", "k", "n", "n", "n", "n", "n", "n v", "n", "n", "n", "k", "n")
    columns = tuple(zip(words.COLUMNS, kinds, strict=True))
    rows = "".join(row(columns, words.cells(calibration, each)) for each in calibration.rows)
    notes = "".join(f'<p class="note">{escape(note[:1].upper() + note[1:])}.</p>' for note in words.notes(calibration))
    summary = f"<summary>{len(calibration.rows)} rows: task, shots, measure</summary>"
    return f'<h2>All rows</h2>{notes}<details class="dense">{summary}{table(columns, rows)}</details>'


def _by_task(calibration: Calibration) -> list[TaskGroup]:
    """Return the groups with those of a task side by side, the task of the highest signal to noise first."""
    order = list(dict.fromkeys(calibration.labels[group.rows[0].variant] for group in calibration.groups))
    return sorted(
        calibration.groups,
        key=lambda group: (
            order.index(calibration.labels[group.rows[0].variant]), MEASURES.index(group.rows[0].measure)
        ),
    )  # fmt: skip
