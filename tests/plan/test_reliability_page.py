"""docs/concepts/plan/reliability.md: its command prints what the page shows, and its tables are the code's."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
from test_goodput import COLUMNS, ROWS
from typer.testing import CliRunner

from smalti.cli.plan import app as plan
from smalti.cost.failures import mtbf_s
from smalti.plan.failures.causes import LLAMA_3
from smalti.plan.failures.goodput import goodput_frac, spare_nodes, young_s
from smalti.plan.failures.rates import RATES
from smalti.plan.failures.reliability import outlook
from smalti.plan.failures.setup import Setup
from smalti.plan.failures.simulate import simulate, summary

PAGE = (Path(__file__).parents[2] / "docs/concepts/plan/reliability.md").read_text()
QUICK = Setup(3072, detect_s=30, restart_s=120, checkpoint_stall_s=1, days=75, price_usd_per_gpu_hour=3, repair_days=2)


def rows(start: str) -> list[list[str]]:
    """Cells of the rows of a table of the page, its head left out; the table's head begins with ``start``."""
    lines = PAGE[PAGE.index(start) :].partition("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_the_worked_example() -> None:
    shown = re.search(r"```console\n\$ smalti plan (failures [^\n]*)\n(.*?)\.\.\.\n```", PAGE, re.DOTALL)
    assert shown is not None
    words, text = shown[1].split(), shown[2]
    printed = CliRunner().invoke(plan.app, words, catch_exceptions=False).stdout
    assert printed.startswith(text)


def test_what_is_said_of_quick_restarts() -> None:
    slow = outlook(replace(QUICK, detect_s=600, restart_s=900, checkpoint_stall_s=30))
    quick = outlook(QUICK)
    assert round(100 * quick.shares.useful_frac, 1) == 98.6
    assert (slow.calendar_days or 0) - (quick.calendar_days or 0) == pytest.approx(6.7, abs=0.05)
    assert (slow.cost_usd or 0) - (quick.cost_usd or 0) == pytest.approx(1.5e6, abs=0.05e6)


def test_the_table_of_rates() -> None:
    assert {name.strip("`"): rate for name, rate, _ in rows("| name | rate |")} == {
        rate.name: f"{rate.per_1000_gpu_days:.2f}" for rate in RATES
    }


def test_the_table_of_goodput() -> None:
    for gpus_text, mean_text, *cells in rows("| GPUs | M |"):
        gpus = int(gpus_text.replace(",", ""))
        mean = mtbf_s(1.0, gpus)
        assert float(mean_text.split()[0]) == pytest.approx(mean / 3600, abs=0.051)
        assert [float(cell) for cell in cells] == list(ROWS[gpus])
        for (_, stall, detect, restart), cell in zip(COLUMNS, cells, strict=True):
            setup = Setup(gpus, detect_s=detect, restart_s=restart, checkpoint_stall_s=stall,
                          checkpoint_interval_s=young_s(stall, mean))  # fmt: skip
            assert f"{100 * goodput_frac(setup.timing):.1f}" == cell


def test_the_table_of_spares() -> None:
    for nodes, *cells in rows("| nodes | repair 0.5 days |"):
        found = [spare_nodes(int(nodes.replace(",", "")), 0.008, days) for days in (0.5, 2, 7)]
        assert found == [int(cell) for cell in cells]


@pytest.mark.slow
def test_the_table_of_the_simulation() -> None:
    head = PAGE[PAGE.index("| spare nodes |") :].splitlines()[0].strip("|").split("|")[1:]
    (_, *goodputs), (_, *days) = rows("| spare nodes |")
    for cell, goodput, calendar in zip(head, goodputs, days, strict=True):
        spares = int(cell) if cell.strip().isdigit() else None
        found = summary(simulate(replace(QUICK, spares=spares), repeats=60, seed=1))
        slack = 5 * found.goodput_frac.error + 0.0005
        assert found.goodput_frac.mean == pytest.approx(float(goodput.split()[0]) / 100, abs=slack), cell
        assert found.calendar_days.mean == pytest.approx(float(calendar), abs=5 * found.calendar_days.error + 0.05)
    bursts = summary(simulate(replace(QUICK, spares=11), repeats=60, seed=1, burst=0.5)).goodput_frac
    assert bursts.mean == pytest.approx(0.936, abs=5 * bursts.error)


def test_the_counts_of_the_causes() -> None:
    text = PAGE[PAGE.index("419 in all") :].partition("The paper prints")[0].replace("\n", " ")
    for cause in LLAMA_3:
        found = re.search(rf"\b{cause.name.replace('-', ' ')}(?: (\d+))?\b", text, re.IGNORECASE)
        assert found is not None, cause.name
        assert (found[1] or "2") == str(cause.n), cause.name
