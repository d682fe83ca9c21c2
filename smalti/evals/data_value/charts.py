"""Plots of a comparison: held-out bits per byte over the training tokens, and the difference to the first version."""

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from smalti.base.chart import Cross, Marker, Series, line_chart
from smalti.evals.data_value.result import losses, mean_curve
from smalti.evals.data_value.words import heldout_name

_BESIDE = 0.012
"""Distance of the intervals at the end, which would else cover one another, as a fraction of the plot's width."""
_X_LABEL = "training tokens"
Labels = Mapping[str, str]


def labels(result: Mapping[str, Any]) -> Labels:
    """Return what the legends say, by version: its letter and the last part of its folder."""
    return {letter: f"{letter} ({Path(entry['folder']).name})" for letter, entry in result["versions"].items()}


def loss_chart(result: Mapping[str, Any], name: str, names: Labels, *, width: int, height: int) -> str:
    """Plot the mean curve of each version on one held-out set, the runs behind it, and the end with its interval."""
    curves, series, crosses = result["curves"], [], []
    for colour, version in enumerate(curves):
        tokens = curves[version][0]["tokens"]
        series.append(Series(names[version], tokens, mean_curve(curves, version, name), colour=colour))
        series += [Series("", tokens, losses(run, name), faint=True, colour=colour) for run in curves[version]]
        at = _beside(tokens, colour, len(curves))
        crosses.append(_end(at, names[version], result["scores"][name][version], ".4f", colour))
    return line_chart(
        series,
        crosses=crosses,
        markers=_markers(result, name),
        title=f"Bits per byte of held-out text: {heldout_name(name)}",
        x_label=_X_LABEL,
        width=width,
        height=height,
    )


def difference_chart(result: Mapping[str, Any], name: str, names: Labels, *, width: int, height: int) -> str:
    """Plot the difference of each version to the first: the mean over the seeds, each seed, and the end's interval."""
    curves = result["curves"]
    first, *others = curves
    tokens = curves[first][0]["tokens"]
    series, crosses = [Series(names[first], tokens, [0.0] * len(tokens), colour=0)], []
    ends = {pair["second"]: pair["differences"][name] for pair in result["pairs"] if pair["first"] == first}
    for colour, version in enumerate(others, start=1):
        pairs = zip(curves[first], curves[version], strict=True)
        runs = [[y - x for x, y in zip(losses(a, name), losses(b, name), strict=True)] for a, b in pairs]
        means = [statistics.fmean(column) for column in zip(*runs, strict=True)]
        series.append(Series(names[version], tokens, means, colour=colour))
        series += [Series("", tokens, run, faint=True, colour=colour) for run in runs]
        crosses.append(
            _end(_beside(tokens, colour, len(curves)), f"{version} - {first}", ends[version], "+.4f", colour)
        )
    return line_chart(
        series,
        crosses=crosses,
        markers=_markers(result, name),
        title=f"Bits per byte more than {names[first]}: {heldout_name(name)}",
        x_label=_X_LABEL,
        width=width,
        height=height,
    )


def _markers(result: Mapping[str, Any], name: str) -> list[Marker]:
    """Return, of two versions, where the better one has the final loss of the worse one."""
    pair, *more = result["pairs"]
    worth = pair["worth"]
    if more or worth is None or name != result["main"]:
        return []
    return [Marker(worth["equal_tokens"], f"{worth['better']} has the final loss of {worth['worse']}")]


def _beside(tokens: Sequence[int], colour: int, n: int) -> float:
    return tokens[-1] - _BESIDE * (n - 1 - colour) * (tokens[-1] - tokens[0])


def _end(at: float, label: str, entry: Mapping[str, Any], style: str, colour: int) -> Cross:
    low, high = entry["interval"]
    text = f"{label}: {entry['value']:{style}} ({low:{style}} to {high:{style}})"
    return Cross(at, entry["value"], text, y_interval=(low, high), colour=colour)
