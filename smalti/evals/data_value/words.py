"""The comparison of versions in words, for the terminal and the page."""

from collections.abc import Mapping, Sequence
from typing import Any

from smalti.base.units import format_bytes, format_count
from smalti.data.prepare.versions.prepare import EXTRA
from smalti.evals.data_value.result import DEPENDS, MEAN, NO_DIFFERENCE

SETS = ("", "folder", "documents", "text", "used", "times read")
VERDICT = "result"
DIFFERENCES = ("", "held-out text", "bits per byte", "95 % interval", VERDICT, "worth of a token")
WORTH = ("bits per byte", "tokens of {better}", "tokens of {worse}", "ratio")

_DEPENDS = "Whether {first} or {second} is better depends on the held-out text: the sets contradict each other."
_GIVE = "Give text like that for which the model is meant: --heldout PATH."
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


def heldout_name(name: str) -> str:
    """Return the name of a held-out set in tables and plots."""
    return {MEAN: "mean of these", EXTRA: "--heldout"}.get(name, f"of {name}")


def score_head(result: Mapping[str, Any]) -> Cells:
    """Return the head of ``score_rows``."""
    return ("held-out text", "documents", *result["versions"])


def score_rows(result: Mapping[str, Any]) -> list[Cells]:
    """Return the loss of each version on each held-out set."""
    return [
        (
            heldout_name(name),
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
            heldout_name(name),
            f"{difference['value']:+.4f}",
            _span(difference["interval"], "+.4f"),
            difference["verdict"],
            "" if pair["worth"] is None or name != result["main"] else _ratio(pair["worth"]),
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


def worth_of_two(result: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return what the better version is worth, if two are compared and one is better."""
    pair, *more = result["pairs"]
    return None if more else pair["worth"]


def verdict(result: Mapping[str, Any]) -> str | None:
    """Return the answer as a sentence, if two versions are compared; of more the table of differences is the answer."""
    pair, *more = result["pairs"]
    if more:
        return None
    difference, worth = pair["differences"][result["main"]], pair["worth"]
    low, high = difference["interval"]
    if pair["verdict"] == DEPENDS:
        return f"{_DEPENDS.format(**pair)} {_GIVE}"
    if worth is None:
        return (
            f"No difference is shown: {pair['second']} - {pair['first']} is {difference['value']:+.4f} bits per byte "
            f"({_span((low, high), '+.4f')})."
        )
    return (
        f"{worth['better']} is better: {abs(difference['value']):.4f} bits per byte less "
        f"({min(abs(low), abs(high)):.4f} to {max(abs(low), abs(high)):.4f}). A token of it is worth {_ratio(worth)} "
        f"of {worth['worse']}: it has the loss of {format_count(worth['tokens'])} tokens of {worth['worse']} after "
        f"{'at most ' if worth['at_least'] else ''}{format_count(worth['equal_tokens'])}."
    )


def _ratio(worth: Mapping[str, Any]) -> str:
    if worth["at_least"]:
        return f"at least {worth['ratio']:.2f}"
    return f"{worth['ratio']:.2f} ({_span(worth['interval'], '.2f')})"


def _span(interval: Sequence[float], style: str) -> str:
    return " to ".join(format(end, style) for end in interval)


def notes(result: Mapping[str, Any]) -> list[str]:
    """Return what the tables do not say."""
    notes = [
        f"{result['seeds']} seeds, {format_count(result['tokens'])} training tokens in each run; intervals are over "
        "the seeds, for this model and this held-out text."
    ]
    pairs = result["pairs"]
    if any(pair["verdict"] == NO_DIFFERENCE for pair in pairs):
        notes.append("Where no difference is shown, more --seeds or --tokens narrow the interval.")
    if len(pairs) > 1:
        notes.append("Each interval is for one comparison: of many, one in twenty is wrong by chance.")
        notes += [f"{_DEPENDS.format(**pair)} {_GIVE}" for pair in pairs if pair["verdict"] == DEPENDS]
    for name, entry in result["heldout"].items():
        notes += [f"{other} holds out the same documents as {name}." for other in entry["also_of"]]
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
