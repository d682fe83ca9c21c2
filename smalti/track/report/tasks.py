"""The section of the report about tasks that ran during training: accuracy over tokens, with its 95 % interval.

Tasks that MosaicML published for MPT-7B and ten other models have those scores as dashed lines.
"""

from dataclasses import replace

from smalti.base.chart import Series, line_chart
from smalti.base.units import format_frac
from smalti.track.report.read import RunRecord

_PREFIX = "icl/metrics/"
_MEASURES = ("/stderr", "/low", "/high", "/gold_probability", "/bits_per_byte", "/n_missing")
_SHOWN = 24
"""Most charts."""
_WIDTH, _HEIGHT = 440, 240
_TASKS = (
    "lambada_openai", "hellaswag", "piqa", "arc_easy", "arc_challenge", "boolq", "copa", "winograd", "winogrande",
    "triviaqa_sm_sub", "jeopardy", "mmlu",
)  # fmt: skip
PUBLISHED = {
    "MPT-7B": (0.703, 0.761, 0.799, 0.673, 0.394, 0.750, 0.813, 0.878, 0.683, 0.343, 0.308, 0.296),
    "LLaMA-7B": (0.738, 0.751, 0.792, 0.652, 0.411, 0.767, 0.779, 0.807, 0.675, 0.443, 0.334, 0.302),
    "StableLM-7B": (0.533, 0.411, 0.666, 0.435, 0.259, 0.606, 0.672, 0.646, 0.513, 0.049, 0.000, 0.251),
    "Pythia-7B": (0.667, 0.636, 0.761, 0.581, 0.325, 0.634, 0.769, 0.786, 0.607, 0.198, 0.022, 0.265),
    "Pythia-12B": (0.704, 0.672, 0.768, 0.605, 0.351, 0.675, 0.781, 0.847, 0.627, 0.233, 0.026, 0.253),
    "GPT-J-6B": (0.683, 0.665, 0.762, 0.583, 0.355, 0.648, 0.789, 0.833, 0.641, 0.234, 0.026, 0.261),
    "GPT-NeoX-20B": (0.719, 0.712, 0.780, 0.644, 0.392, 0.691, 0.781, 0.861, 0.665, 0.347, 0.146, 0.269),
    "Cerebras-7B": (0.636, 0.582, 0.744, 0.564, 0.311, 0.625, 0.734, 0.779, 0.603, 0.141, 0.012, 0.259),
    "Cerebras-13B": (0.635, 0.588, 0.740, 0.571, 0.321, 0.611, 0.719, 0.760, 0.602, 0.146, 0.013, 0.258),
    "OPT-7B": (0.677, 0.676, 0.773, 0.579, 0.329, 0.665, 0.719, 0.840, 0.656, 0.227, 0.020, 0.251),
    "OPT-13B": (0.692, 0.701, 0.774, 0.586, 0.345, 0.657, 0.805, 0.851, 0.670, 0.282, 0.126, 0.257),
}
"""Model -> zero-shot accuracy of ``_TASKS`` (MosaicML 2023, Introducing MPT-7B, table 1)."""


def tasks_section(run: RunRecord) -> str:
    """Return the section; empty for a run without such tasks."""
    names = [name for name in sorted(run.names) if name.startswith(_PREFIX) and not name.endswith(_MEASURES)]
    if not names:
        return ""
    names.sort(key=lambda name: not name.endswith("/core_average"))
    note = "Thin lines: the 95 % interval."
    if any(_task(name) in _TASKS for name in names):
        note += (
            " Grey: zero-shot scores of eleven models, published with MPT-7B; the lowest and the highest are named. "
            "Other numbers of examples in the prompts give other scores."
        )
    note += _partial(run, names)
    if len(names) > _SHOWN:
        note += f" {len(names) - _SHOWN} of {len(names)} scores are not shown; metrics.jsonl has all."
    grid = "".join(f"<figure>{_chart(run, name)}</figure>" for name in names[:_SHOWN])
    return f'<h2>Tasks during training</h2><p class="note">{note}</p><div class="grid">{grid}</div>'


def _partial(run: RunRecord, names: list[str]) -> str:
    """Return which averages of the Gauntlet are partial, and the benchmarks that they have."""
    n_missing = {name: run.series(f"{name}/n_missing")[1][-1:] for name in names}
    partial = [f"{_task(name)} (without {values[0]:.0f})" for name, values in n_missing.items() if any(values)]
    if not partial:
        return ""
    group = names[0].rpartition("/")[0]
    present = [_task(name) for name in names if name.startswith(group) and not n_missing[name]]
    return f" Partial averages: {', '.join(partial)}; the benchmarks that they have: {', '.join(present)}."


def _task(name: str) -> str:
    return name.rpartition("/")[2]


def _chart(run: RunRecord, name: str) -> str:
    rows = [row for row in run.rows if isinstance(row.get(name), int | float) and "time/token" in row]
    tokens, scores = [float(row["time/token"]) for row in rows], [float(row[name]) for row in rows]
    series = [Series(_task(name), tokens, scores, colour=0)]
    for end in ("low", "high"):
        ends = [float(row.get(f"{name}/{end}", "nan")) for row in rows]
        series.append(Series(end, tokens, ends, faint=True, colour=0))
    if _task(name) in _TASKS and tokens:
        published = {model: row[_TASKS.index(_task(name))] for model, row in PUBLISHED.items()}
        ends_of = {min(published, key=published.__getitem__), max(published, key=published.__getitem__)}
        for model, score in published.items():
            line = Series(model, [0, tokens[-1]], [score, score], colour=7)
            series.append(replace(line, named_at_end=True) if model in ends_of else replace(line, dashed=True))
    return line_chart(
        series, title=f"{_task(name)}: score over tokens", x_label="tokens", format_y=format_frac, width=_WIDTH,
        height=_HEIGHT,
    )  # fmt: skip
