"""A printed figure, what our arithmetic gives for it, and the verdict; tables and sections of such figures.

A figure has its source (talk, slide, line of the talk's text), and its tolerance comes from the digits that
were printed. Does no arithmetic about models itself.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from decimal import Decimal
from typing import Literal

Verdict = Literal["agrees", "cut", "about", "wrong", "theirs"]
"""``agrees``: ours rounds to what was printed. ``cut``: digits were cut off, not rounded. ``about``: the talk rounds
more coarsely than its digits say, or says "close to". ``wrong``: the talk contradicts itself or arithmetic.
``theirs``: a measurement, a price or a choice of theirs, which no arithmetic can give; ours is what follows from it."""

_NUMBER = re.compile(r"(?P<digits>\d[\d,]*(?:\.\d+)?)(?:e(?P<power>\d+))?(?P<suffix> ?[GT]B|[KMBT%]|)")
_SUFFIX = {"": "1", "%": "0.01", "K": "1e3", "M": "1e6", "B": "1e9", "T": "1e12", "GB": "1e9", "TB": "1e12"}


@dataclass(frozen=True)
class Talk:
    """A talk with figures."""

    key: str
    title: str
    by: str


TALKS = (
    Talk(
        "dbrx",
        "DBRX: Training Modern LLMs From Scratch",
        "slides, Abhinav Venigalla and Jonathan Frankle, Databricks, 2024",
    ),
    Talk(
        "roundtable",
        "Introducing DBRX: The Future of Language Models",
        "Databricks roundtable of MLOps.community, 2024, as transcribed",
    ),
    Talk("blog", "Building DBRX-class Custom LLMs with Mosaic AI Training", "Databricks blog, 2024"),
    Talk("build", "So you want to build an LLM...", "slides, Jonathan Frankle, MosaicML, 2023"),
    Talk(
        "mpt",
        "Training LLMs from scratch: How we built MPT-7B and MPT-30B",
        "slides, Abhinav Venigalla, MosaicML, 2023",
    ),
)


@dataclass(frozen=True)
class Printed:
    """A number as it was printed: its value, and a unit of its last digit."""

    text: str
    significant: int | None = None
    """How many digits were meant; absent: all that were printed, zeros at the end too."""

    @property
    def has_number(self) -> bool:
        """False of a formula in words."""
        return _NUMBER.search(self.text) is not None

    @property
    def value(self) -> float:
        """``1.8e11`` -> 1.8e11, ``33.5%`` -> 0.335, ``$2,000`` -> 2000, ``12T`` -> 1.2e13."""
        _, digits, scale, _ = self._parts()
        return float(digits * scale)

    @property
    def unit(self) -> float:
        """One unit of the last digit."""
        _, digits, scale, _ = self._parts()
        last = int(digits.as_tuple().exponent)
        if self.significant is not None:
            last = digits.adjusted() - self.significant + 1
        return float(scale * Decimal(1).scaleb(last))

    def like(self, value: float) -> str:
        """Format ``value`` like this number, with one digit more if needed."""
        before, digits, scale, after = self._parts()
        places = -int(digits.as_tuple().exponent)
        amount = value / float(scale)
        if abs(amount - round(amount, places)) > 1e-6 * max(abs(amount), 1):
            places += 1
        return f"{before}{amount:,.{places}f}{after}"

    def _parts(self) -> tuple[str, Decimal, Decimal, str]:
        """Return the text before the digits, the digits, their factor, and the text after them."""
        match = _NUMBER.search(self.text)
        assert match, f"no number in {self.text!r}"
        digits = Decimal(match["digits"].replace(",", ""))
        scale = Decimal(_SUFFIX[match["suffix"].strip()]) * 10 ** Decimal(match["power"] or 0)
        return self.text[: match.start()], digits, scale, self.text[match.end("digits") :]


@dataclass(frozen=True)
class Figure:
    """One number of a talk."""

    talk: str
    """Key of TALKS."""
    place: str
    """Title of the slide or of the part, or the speaker and the minute."""
    name: str
    """Short, for the test's id."""
    line: int
    """In the talk's text."""
    quote: str
    """A few words around the number."""
    printed: str
    """The number as printed; a formula in words has none."""
    ours: Callable[[], float] | None
    """Our number by the planner's functions; None where nothing can be computed."""
    how: str
    """The arithmetic in short."""
    verdict: Verdict = "agrees"
    note: str = ""
    """Why it is wrong, cut or about; what the talk leaves out."""
    right: str = ""
    """Expected number, written down independently of the planner's code: for ``wrong`` the number that should have been
    printed, for ``theirs`` what follows from the printed one, such as ``MFU 21.0%``. Absent if ours must agree."""
    significant: int | None = None
    """Digits that were meant where zeros stand at the end; absent: all."""
    within: float | None = None
    """Largest difference of ours for ``about``."""

    def value(self) -> float:
        """Return our number."""
        assert self.ours is not None, f"{self.name} has no arithmetic"
        return self.ours()

    def holds(self) -> bool:
        """Return whether our number equals ``right``."""
        if not self.right:
            return True
        right = Printed(self.right)
        return abs(self.value() - right.value) <= _half(right.unit)

    def found(self) -> Verdict:
        """Return the verdict that follows from the printed number and ours."""
        printed = Printed(self.printed, self.significant)
        if self.verdict == "theirs" or not printed.has_number:
            return self.verdict
        off = self.value() - printed.value
        if abs(off) <= _half(printed.unit):
            return "agrees"
        if self.verdict == "cut" and 0 < off < printed.unit:
            return "cut"
        return "about" if self.within is not None and abs(off) <= self.within else "wrong"

    def ours_text(self) -> str:
        """Return our number as the page prints it."""
        if self.ours is None:
            return "-"
        return self.right or Printed(self.printed).like(self.value())


def _half(unit: float) -> float:
    return unit / 2 * (1 + 1e-9)


Cell = str | Figure


@dataclass(frozen=True)
class Table:
    """A printed table: text, and figures with ours."""

    title: str
    head: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]

    def figures(self) -> Iterator[Figure]:
        """Return the figures in its cells."""
        for row in self.rows:
            yield from (cell for cell in row if isinstance(cell, Figure))


@dataclass(frozen=True)
class Section:
    """A topic: what it is about, printed tables, and figures that stand alone."""

    title: str
    text: str
    tables: tuple[Table, ...] = ()
    alone: tuple[Figure, ...] = ()

    def figures(self) -> Iterator[Figure]:
        """All of the topic."""
        for table in self.tables:
            yield from table.figures()
        yield from self.alone
