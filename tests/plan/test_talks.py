"""Every figure that the talks print: what the planner gives for it, and where a slide is wrong."""

from collections import Counter

import pytest
from talks import arithmetic
from talks.page import figures, page
from talks.rows import TALKS, Figure, Printed

FIGURES = figures()


@pytest.mark.parametrize("figure", FIGURES, ids=lambda figure: f"{figure.talk}-{figure.line}-{figure.name}")
def test_figure(figure: Figure) -> None:
    """Its verdict is what the digits say; where it is wrong, cut or only implied, ours is the number written down. It
    names its source."""
    assert figure.found() == figure.verdict, f"printed {figure.printed}, ours {figure.value()}"
    assert figure.holds(), f"ours is {figure.value()}, not {figure.right}"
    assert figure.talk in {talk.key for talk in TALKS}
    assert figure.place
    assert figure.line > 0
    assert figure.quote
    assert figure.how
    if figure.verdict in ("wrong", "cut", "about"):
        assert figure.note
    if figure.verdict in ("wrong", "cut", "theirs"):
        assert figure.right


def test_names_are_unique() -> None:
    assert [name for name, times in Counter(figure.name for figure in FIGURES).items() if times > 1] == []


def test_the_mistakes_are_these() -> None:
    """A planner that changes must not turn a slide right or wrong without somebody looking."""
    assert {figure.name for figure in FIGURES if figure.verdict == "wrong"} == {
        "7b-tokens-690",
        "7b-tokens-801",
        "7b-tokens-819",
        "64-h100s-at-peak",
        "64-h100s",
        "mfu-by-6nd",
        "actual-flops",
        "gpt-30b-tokens",
        "a100-40gb-price",
        "mpt-7b-semantic-scholar-orc-epochs",
        "mpt-30b-budget",
        "pile",
        "model-16",
        "layer-16",
        "two-of-16",
        "hundreds-of-thousands",
    }


@pytest.mark.parametrize(
    ("text", "value", "unit"),
    [
        ("1.8e11", 1.8e11, 0.1e11),
        ("$200,640", 200_640, 1),
        ("33.5%", 0.335, 0.001),
        ("610B", 610e9, 1e9),
        ("~ 3.4 days", 3.4, 0.1),
        ("263 GB", 263e9, 1e9),
        ("3.3 TB", 3.3e12, 0.1e12),
    ],
)
def test_value_and_unit_of_what_was_printed(text: str, value: float, unit: float) -> None:
    assert Printed(text).value == pytest.approx(value)
    assert Printed(text).unit == pytest.approx(unit)


def test_zeros_at_the_end_may_not_be_digits() -> None:
    assert Printed("$450,000", 2).unit == 10_000
    assert Printed("$2,000", 1).unit == 1_000


def test_half_a_unit_agrees_and_more_does_not() -> None:
    def figure(ours: float, **more: object) -> Figure:
        return Figure("mpt", "a slide", "x", 1, "x", "0.68", lambda: ours, "x", **more)  # type: ignore[arg-type]

    assert figure(0.675).found() == "agrees"
    assert figure(0.674).found() == "wrong"
    assert figure(0.686, verdict="cut").found() == "cut"
    assert figure(0.674, verdict="cut").found() == "wrong"
    assert figure(0.60, verdict="about", within=0.1).found() == "about"
    assert figure(0.50, verdict="about", within=0.1).found() == "wrong"


def test_five_of_the_six_bills_are_of_one_price() -> None:
    days_and_costs = {(0.14, "$2,000"): 1, (0.48, "$6,000"): 1, (2.32, "$30,000"): 1, (7.43, "$100,000"): 1,
                      (35.98, "$450,000"): 2}  # fmt: skip
    for (days, printed), significant in days_and_costs.items():
        bill = Printed(printed, significant)
        assert arithmetic.cost(256, days, 2.03) == pytest.approx(bill.value, abs=bill.unit / 2)


def test_page_has_every_figure() -> None:
    text = page()
    for figure in FIGURES:
        assert figure.ours_text() in text
