"""The HTML page that compares runs: values side by side, differences of config, overlaid curves, evaluations."""

from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path

from smalti.base import store
from smalti.base.chart import standalone
from smalti.base.errors import UserError
from smalti.base.units import format_count, format_frac, format_seconds
from smalti.track.compare.comparison import Comparison, compare, value_text
from smalti.track.compare.differences import Difference
from smalti.track.compare.overlay import AXES, overlay
from smalti.track.report.html import document, row, table, wide_and_narrow
from smalti.track.report.read import RunRecord, read_run
from smalti.track.report.words import whole_steps

LOSS = "loss/train/total"
_SMALL = {"width": 440, "height": 240}
_CURVES = ("throughput/tokens_per_sec", "throughput/device/mfu", "l2_norm/grad/global", "moe/load_imbalance")


def comparison_page(runs: Sequence[RunRecord], *, metric: str | None = None, x: str | None = None) -> str:
    """Return the page, with ``metric`` over ``x`` as its large chart. Raises UserError for more runs than colours."""
    comparison = compare(runs)
    names = " ".join(escape(run.folder) for run in runs)
    sections = (
        _header(comparison),
        _side_by_side(runs, comparison),
        _config(comparison),
        _curves(runs, comparison.names, metric or _first_metric(runs), x or "step"),
        _evals(runs, comparison),
        f"<footer>Written by <code>smalti runs report {names}</code> from the run folders' files.</footer>",
    )
    return document(f"{', '.join(comparison.names)} - Smalti runs", sections)


def write_comparison(run_folders: Sequence[str | Path], *, output: str | Path | None = None) -> str:
    """Write the page to ``output``, or ``report.html`` beside the first run folder; returns its path."""
    path = str(output or Path(run_folders[0]).parent / "report.html")
    store.write_text(path, comparison_page([read_run(folder) for folder in run_folders]))
    return path


def write_plot(runs: Sequence[RunRecord], path: str | Path, *, metric: str | None = None, x: str | None = None) -> None:
    """Write the page (``.html``), or the large chart alone (``.svg``)."""
    kind = Path(path).suffix
    if kind == ".html":
        store.write_text(path, comparison_page(runs, metric=metric, x=x))
    elif kind == ".svg":
        names = compare(runs).names
        chart = overlay(runs, names, metric or _first_metric(runs), x=x or "step", width=1040, height=420)
        store.write_text(path, standalone(chart))
    else:
        raise UserError(f"--plot {path}: unknown kind of file", allowed=".html, .svg")


def _header(comparison: Comparison) -> str:
    chips = "".join(
        f'<span class="chip"><i style="background:var(--c{colour})"></i>{escape(name)}</span>'
        for colour, name in enumerate(comparison.names)
    )
    style = (
        "<style>.chip{display:inline-block;margin:10px 18px 0 0;font-weight:600}"
        ".chip i{display:inline-block;width:12px;height:12px;border-radius:3px;margin-right:7px;vertical-align:-1px}"
        "</style>"
    )
    return f"{style}<header><h1>{len(comparison.names)} runs</h1><div>{chips}</div></header>"


def _side_by_side(runs: Sequence[RunRecord], comparison: Comparison) -> str:
    lines: list[tuple[str, Callable[[RunRecord], str]]] = [
        ("state", lambda run: run.state),
        ("steps", lambda run: f"{run.rows[-1]['step'] if run.rows else '-'} of {whole_steps(run)}"),
        ("tokens", lambda run: _text(run.last("time/token"), format_count)),
        ("training time", lambda run: _text(run.last("time/train"), lambda hours: format_seconds(hours * 3600))),
        ("training loss, last 5 %", lambda run: _text(run.tail_mean(LOSS, frac=0.05), "{:.4f}".format)),
        *((_short(name), _last(name)) for name in _held_out(runs)),
        ("tokens/s, median", lambda run: _text(run.median("throughput/tokens_per_sec"), format_count)),
        ("MFU, median", lambda run: _text(run.median("throughput/device/mfu"), format_frac)),
    ]
    rows = [(title, *(write(run) for run in runs)) for title, write in lines]
    return _table(("", *comparison.names), [cells for cells in rows if any(cell != "-" for cell in cells[1:])])


