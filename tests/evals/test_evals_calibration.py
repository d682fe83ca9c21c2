"""Calibration: the statistics against direct computation, and synthetic runs of known signal, noise and order."""

import itertools
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from example_config import example_config
from hypothesis import given, settings
from hypothesis import strategies as st

from smalti.base.errors import DataError, UserError
from smalti.cli.main import run as smalti
from smalti.config.show import dump
from smalti.cost.flops import train_flops_per_token
from smalti.evals.calibration import signal
from smalti.evals.calibration.calibrate import SNR_BOUND, Calibration, Row, calibrate
from smalti.evals.calibration.page import page

STEPS = (50, 100, 200, 400, 800)
BATCH = 8192
VALUES = st.lists(st.integers(1, 40), min_size=2, max_size=6)


def write_run(
    root: Path, steps: int, score: Callable[[int], dict[str, float]], *, name: str = "", seed: int = 17, shots: int = 5
) -> str:
    """A run with scores of ``arithmetic`` during training, ten over its steps."""
    folder = root / (name or f"run-{steps}")
    folder.mkdir(parents=True)
    config = example_config(
        f"name={folder.name}", f"train.duration={steps}step", f"seed={seed}", "evals.tasks=[arithmetic]",
        f"evals.shots={shots}", "evals.n=200",
    )  # fmt: skip
    (folder / "config.yaml").write_text(dump(config))
    rows = []
    for step in range(steps // 10, steps + 1, steps // 10):
        named = {f"icl/metrics/demo/arithmetic{key}": value for key, value in score(step).items()}
        rows.append(json.dumps({"step": step, "time/token": step * BATCH, **named}))
    (folder / "metrics.jsonl").write_text("\n".join(rows) + "\n")
    return str(folder)


def write_results(run: str, step: int, tasks: dict[str, Any], *, suite: str = "demo", **config: Any) -> None:
    folder = Path(run) / "evals" / suite / f"2026-01-01T00-00-{step:05d}"
    folder.mkdir(parents=True)
    results = {"suite": suite, "step": step, "config": {"n": 200, **config}, "tasks": tasks}
    (folder / "results.json").write_text(json.dumps(results))


def accuracy(value: float, half: float = 0.05) -> dict[str, float]:
    return {"": value, "/low": value - half, "/high": value + half}


def row(calibration: Calibration, measure: str = "accuracy", shots: int = 5) -> Row:
    return next(each for each in calibration.rows if (each.measure, each.variant.shots) == (measure, shots))


def tau_b(x: list[int], y: list[int]) -> float:
    pairs = list(itertools.combinations(range(len(x)), 2))
    signs = [(np.sign(x[i] - x[j]), np.sign(y[i] - y[j])) for i, j in pairs]
    scale = math.sqrt(sum(a != 0 for a, _ in signs) * sum(b != 0 for _, b in signs))
    return float(sum(a * b for a, b in signs)) / scale if scale else 0.0


def slow_spearman(x: list[int], y: list[int]) -> float:
    ranks = [[sorted(v).index(a) + (v.count(a) + 1) / 2 for a in v] for v in (x, y)]
    return float(np.corrcoef(*ranks)[0, 1]) if len(set(x)) > 1 and len(set(y)) > 1 else 0.0


@settings(max_examples=15)
@given(st.data(), VALUES)
def test_rank_correlations_and_p_by_direct_computation(data: st.DataObject, x: list[int]) -> None:
    y = data.draw(st.lists(st.integers(1, 9), min_size=len(x), max_size=len(x)))
    assert signal.spearman(x, y) == pytest.approx(slow_spearman(x, y), abs=1e-12)
    assert signal.kendall(x, y) == pytest.approx(tau_b(x, y), abs=1e-12)
    if len(x) <= 4:
        orders = [slow_spearman(x, list(order)) for order in itertools.permutations(y)]
        share = np.mean([value >= slow_spearman(x, y) - 1e-9 for value in orders])
        assert signal.p_increasing(x, y) == pytest.approx(share)


@settings(max_examples=15)
@given(VALUES, st.floats(1e-3, 1e3))
def test_spread_does_not_depend_on_unit_or_order(values: list[int], unit: float) -> None:
    for spread in (signal.relative_std, signal.relative_range):
        expected = spread(values)
        assert spread([unit * value for value in reversed(values)]) == pytest.approx(expected)
    assert signal.relative_range(values) == pytest.approx((max(values) - min(values)) / np.mean(values))


@settings(max_examples=15)
@given(st.lists(st.integers(1, 1000), min_size=4, max_size=6, unique=True))
def test_ranks_depend_on_order_alone(values: list[int]) -> None:
    x = range(len(values))
    logs = [math.log(value) for value in values]
    assert signal.spearman(x, values) == signal.spearman(x, logs)
    assert signal.p_increasing(x, values) == signal.p_increasing(x, logs)
    assert signal.spearman(x, values) == pytest.approx(-signal.spearman(x, [-value for value in values]))


def test_p_of_many_values_is_that_of_all_orders_and_noise_is_pooled() -> None:
    """p: random orders, for more than 7 values, against Spearman's known variance 1 / (n - 1)."""
    draw = np.random.default_rng(0)
    x = np.arange(12)
    y = x + draw.normal(0, 6, 12)
    z = signal.spearman(x, y) * math.sqrt(11)
    assert signal.p_increasing(x, y) == pytest.approx(0.5 * math.erfc(z / math.sqrt(2)), abs=0.02)
    assert signal.p_increasing(x, x) == pytest.approx(1e-4)
    assert signal.pooled_std([[9, 11], [90, 100, 110]]) == pytest.approx(math.sqrt((0.02 + 2 * 0.01) / 3))
    assert (signal.pooled_std([[0, 0], [0, 0]]), signal.ratio(0, 0), signal.ratio(1, 0)) == (0, 0, math.inf)


def test_equal_runs_rarely_pass_the_bound() -> None:
    """5 runs of 3 scores with noise alone: signal / noise reaches ``SNR_BOUND`` in less than 2 % of 500 draws."""
    draws = np.random.default_rng(1).normal(0.5, 0.01, (500, 5, 3))
    reached = [signal.relative_std(runs[:, -1]) >= SNR_BOUND * signal.pooled_std(runs) for runs in draws]
    assert np.mean(reached) < 0.02


def test_known_signal_noise_and_order(tmp_path: Path) -> None:
    """Accuracy rises with FLOPs; its last three scores alternate by exactly 0.01 around the end's value."""

    def of(steps: int) -> Callable[[int], dict[str, float]]:
        level = 0.1 + 0.1 * STEPS.index(steps)
        offset = {steps * 8 // 10: 0.02, steps * 9 // 10: 0.01}
        return lambda step: accuracy(level + offset.get(step, 0.0)) | {
            "/bits_per_byte": 3 - level, "/gold_probability": 0.3,
        }  # fmt: skip

    runs = [write_run(tmp_path, steps, of(steps)) for steps in STEPS]
    calibration = calibrate(runs)
    exact = row(calibration)
    finals = [0.1, 0.2, 0.3, 0.4, 0.5]
    assert exact.signal == pytest.approx(np.std(finals, ddof=1) / np.mean(finals))
    assert exact.range == pytest.approx(0.4 / 0.3)
    noise = math.sqrt(np.mean([(0.01 / (level + 0.01)) ** 2 for level in finals]))
    assert exact.checkpoint_noise == pytest.approx(noise)
    assert exact.snr == pytest.approx(exact.signal / noise)
    assert exact.ranks == pytest.approx((1, 1, 1 / 120))
    assert (exact.kind, exact.seed_noise, exact.chance) == ("well behaved", None, 0.1)
    config = example_config()
    flops = [train_flops_per_token(config.model, 256) * steps * BATCH for steps in STEPS]
    assert [point.flops for point in exact.finals] == flops
    # level 0.2 - half 0.05 > chance 0.1, at the first score of the run of 100 steps; that of 50 is below until then
    assert exact.above_chance_from == flops[0] * 60 / 50
    assert row(calibration, "bits_per_byte").ranks == pytest.approx((1, 1, 1 / 120))
    assert row(calibration, "gold_probability").kind == "not better than noise"
    used = [(each.flops, {row.measure for row in each.rows}) for each in calibration.recommendations]
    assert used == [(flops[0], {"bits_per_byte"}), (flops[1], {"accuracy", "bits_per_byte"})]
    assert json.loads(json.dumps(calibration.to_json(), allow_nan=False))["rows"]


def test_groups_over_shots_and_every_class(tmp_path: Path) -> None:
    levels = {0: [0.1] * 5, 1: [0.4, 0.2, 0.5, 0.1, 0.3], 5: [0.2, 0.3, 0.4, 0.5, 0.6]}
    runs = [write_run(tmp_path, steps, lambda step: {}) for steps in STEPS]
    for index, run in enumerate(runs):
        for back in range(3):
            for shots, values in levels.items():
                value = values[index] + 0.004 * back
                ends = [value - 0.05, value + 0.05]
                score = {"metric": "accuracy", "value": value, "interval": ends, "chance": 0.05, "shots": shots}
                write_results(run, STEPS[index] - back, {"t": score}, suite=f"s{shots}")
    for run in runs:  # one suite for all shots
        for folder in sorted(Path(run).glob("evals/*/*")):
            results = json.loads((folder / "results.json").read_text()) | {"suite": "s"}
            (folder / "results.json").write_text(json.dumps(results))
    calibration = calibrate(runs, suite="s")
    kinds = {each.variant.shots: each.kind for each in calibration.rows}
    assert kinds == {0: "not better than noise", 1: "poorly behaved", 5: "well behaved"}
    (group,) = calibration.groups
    assert (group.group, group.enough_shots) == ("given enough shots", 5)
    text = page(calibration)
    for expected in ("given enough shots: 5 or more", "poorly behaved", "t (5 shots)", "<svg", "What to use"):
        assert expected in text
    assert "<script" not in text


def test_seeds_are_noise_and_results_replace_scores_of_the_same_step(tmp_path: Path) -> None:
    runs = [write_run(tmp_path, 50, lambda step: accuracy(0.3), name="a")]
    runs.append(write_run(tmp_path, 50, lambda step: accuracy(0.5), name="b", seed=18))
    runs.append(write_run(tmp_path, 100, lambda step: accuracy(0.9), name="c"))
    spread = math.sqrt(0.02) / 0.4
    exact = row(calibrate(runs))
    assert (exact.seed_noise, exact.checkpoint_noise) == (pytest.approx(spread), 0)
    assert exact.snr == pytest.approx(exact.signal / spread)
    write_results(
        runs[1], 50, {"arithmetic": {"metric": "accuracy", "value": 0.3, "interval": None, "shots": 5, "chance": 0.1}}
    )
    calibration = calibrate(runs)
    assert (row(calibration).seed_noise, len(calibration.rows)) == (0, 1)


def test_too_little_is_named(tmp_path: Path) -> None:
    one = write_run(tmp_path, 50, lambda step: accuracy(0.3))
    two = write_run(tmp_path, 100, lambda step: accuracy(0.3 + step / 1000))
    other = write_run(tmp_path, 200, lambda step: accuracy(0.3), shots=1)
    assert row(calibrate([one, two])).missing == "needs runs of 4 different FLOPs, has 2"
    assert row(calibrate([one, two], last=20)).missing == "needs 20 checkpoints of a run, has 10"
    assert "needs runs of 4 different FLOPs" in page(calibrate([one, two]))
    assert "no data" not in page(calibrate([one, two], last=20))
    with pytest.raises(DataError, match="no score is in two of the runs"):
        calibrate([one, other])
    with pytest.raises(DataError, match="no score of the suite 'gauntlet'"):
        calibrate([one, two], suite="gauntlet")
    with pytest.raises(UserError, match="a calibration compares runs, and there is 1"):
        calibrate([one])
    with pytest.raises(UserError, match="a run is given twice"):
        calibrate([one, one])
    with pytest.raises(UserError, match="--last 1"):
        calibrate([one, two], last=1)


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [write_run(tmp_path, steps, lambda step: accuracy(0.2 + step / 2000)) for steps in (50, 100, 200, 400)]
    file = tmp_path / "page.html"
    assert smalti(["eval", "calibrate", *runs, "--html", str(file)]) == 0
    out = capsys.readouterr().out
    for text in ("SNR", "well behaved", "use from FLOPs", "arithmetic (5 shots)", f"written: {file}"):
        assert text in out, text
    assert "Scores over FLOPs" in file.read_text()
    assert smalti(["eval", "calibrate", *runs, "--json"]) == 0
    assert set(json.loads(capsys.readouterr().out)) >= {"rows", "groups", "recommendations", "flops_formula"}
