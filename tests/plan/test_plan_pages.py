"""The pages on scaling laws, the budget and the phases: commands print what they show, and their figures are right."""

import re
import shlex
from pathlib import Path

import pytest

from smalti.cli.main import run
from smalti.plan import data
from smalti.plan.budget import solver as budget
from smalti.plan.laws import law as laws
from smalti.plan.laws.fits import FITS, spread

DOCS = Path(__file__).parents[2] / "docs"
_EXAMPLE = re.compile(r"^```console\n\$ (smalti plan (?:budget|phases) .+)\n((?:.*\n)+?)```$", re.MULTILINE)
_ROW = re.compile(r"^\| ([^|]+) \|" + r" ([^|]+) \|" * 4 + "$", re.MULTILINE)
REFIT, HOFFMANN = FITS["besiroglu-2024"], FITS["hoffmann-2022"]
SUFFIX = {"M": 1e6, "B": 1e9, "T": 1e12}


def page(name: str) -> str:
    return " ".join((DOCS / "concepts/plan" / f"{name}.md").read_text().split())


def amount(text: str) -> float:
    return float(text[:-1]) * SUFFIX[text[-1]]


@pytest.mark.parametrize("path", ["concepts/plan/budget.md", "concepts/plan/phases.md", "guides/plan.md"])
def test_commands_print_what_the_page_shows(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    examples = _EXAMPLE.findall((DOCS / path).read_text())
    assert examples
    for command, shown in examples:
        code = run(shlex.split(command)[1:])
        out, err = capsys.readouterr()
        said = "\n".join(line.rstrip() for line in (err if code else out).splitlines())
        assert said.startswith(shown.rstrip("\n").removesuffix("...").rstrip("\n")), command


def test_table_of_fits() -> None:
    columns = r" ([\d.]+) \|" * 5 + r" ([\d.]+)(?: \(([\d.]+) to ([\d.]+)\))? \|$"
    text = (DOCS / "concepts/plan/scaling-laws.md").read_text()
    rows = re.findall(r"^\| `([\w-]+)`[^|]*\|" + columns, text, re.MULTILINE)
    assert [row[0] for row in rows] == list(FITS)
    for name, e, a, b, alpha, beta, ratio, low, high in rows:
        fit = FITS[name]
        for printed, value in ((e, fit.E), (a, fit.A), (b, fit.B), (alpha, fit.alpha), (beta, fit.beta)):
            assert float(printed) == round(value, len(printed.partition(".")[2])), name
        best = laws.compute_optimal(fit, 5.88e21)
        assert float(ratio) == pytest.approx(best.tokens_per_param, abs=0.06)
        assert bool(low) == (best.intervals["tokens_per_param"] is not None)
        if low:
            assert (float(low), float(high)) == pytest.approx(best.intervals["tokens_per_param"], abs=0.06)


def test_table_of_sizes() -> None:
    rows = [row for row in _ROW.findall((DOCS / "concepts/plan/scaling-laws.md").read_text()) if row[0][-1] in SUFFIX]
    assert len(rows) == 7
    for size, refit, _, hoffmann, _ in rows:
        assert amount(refit) == pytest.approx(laws.tokens_for_params(REFIT, amount(size)), rel=5e-3)
        assert amount(hoffmann) == pytest.approx(laws.tokens_for_params(HOFFMANN, amount(size)), rel=5e-3)


def test_fits_differ_by_more_than_their_intervals() -> None:
    ours, theirs = (laws.compute_optimal(fit, 1e24).intervals["params"] for fit in (REFIT, HOFFMANN))
    assert ours is not None
    assert theirs is not None
    assert theirs[1] < ours[0]


def test_figures_of_the_interval() -> None:
    best = laws.compute_optimal(REFIT, 5.88e21)
    assert best.intervals["params"] == pytest.approx((5.94e9, 7.99e9), rel=1e-3)
    assert best.intervals["loss"] == pytest.approx((2.166, 2.181), abs=5e-4)
    assert "5.94B to 7.99B" in page("scaling-laws")
    assert spread(FITS["sardana-2024"], lambda fit: {"a": fit.A}) == {"a": None}


def test_worked_examples() -> None:
    assert data.effective_tokens(100e9, 4) == pytest.approx(373e9, abs=0.5e9)
    limited = laws.compute_optimal(FITS["muennighoff-2023"], 9.3e21, unique_tokens=25e9)
    assert (limited.params, limited.tokens) == pytest.approx((6.8e9, 227e9), rel=5e-3)
    assert laws.clark_params(5e6, 128) == pytest.approx(52e6, rel=5e-3)
    days = {
        gpu: budget.solve({"params": "7b", "tokens": "140b", "gpus": 64, "gpu": gpu, "mfu": 0.507}).number("days")
        for gpu in ("h100-sxm", "a100-40gb")
    }
    assert days == pytest.approx({"h100-sxm": 2.12, "a100-40gb": 6.72}, abs=0.005)
    dbrx = budget.solve({"active_params": "36b", "params": "132b", "tokens": "12T", "gpus": 3072, "gpu": "h100-sxm"})
    assert dbrx.number("days") == pytest.approx(25, abs=0.5)
