"""Samples and scores as text for the terminal. Control characters of samples are written as escapes."""

import json
import re
from collections.abc import Iterator, Sequence

from smalti.evals.reader.flags import Flag
from smalti.evals.reader.scores import TaskScores
from smalti.evals.samples import Sample
from smalti.evals.statistics.intervals import Estimate

_CONTROLS = re.compile(
    "[\x00-\x09\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff\ud800-\udfff\U000e0000-\U000e007f]"
)
_PROMPT_LINES = 16
_PROMPT_CHARACTERS = 2000
_CHOICES = 6


def harmless(text: str) -> str:
    r"""Return the text with control characters, and those that change the direction of text, as escapes such as \x1b.

    A newline is left as it is, and a tab becomes blanks.
    """
    return _CONTROLS.sub(lambda match: match[0].encode("unicode_escape").decode(), text.expandtabs(4))


def sample_lines(sample: Sample, flag: Flag | None, *, names: tuple[str, ...] = ()) -> Iterator[str]:
    """Yield the lines of a sample: head, prompt, and answers with their probabilities.

    ``names``: of the two models, where there is a second one.
    """
    yield harmless(f"{sample.name}  {', '.join(_facts(sample))}").replace("\n", " ")
    if flag is not None:
        note = f": {flag.note}" if flag.note else ""
        yield harmless(f"  flag: {flag.flag}{note}").replace("\n", " ")
    yield from _block(sample.prompt, "  | ", last=sample.bits_per_byte is None)
    if sample.continuation is not None:
        yield from _block(f"... {sample.continuation}", "  | ", last=False)
    if sample.choices:
        yield from _choices(sample, names)
        return
    labels = names if sample.other else ("answer",)
    for label, result in zip(labels, (sample, sample.other), strict=False):
        if result is not None and result.completion is not None:
            yield f"  {harmless(label)}{_grade(result)}:"
            yield from _block(result.completion, "  > ", last=False)
            if result.parsed is not None and result.parsed != result.completion:
                yield from _block(f"parsed: {result.parsed}", "    ", last=False)
    if sample.answers:
        yield from _block(f"gold: {' | '.join(sample.answers)}", "    ", last=False)
    if sample.more:
        yield from _block(f"other fields: {json.dumps(sample.more, ensure_ascii=False)}", "    ", last=False)


def score_table(scores: Sequence[TaskScores]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Return the head and rows of a table of scores; the columns "after" are left out where no flag has an effect."""
    flagged = any(score.excluded or score.accepted for score in scores)
    head: tuple[str, ...] = ("task", "metric", "before" if flagged else "value", "95 % interval", "n")
    rows: list[tuple[str, ...]] = []
    for score in scores:
        row = (harmless(score.task), score.metric.replace("_", " "), *_score(score.before))
        rows.append((*row, *_score(score.after), _effect(score)) if flagged else row)
    return ((*head, "after", "95 % interval", "n", "flags") if flagged else head), rows


def _effect(score: TaskScores) -> str:
    effects = ((score.excluded, "excluded"), (score.accepted, "accepted"))
    return ", ".join(f"{count} {what}" for count, what in effects if count)


def _score(score: Estimate | None) -> tuple[str, str, str]:
    if score is None:
        return "-", "-", "0"
    spread = "-" if score.interval is None else "{:.3f} to {:.3f}".format(*score.interval)
    return f"{score.value:.3f}", spread, f"{score.n:,}"


def _facts(sample: Sample) -> list[str]:
    facts = [] if sample.correct is None else ["correct" if sample.correct else "WRONG"]
    facts += [word for word, is_so in (("unparsed", sample.unparsed), ("truncated", sample.truncated)) if is_so]
    if sample.bits_per_byte is not None:
        facts.append(f"{sample.bits_per_byte:.3f} bits per byte of {sample.n_bytes:,} bytes")
        if sample.other is not None and sample.other.bits_per_byte is not None:
            facts.append(f"the other model {sample.other.bits_per_byte:.3f}")
    if sample.confidence is not None and len(sample.probabilities) > 1:
        facts.append(f"P(answer) {sample.confidence:.3f}")
    if sample.gold_probability is not None:
        facts.append(f"P(gold) {sample.gold_probability:.3f}")
    return facts


def _grade(sample: Sample) -> str:
    facts = [] if sample.correct is None else ["correct" if sample.correct else "wrong"]
    return f" ({', '.join(facts)})" if facts else ""


def _choices(sample: Sample, names: tuple[str, ...]) -> Iterator[str]:
    """Yield the likeliest choices, the right one and the second model's, in the order of the item."""
    other = sample.other
    labels = names if other else ("answer", "")
    must = {sample.gold, sample.choice, other.choice if other else None}
    order = sorted(range(len(sample.choices)), key=lambda row: (row not in must, -_at(sample.probabilities, row)))
    for row in sorted(order[:_CHOICES]):
        marks = [
            mark
            for mark, is_so in (
                ("gold", row == sample.gold),
                (labels[0], row == sample.choice),
                (labels[1], other is not None and row == other.choice),
            )
            if is_so
        ]
        numbers = [_at(each.probabilities, row) for each in (sample, other) if each is not None and each.probabilities]
        shares = "  ".join(f"{number:.3f}" for number in numbers)
        text = harmless(sample.choices[row].strip()).replace("\n", "\\n")
        yield f"  {'>' if row == sample.choice else ' '} {shares}  {text}{harmless(_in_brackets(marks))}"
    if len(order) > _CHOICES:
        yield f"    ({len(order) - _CHOICES} more choices)"


def _in_brackets(marks: Sequence[str]) -> str:
    return f"  <- {', '.join(marks)}" if marks else ""


def _at(values: Sequence[float], index: int) -> float:
    return values[index] if index < len(values) else 0.0


def _block(text: str, margin: str, *, last: bool) -> Iterator[str]:
    """Yield the lines of a text, of a long one the last or the first."""
    shortened = text[-_PROMPT_CHARACTERS:] if last else text[:_PROMPT_CHARACTERS]
    lines = harmless(shortened).split("\n")
    shown = lines[-_PROMPT_LINES:] if last else lines[:_PROMPT_LINES]
    omitted = len(text) - len(shortened) + sum(map(len, lines)) - sum(map(len, shown))
    note = [f"{margin}({omitted:,} characters omitted)"] if omitted else []
    yield from [*(note if last else []), *(f"{margin}{line}".rstrip() for line in shown), *([] if last else note)]
