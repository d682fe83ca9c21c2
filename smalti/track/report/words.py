"""Formats values of a run folder as text, for the page and the terminal."""

import json
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from smalti.base.units import format_frac
from smalti.config.durations import RunLength
from smalti.track.names import EVAL_EMA
from smalti.track.report.read import RunRecord


def event_words(event: Mapping[str, Any]) -> str:
    """Return an event's fields other than time, attempt and kind: ``step 7, code 2.812, prose 2.982 bits/byte``."""
    facts = {key: value for key, value in event.items() if key not in ("time", "attempt", "event", "metrics")}
    what = [f"{key} {brief(value)}" for key, value in facts.items()]
    if isinstance(event.get("metrics"), dict):
        what.append(_metrics(event["metrics"]))
    return ", ".join(filter(None, what))


def score_words(score: Mapping[str, Any]) -> tuple[str, str, str, str, str]:
    """Return measure, value, 95 % interval, n and baselines of a task's score."""
    beside = chance_words(score)
    beside += [
        f"{label} {score[key]:.3f}"
        for key, label in (("gzip_bits_per_byte", "gzip -9"), ("xz_bits_per_byte", "xz -9"))
        if is_number(score.get(key))
    ]
    if score.get("verdict") and score.get("chance", 1):
        beside.append(str(score["verdict"]))
    beside += share_words(score)
    if score.get("partial"):
        beside.append(str(score["partial"]))
    value = f"{score['value']:.3f}" if is_number(score.get("value")) else "-"
    ends = interval(score)
    spread = "-" if ends is None else f"{ends[0]:.3f} to {ends[1]:.3f}"
    return str(score.get("metric", "")).replace("_", " "), value, spread, str(score.get("n", "-")), ", ".join(beside)


def chance_words(score: Mapping[str, Any]) -> list[str]:
    """Return the accuracy of random answers, and that of the most frequent label where it is higher, in words."""
    if not is_number(score.get("chance")) or not score["chance"]:
        return []  # a random text is never right, so any right answer is above chance
    majority = score.get("baseline", score["chance"])
    return [f"chance {score['chance']:.3f}", *([f"majority {majority:.3f}"] if majority > score["chance"] else [])]


def share_words(score: Mapping[str, Any]) -> list[str]:
    """Return the shares of truncated answers (also 0), of answers without a result and of cut prompts, in words."""
    named = (
        ("truncated_frac", "answers truncated"),
        ("unparsed_frac", "answers unparsed"),
        ("cut_frac", "prompts cut"),
    )
    return [
        f"{format_frac(score[key])} of {name}"
        for key, name in named
        if is_number(score.get(key)) and (score[key] or key == "truncated_frac")
    ]


def interval(score: Mapping[str, Any]) -> tuple[float, float] | None:
    """Return the ends of a score's 95 % interval, computed from its standard error if it has no interval; else None."""
    ends = score.get("interval")
    if isinstance(ends, list) and len(ends) == 2 and all(map(is_number, ends)):
        return float(ends[0]), float(ends[1])
    if is_number(score.get("stderr")) and is_number(score.get("value")):
        half = 1.96 * score["stderr"]
        return score["value"] - half, score["value"] + half
    return None


def whole_steps(run: RunRecord) -> str:
    """Return the number of steps of the whole run as text; ``?`` where the config does not determine it."""
    length = RunLength.of_plain(run.config)
    return "?" if length is None else str(length.total_steps)


def brief(value: Any) -> str:
    """Return a value as short text."""
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, dict):
        return "; ".join(f"{key} {brief(child)}" for key, child in value.items())
    if isinstance(value, list):
        return " ".join(map(brief, value))
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 200 else text[:197] + "..."


def parse_time(value: Any) -> datetime | None:
    """Return the time of an event, or None where it is not a time."""
    try:
        return datetime.fromisoformat(str(value))
    except ValueError:
        return None


def is_number(value: Any) -> bool:
    """Return whether a value is a number, and neither NaN nor a bool."""
    return isinstance(value, int | float) and not isinstance(value, bool) and value == value


def _metrics(metrics: Mapping[str, Any]) -> str:
    """Return ``code 2.812, prose 2.982 bits/byte``; losses where no bits were measured, else all names and values."""
    for suffix, unit in (("/bits_per_byte", "bits/byte"), ("/LanguageCrossEntropy", "nats/token")):
        values = {name: value for name, value in metrics.items() if name.endswith(suffix) and is_number(value)}
        if values:
            named = (f"{_source(name.removesuffix(suffix))} {value:.3f}" for name, value in values.items())
            return f"{', '.join(named)} {unit}"
    return ", ".join(f"{name} {brief(value)}" for name, value in metrics.items())


def _source(name: str) -> str:
    """Return the source in the name of a metric, and that the weights were the moving average if they were."""
    return name.rpartition("/")[2] + (" (EMA)" if name.startswith(EVAL_EMA) else "")
