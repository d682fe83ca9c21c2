"""The comparison in words, for the terminal and the page."""

from collections.abc import Iterator, Mapping
from typing import Any

from smalti.base.units import format_bytes, format_count, format_flops, format_frac, format_seconds
from smalti.tune.compare.questions import ANSWERS, LIKELIHOOD

QUALITY = ("way", "bits per byte", "95 % interval", "difference", "exact", "95 % interval", "difference")
COST = ("way", "trained", "training", "in", "kept", "prompt", "an answer", "in", "with 1,000 answers")
LOST = ("held-out set", "way", "bits per byte", "95 % interval", "difference")

Cells = tuple[str, ...]


def quality_rows(result: Mapping[str, Any]) -> list[Cells]:
    """Return the rows of ``QUALITY``."""
    return [
        (way, *_score(entry["scores"].get(LIKELIHOOD)), *_score(entry["scores"].get(ANSWERS)))
        for way, entry in result["ways"].items()
    ]


def cost_rows(result: Mapping[str, Any]) -> list[Cells]:
    """Return the rows of ``COST``."""
    rows: list[Cells] = []
    for way, entry in result["ways"].items():
        cost = entry["cost"]
        trains = cost["train_flops"] > 0
        rows.append(
            (
                way,
                format_count(cost["trained_params"]) if trains else "-",
                format_flops(cost["train_flops"]) if trains else "-",
                format_seconds(cost["train_s"]) if trains else "-",
                format_bytes(cost["kept_bytes"]) if cost["kept_bytes"] else "-",
                f"{cost['prompt_tokens']:.0f} tokens",
                format_flops(cost["answer_flops"]),
                "-" if cost["answer_s"] is None else format_seconds(cost["answer_s"]),
                format_flops(cost["train_flops"] + 1000 * cost["answer_flops"]),
            )
        )
    return rows


def lost_rows(result: Mapping[str, Any]) -> list[Cells]:
    """Return the rows of ``LOST``: the held-out sets of all ways."""
    tasks = dict.fromkeys(task for entry in result["ways"].values() for task in entry["scores"])
    return [
        (task.partition("/")[2], way, *_score(entry["scores"][task]))
        for task in tasks
        if task not in (LIKELIHOOD, ANSWERS)
        for way, entry in result["ways"].items()
        if task in entry["scores"]
    ]


def notes(result: Mapping[str, Any]) -> Iterator[str]:
    """Yield what the tables do not say."""
    yield (
        f"{result['questions']:,} held-out questions, the same for all ways; difference: from {result['baseline']}, "
        "paired by question; not shown: within the noise, corrected for the number of comparisons."
    )
    if result["left_out"]:
        yield f"{result['left_out']:,} held-out questions are left out: no answer of text, or too long."
    if any(ANSWERS not in entry["scores"] for entry in result["ways"].values()):
        yield "The right answers are long, so no generated answer is compared with them."
    for tuned, answers in result["break_even"].items():
        than = ", than ".join(f"{way} after {format_count(max(1.0, n))} answers" for way, n in answers.items())
        yield f"{tuned} has cost fewer FLOPs than {than}, training included."


def _score(score: Mapping[str, Any] | None) -> Cells:
    if score is None:
        return "-", "", ""
    number = format_frac if score["metric"] == "accuracy" else "{:.3f}".format
    interval = "(n too small)" if score["interval"] is None else " to ".join(map(number, score["interval"]))
    difference = score.get("difference")
    if difference is None:
        return number(score["value"]), interval, ""
    value = difference["value"]
    signed = f"{100 * value:+.1f} points" if score["metric"] == "accuracy" else f"{value:+.3f}"
    verdict = difference["verdict"].replace("no difference shown", "not shown")
    return number(score["value"]), interval, f"{signed} {verdict}"
