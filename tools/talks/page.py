"""docs/audit/talks.md: every printed figure of the talks with ours beside it, by topic.

The page has only the results of the rows and of the planner's functions, nothing typed by hand.
"""

import re
import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator

from talks import (
    cost_of_training,
    experts,
    failures,
    labels,
    memory_needed,
    mixtures,
    quality,
    time_of_training,
    tokens_per_param,
)
from talks.rows import TALKS, Figure, Section, Table, Verdict

SECTIONS: tuple[Section, ...] = (
    *time_of_training.SECTIONS,
    *cost_of_training.SECTIONS,
    *tokens_per_param.SECTIONS,
    *mixtures.SECTIONS,
    *experts.SECTIONS,
    *quality.SECTIONS,
    *failures.SECTIONS,
    *labels.SECTIONS,
    *memory_needed.SECTIONS,
)

_WORDS: dict[Verdict, str] = {
    "agrees": "agrees", "cut": "cut off", "about": "about", "wrong": "**wrong**", "theirs": "follows"
}  # fmt: skip

_INTRO = """<!-- Written by `make docs` from tools/talks; edit there. -->

# The talks, checked

Smalti takes its shape from five talks and posts about MPT and DBRX. They say: do the math. So every figure in them that
arithmetic can check is here, with the number that Smalti's planner gives. Figures are quoted to be checked, not as
results of Smalti; a test holds each of them to the digits that it was printed with. What the talks say of speed is in
[claims](claims.md).

"""

_VERDICTS = """
What stands beside a figure:

- **agrees**: ours rounds to what was printed.
- **cut off**: the talk cut digits off where rounding goes up.
- **about**: the talk says so roughly, or rounds more coarsely than its digits say.
- **wrong**: the talk contradicts arithmetic or itself; the right number and the reason stand beside it. ✗ in tables.
- **follows**: a measurement, a price or a choice of theirs, which arithmetic cannot give; ours is what follows from it.

"""

_UNCHECKED = """
## Left as they are

Counts, scores and quotations that no arithmetic of a planner reaches: the Gauntlet's 39 benchmarks of 6 competencies;
the shares of mistakes in test sets (BIRD 70%, MT-Bench 25%); MMLU-Redux's 3,000 questions; Llama 2's 180 examples that
people compared; what the papers on deduplication found (1%, 4%, 60,000 times); ten days for an 8B model, without its
GPUs; 80% of profiling by PyTorch's tools; the matrix of distances on the slide about ALiBi. Speed is in
[claims](claims.md).
"""


def page() -> str:
    """The whole page."""
    return "".join(_lines())


def figures() -> tuple[Figure, ...]:
    """Every figure, in the order of the page."""
    return tuple(figure for section in SECTIONS for figure in section.figures())


def _lines() -> Iterator[str]:
    yield _INTRO
    yield "| short name | talk | |\n|---|---|---|\n"
    for talk in TALKS:
        yield f"| {talk.key} | {talk.title} | {talk.by} |\n"
    yield _VERDICTS
    counts = Counter(figure.verdict for figure in figures())
    yield (
        f"Of {counts.total()} figures {counts['agrees']} agree, {counts['cut']} are cut off, {counts['about']} are "
        f"rough, {counts['wrong']} are wrong, and from {counts['theirs']} ours follows. A line is that of "
        "the talk's text.\n"
    )
    yield "\n## What is wrong\n\n"
    yield "| where | printed | right | why |\n|---|---|---|---|\n"
    for same in _once(figure for figure in figures() if figure.verdict == "wrong"):
        cells = (f"{_source(same)}: {same[0].place}", same[0].quote, same[0].ours_text(), same[0].note)
        yield f"| {' | '.join(map(_escape, cells))} |\n"
    for section in SECTIONS:
        yield from _section(section)
    yield _UNCHECKED


def _once(figures: Iterable[Figure], *, by: tuple[str, ...] = ("quote", "how", "note")) -> list[list[Figure]]:
    """Group figures that are equal in these fields: words on several slides, a note on several cells."""
    groups: dict[tuple[str, ...], list[Figure]] = {}
    for figure in figures:
        groups.setdefault(tuple(getattr(figure, name) for name in by), []).append(figure)
    return list(groups.values())


def _section(section: Section) -> Iterator[str]:
    whole = re.sub(r"`[^`]+`", lambda code: code[0].replace(" ", "\0"), section.text)
    text = textwrap.fill(whole, 120, break_on_hyphens=False, break_long_words=False).replace("\0", " ")
    yield f"\n## {section.title}\n\n{text}\n"
    for table in section.tables:
        yield from _table(table)
    if section.alone:
        yield "\n| talk, line | words | printed | ours | how | |\n|---|---|---|---|---|---|\n"
    for same in _once(section.alone):
        figure = same[0]
        cells = (_source(same), figure.quote, figure.printed, figure.ours_text(), figure.how)
        yield f"| {' | '.join(map(_escape, cells))} | {_verdict(figure)} |\n"


def _table(table: Table) -> Iterator[str]:
    yield f"\n**{table.title}**\n\n| {' | '.join(table.head)} |\n|{'---|' * len(table.head)}\n"
    for row in table.rows:
        yield f"| {' | '.join(_cell(cell) for cell in row)} |\n"
    for same in _once((figure for figure in table.figures() if figure.note), by=("note",)):
        yield f"\nLine {', '.join(_lines_of(same))}, {_verdict(same[0])}.\n"


def _verdict(figure: Figure) -> str:
    return _WORDS[figure.verdict] + (f": {_escape(figure.note)}" if figure.note else "")


def _cell(cell: str | Figure) -> str:
    if isinstance(cell, str):
        return _escape(cell)
    mark = "✗ **" if cell.verdict == "wrong" else ""
    printed = _escape(cell.printed)
    if cell.verdict == "agrees":
        return printed if cell.ours_text() == printed else f"{printed} ({cell.ours_text()})"
    return f"{printed} ({mark}{cell.ours_text()}{'**' if mark else ''})".strip()


def _source(same: list[Figure]) -> str:
    return f"{same[0].talk}, {', '.join(_lines_of(same))}"


def _lines_of(same: list[Figure]) -> list[str]:
    return list(dict.fromkeys(str(figure.line) for figure in same))


def _escape(text: str) -> str:
    return re.sub(r"([|*~])", r"\\\1", text)
