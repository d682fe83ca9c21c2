"""Tables and plots of a comparison, with the names of the versions in place of their letters."""

import statistics
from collections.abc import Mapping
from typing import Any

from smalti.base.chart import Cross, Series, line_chart

Figures = Mapping[str, Any]


def report(figures: Figures) -> str:
    """Return the tables as Markdown: the versions, the differences, and what was memorised."""
    names = dict(zip(figures["versions"], figures["names"], strict=True))
    scores = figures["scores"][figures["main"]]
    lines = ["| version | documents | tokens | times read | bits per byte |", "|---|---|---|---|---|"]
    for letter, entry in figures["versions"].items():
        value, (low, high) = scores[letter]["value"], scores[letter]["interval"]
        shown = f"{value:.4f} ({low:.4f} to {high:.4f})"
        lines.append(
            f"| {names[letter]} | {entry['documents']:,} | {entry['tokens']:,} | {entry['epochs']:.2f} | {shown} |"
        )
    lines += ["", "| | held-out text | bits per byte | 95 % interval | |", "|---|---|---|---|---|"]
    for pair in figures["pairs"]:
        for heldout, difference in pair["differences"].items():
            low, high = difference["interval"]
            letter, _, better = difference["verdict"].partition(" ")
            verdict = f"{names[letter]} {better}" if letter in names else difference["verdict"]
            lines.append(
                f"| {names[pair['second']]} - {names[pair['first']]} | {names.get(heldout, heldout)} "
                f"| {difference['value']:+.4f} | {low:+.4f} to {high:+.4f} | {verdict} |"
            )
        if pair["worth"] is not None:
            worth = pair["worth"]
            bound = "at least " * worth["at_least"]
            interval = "" if worth["interval"] is None else " ({:.2f} to {:.2f})".format(*worth["interval"])
            lines.append(f"| | tokens of {names[worth['worse']]} for one | {bound}{worth['ratio']:.2f}{interval} | | |")
    return "\n".join([*lines, "", *_memorised(figures, names)])


def _memorised(figures: Figures, names: Mapping[str, str]) -> list[str]:
    lines = ["| version | windows of the crawl | n | extractable | matched |", "|---|---|---|---|---|"]
    for letter, tasks in figures.get("memorised", {}).items():
        parts = {"all": tasks["train"], **tasks["train"]["by_occurrences"], "held-out": tasks["heldout"]}
        for group, part in parts.items():
            if not part["n"]:
                continue
            low, high = part["interval"]
            shown = f"{part['value']:.3f} ({low:.3f} to {high:.3f})"
            matched = f"{part['matched_frac']['value']:.3f}"
            lines.append(f"| {names[letter]} | {group} | {part['n']} | {shown} | {matched} |")
    return lines if len(lines) > 2 else []


def pictures(name: str, figures: Figures) -> dict[str, str]:
    """Plot bits per byte of held-out text over tokens, and the difference to the first version."""
    names = dict(zip(figures["versions"], figures["names"], strict=True))
    curves, main = figures["curves"], figures["main"]
    millions = [tokens / 1e6 for tokens in next(iter(curves.values()))[0]["tokens"]]
    losses = {letter: [run["bits_per_byte"][main] for run in runs] for letter, runs in curves.items()}
    first, *others = names
    heldout, gains, crosses = [], [], []
    for colour, (letter, runs) in enumerate(losses.items()):
        heldout += [Series("", millions, run, faint=True, colour=colour) for run in runs]
        mean = [statistics.fmean(column) for column in zip(*runs, strict=True)]
        heldout.append(Series(names[letter], millions, mean, colour=colour))
        if letter == first:
            gains.append(Series(names[first], millions, [0.0] * len(millions), colour=colour))
            continue
        base = [statistics.fmean(column) for column in zip(*losses[first], strict=True)]
        gains.append(Series(names[letter], millions, [a - b for a, b in zip(mean, base, strict=True)], colour=colour))
        pair = next(pair for pair in figures["pairs"] if (pair["first"], pair["second"]) == (first, letter))
        end = pair["differences"][main]
        low, high = end["interval"]
        label = f"{names[letter]} - {names[first]}: {end['value']:+.4f} ({low:+.4f} to {high:+.4f})"
        beside = millions[-1] * (1 - 0.012 * (len(others) - colour))  # intervals are beside each other
        crosses.append(Cross(beside, end["value"], label, y_interval=(low, high), colour=colour))
    seeds = f"mean of {figures['seeds']} seeds"
    return {
        f"{name}-value.svg": line_chart(
            heldout, title=f"Held-out bits per byte: {seeds}, each thin", x_label="million training tokens"
        ),
        f"{name}-value-difference.svg": line_chart(
            gains,
            crosses=crosses,
            title=f"Difference to {names[first]} in bits per byte (less is better), with 95 % intervals at the end",
            x_label="million training tokens",
        ),
    }
