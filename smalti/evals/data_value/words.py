"""The comparison of versions in words, for the terminal and the page."""

from collections.abc import Mapping, Sequence
from typing import Any

from smalti.base.units import format_bytes, format_count
from smalti.data.prepare.versions.prepare import EXTRA
from smalti.evals.data_value.result import DEPENDS, MEAN, NO_DIFFERENCE

SETS = ("", "folder", "documents", "text", "used", "times read")
DIFFERENCES = ("", "held-out text", "bits per byte", "95 % interval", "")
WORTH = ("bits per byte", "tokens of {better}", "tokens of {worse}", "ratio")

_HELDOUT = {MEAN: "mean of these", EXTRA: "--heldout"}
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


def score_head(result: Mapping[str, Any]) -> Cells:
    """Return the head of ``score_rows``."""
    return ("held-out text", "documents", *result["versions"])


def score_rows(result: Mapping[str, Any]) -> list[Cells]:
    """Return the loss of each version on each held-out set."""
    return [
        (
            _HELDOUT.get(name, f"of {name}"),
            "" if name == MEAN else f"{result['heldout'][name]['documents']:,}",
            *(f"{score['value']:.4f}" for score in scores.values()),
        )
        for name, scores in result["scores"].items()
    ]


def difference_rows(result: Mapping[str, Any]) -> list[Cells]:
    """Return the rows of ``DIFFERENCES``."""
    return [
        (
            f"{pair['second']} - {pair['first']}",
            _HELDOUT.get(name, f"of {name}"),
            f"{difference['value']:+.4f}",
            _span(difference["interval"], "+.4f"),
            difference["verdict"],
        )
        for pair in result["pairs"]
        for name, difference in pair["differences"].items()
    ]


def worth_head(worth: Mapping[str, Any]) -> Cells:
    """Return the head of ``worth_rows``."""
    return tuple(name.format(**worth) for name in WORTH)


def worth_rows(worth: Mapping[str, Any]) -> list[Cells]:
    """Return the tokens of both versions for the same loss."""
    rows: list[Cells] = []
    for row in worth["rows"]:
        needed, end = row["worse_tokens"], worth["tokens"]
        ratio = f"{needed / row['tokens']:.2f}" if needed else f"at least {end / row['tokens']:.2f}"
        tokens = format_count(needed) if needed else f"not reached within {format_count(end)}"
        rows.append((f"{row['loss']:.4f}", format_count(row["tokens"]), tokens, ratio))
    return rows


def verdicts(result: Mapping[str, Any]) -> list[str]:
    """Return the answers as sentences, one for each pair of versions."""
    pairs = result["pairs"]
    named = len(pairs) > 1
    return [
        f"{pair['first']} and {pair['second']}: " * named + _verdict(pair, pair["differences"][result["main"]])
        for pair in pairs
    ]


def _verdict(pair: Mapping[str, Any], difference: Mapping[str, Any]) -> str:
    low, high = difference["interval"]
    if pair["verdict"] == DEPENDS:
        return (
            "Which version is better depends on the held-out text: the sets contradict each other. Give text like that "
            "for which the model is meant: --heldout PATH."
        )
    if pair["verdict"] == NO_DIFFERENCE:
        return (
            f"No difference is shown: {pair['second']} - {pair['first']} is {difference['value']:+.4f} bits per byte "
            f"({_span((low, high), '+.4f')}). More --seeds or --tokens narrow the interval."
        )
    worth = pair["worth"]
    bound = "at least " if worth["at_least"] else ""
    span = "" if worth["interval"] is None else f" ({_span(worth['interval'], '.2f')})"
    return (
        f"{worth['better']} is better: {abs(difference['value']):.4f} bits per byte less "
        f"({min(abs(low), abs(high)):.4f} to {max(abs(low), abs(high)):.4f}). A token of it is worth {bound}"
        f"{worth['ratio']:.2f}{span} of {worth['worse']}: it has the loss of {format_count(worth['tokens'])} tokens of "
        f"{worth['worse']} after {'at most ' if worth['at_least'] else ''}{format_count(worth['equal_tokens'])}."
    )


def _span(interval: Sequence[float], style: str) -> str:
    return " to ".join(format(end, style) for end in interval)


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
