"""bench/router_balance.py: which steps its figures are of."""

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def bench(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    monkeypatch.delitem(sys.modules, "router_balance", raising=False)
    import router_balance

    return router_balance


def test_windows_begin_at_step_100(bench):
    """The window of steps 100 to 119 is half at 4.0 and half at 1.2."""
    rows = []
    for step in range(1, 201):
        imbalance = 4.0 if step < 110 else 1.9 if 120 <= step <= 130 else 1.2
        rows.append(
            {"step": step, "moe/load_imbalance": imbalance, "moe/dead_experts_frac": 0.5 if step < 100 else 0.0}
        )
    bits = {f"metrics/eval/{source}/bits_per_byte": value for source, value in (("code", 1.5), ("prose", 2.5))}
    rows.append({"step": 200, **bits})
    balance = bench.figures_of(7, rows)
    assert (balance.first_median, balance.worst_median, balance.last_median) == (4.0, 2.6, 1.2)
    assert balance.worst_dead_frac == 0
    assert balance.bits_per_byte == {"code": 1.5, "prose": 2.5}
