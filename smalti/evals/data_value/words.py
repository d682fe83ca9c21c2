"""The comparison of two versions in words, for the terminal and the page."""

from collections.abc import Mapping
from typing import Any

from smalti.base.units import format_bytes, format_count
from smalti.data.prepare.versions.prepare import EXTRA, FIRST, SECOND
from smalti.evals.data_value.result import DEPENDS, MEAN, NO_DIFFERENCE

SETS = ("", "folder", "documents", "text", "used", "times read")
SCORES = ("held-out text", "documents", "A", "B", "B - A", "95 % interval", "")
WORTH = ("bits per byte", "tokens of {better}", "tokens of {worse}", "ratio")

Cells = tuple[str, ...]


def set_rows(result: Mapping[str, Any]) -> list[Cells]:
    """Return the rows of ``SETS``."""
    return [
        (
            name,
            entry["folder"],
            f"{entry['documents']:,}",
            format_bytes(entry["bytes"]),
            f"{format_count(entry['tokens'])} tokens",
            f"{entry['epochs']:.2f}",
        )
        for name, entry in result["versions"].items()
    ]


def score_rows(result: Mapping[str, Any]) -> list[Cells]:
    """Return the rows of ``SCORES``."""
    rows = []
    for name, score in result["scores"].items():
        difference = score["difference"]
        documents = "" if name == MEAN else f"{result['heldout'][name]['documents']:,}"
        rows.append(
            (
                {MEAN: "mean of these", EXTRA: "--heldout"}.get(name, f"of {name}"),
                documents,
                *(f"{score[version]['value']:.4f}" for version in (FIRST, SECOND)),
                f"{difference['value']:+.4f}",
                " to ".join(f"{end:+.4f}" for end in difference["interval"]),
                difference["verdict"],
            )
        )
    return rows


def worth_head(result: Mapping[str, Any]) -> Cells:
    """Return the head of ``worth_rows``."""
    return tuple(name.format(**result["worth"]) for name in WORTH)


def worth_rows(result: Mapping[str, Any]) -> list[Cells]:
    """Return the tokens of both versions for the same loss."""
    worth = result["worth"]
    rows: list[Cells] = []
    for row in worth["rows"]:
        needed, end = row["worse_tokens"], worth["tokens"]
        ratio = f"{needed / row['tokens']:.2f}" if needed else f"at least {end / row['tokens']:.2f}"
        tokens = format_count(needed) if needed else f"not reached within {format_count(end)}"
        rows.append((f"{row['loss']:.4f}", format_count(row["tokens"]), tokens, ratio))
    return rows


def verdict(result: Mapping[str, Any]) -> str:
    """Return the answer as a sentence."""
    score = result["scores"][result["main"]]
    low, high = score["difference"]["interval"]
    if result["verdict"] == DEPENDS:
        return (
            "Which version is better depends on the held-out text: the sets contradict each other. Give text like that "
            "for which the model is meant: --heldout PATH."
        )
    if result["verdict"] == NO_DIFFERENCE:
        return (
            f"No difference is shown: B - A is {score['difference']['value']:+.4f} bits per byte "
            f"({low:+.4f} to {high:+.4f}). More --seeds or --tokens narrow the interval."
        )
    worth = result["worth"]
    bound = "at least " if worth["at_least"] else ""
    span = "" if worth["interval"] is None else " ({:.2f} to {:.2f})".format(*worth["interval"])
    return (
        f"{worth['better']} is better: {abs(score['difference']['value']):.4f} bits per byte less "
        f"({min(abs(low), abs(high)):.4f} to {max(abs(low), abs(high)):.4f}). A token of it is worth {bound}"
        f"{worth['ratio']:.2f}{span} of {worth['worse']}: it has the loss of {format_count(worth['tokens'])} tokens of "
        f"{worth['worse']} after {'at most ' if worth['at_least'] else ''}{format_count(worth['equal_tokens'])}."
    )


def notes(result: Mapping[str, Any]) -> list[str]:
    """Return what the tables do not say."""
    notes = [
        f"{result['seeds']} seeds, {format_count(result['tokens'])} training tokens in each run; intervals are over "
        "the seeds, for this model and this held-out text."
    ]
    for name, entry in result["heldout"].items():
        lost = [
            f"{entry[key]:,} {words}"
            for key, words in (("trained_on", "that a version is trained on"), ("near_trained", "near to one of these"))
            if entry[key]
        ]
        if lost:
            notes.append(f"Held-out documents of {name} that are left out: {', '.join(lost)}.")
    for name, entry in result["versions"].items():
        if entry["epochs"] > 4:
            notes.append(f"{name} is read {entry['epochs']:.1f} times: its text is repeated, which lowers its value.")
    return notes
