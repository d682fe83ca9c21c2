"""Tables and plots of a comparison, with the names of the versions in place of their letters."""

from collections.abc import Mapping
from typing import Any

from smalti.evals.data_value.charts import difference_chart, loss_chart

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
    """Plot bits per byte of the held-out text over tokens, and the difference to the first version."""
    names, main = dict(zip(figures["versions"], figures["names"], strict=True)), figures["main"]
    charts = {"value": loss_chart, "value-difference": difference_chart}
    return {
        f"{name}-{what}.svg": draw(figures, main, names, width=720, height=320).replace(": --heldout", "")
        for what, draw in charts.items()
    }