def _config(comparison: Comparison) -> str:
    blocks = []
    for title, rows in (
        ("Config: identity", comparison.identity),
        ("Config: placement", comparison.placement),
        ("Code and machine", comparison.provenance),
    ):
        if rows:
            written = [(key, *(value_text(value, longest=80) for value in row)) for key, row in rows.items()]
            blocks.append(_table((title, *comparison.names), written))
    notes = "".join(f'<p class="note">{escape(note)}</p>' for note in comparison.notes)
    return "<h2>What differs</h2>" + ("".join(blocks) or "<p>Nothing in config, code or machine.</p>") + notes


def _curves(runs: Sequence[RunRecord], names: Sequence[str], metric: str, x: str) -> str:
    if not any(run.rows for run in runs):
        return "<h2>Training</h2><p>No step has been logged yet.</p>"
    large = wide_and_narrow(
        overlay(runs, names, metric, x=x, width=1040, height=380),
        overlay(runs, names, metric, x=x, width=360, height=300),
    )
    known = {name for run in runs for name in run.names}
    wanted = [(metric, axis) for axis, place in AXES.items() if axis != x and place in {*known, "step"}]
    wanted += [(LOSS, "step")] if metric != LOSS else []
    rates = sorted(name for name in known if name.startswith("lr-"))
    wanted += [(name, "step") for name in (*_held_out(runs), *rates, *_CURVES)]
    small = "".join(
        f"<figure>{overlay(runs, names, name, x=axis, **_SMALL)}</figure>" for name, axis in wanted if name in known
    )
    return f'<h2>Training</h2><figure>{large}</figure><div class="grid below">{small}</div>'


def _first_metric(runs: Sequence[RunRecord]) -> str:
    """Return the training loss, or the first metric of runs without one."""
    known = sorted({name for run in runs for name in run.names if "/" in name})
    return LOSS if LOSS in known or not known else known[0]


def _evals(runs: Sequence[RunRecord], comparison: Comparison) -> str:
    blocks = []
    for suite, tasks in comparison.evals.items():
        head = (
            "task",
            comparison.names[0],
            *(text for name in comparison.names[1:] for text in (name, f"{name}: difference")),
        )
        rows = []
        for task, differences in tasks.items():
            cells = [task, _text(differences[0].before, "{:.3f}".format)]
            for difference in differences:
                cells += [_text(difference.after, "{:.3f}".format), _difference_text(difference)]
            rows.append(tuple(cells))
        blocks.append(f'<p class="note">Suite <b>{escape(suite)}</b></p>' + _table(head, rows))
    if not blocks:
        return ""
    note = (
        '<p class="note">± is the 95 % interval of the difference, paired where both runs had the same questions; '
        "two seeds of one config may be further apart.</p>"
    )
    return "<h2>Evaluation</h2>" + "".join(blocks) + note


def _difference_text(difference: Difference) -> str:
    if difference.value is None:
        return "-"
    spread = "" if difference.half_width is None else f" ± {difference.half_width:.3f}"
    return f"{difference.value:+.3f}{spread}" + (f", {difference.verdict}" if difference.verdict else "")


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    columns = [(name, "k" if index == 0 else "") for index, name in enumerate(head)]
    return table(columns, "".join(row(columns, cells) for cells in rows))


def _held_out(runs: Sequence[RunRecord]) -> list[str]:
    names = sorted({name for run in runs for name in run.names if name.startswith("metrics/eval/")})
    return [name for name in names if name.endswith("/bits_per_byte")]


def _short(name: str) -> str:
    return f"held-out {name.split('/')[2]}, bits per byte"


def _last(name: str) -> Callable[[RunRecord], str]:
    return lambda run: _text(run.last(name), "{:.4f}".format)


def _text(value: float | None, write: Callable[[float], str]) -> str:
    return "-" if value is None else write(value)
