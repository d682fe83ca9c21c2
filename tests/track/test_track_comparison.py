"""Comparisons of runs: differences are found, and noise is not called a difference."""

import json
import math
import random
import shutil
from pathlib import Path

import pytest
from example_config import example_config
from synthetic_run import write_lines, write_run

from smalti.config.load import dump
from smalti.track.compare.comparison import compare
from smalti.track.compare.differences import Difference, of_curves, of_scores
from smalti.track.report.read import read_run


def made(folder: Path, *overrides: str, shift: float = 0.0, batch: int = 8192) -> Path:
    """A run with this config, whose loss is shifted and has its own noise."""
    write_run(folder, steps=400)
    (folder / "config.yaml").write_text(dump(example_config(f"name={folder.name}", *overrides)))
    noise = random.Random(folder.name)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for row in rows:
        if "loss/train/total" in row:
            row["loss/train/total"] += shift + noise.gauss(0, 0.05)
            row["time/token"] = row["step"] * batch
    write_lines(folder / "metrics.jsonl", rows)
    return folder


def test_identity_placement_and_provenance_are_distinguished(tmp_path: Path) -> None:
    first = made(tmp_path / "one")
    other = made(tmp_path / "two", "train.optimizer.lr=1e-3", "train.parallel.ranks=2")
    (other / "provenance.json").write_text(
        json.dumps({"smalti": "0.1.0", "git": {"commit": "f" * 40, "dirty": True}, "packages": {"torch": "2.12"}})
    )
    result = compare([read_run(first), read_run(other)])
    assert result.identity == {"train.optimizer.lr": [0.003, 0.001]}
    assert result.placement == {"train.parallel.ranks": [1, 2]}
    assert result.provenance["packages.torch"] == ["absent", "2.12"]
    assert result.to_json()["identity"] == {"train.optimizer.lr": {"one": 0.003, "two": 0.001}}
    assert json.dumps(result.to_json())


def test_forks_are_one_line_and_another_seed_gives_a_note(tmp_path: Path) -> None:
    past = "{at_step: 50, digest: d, duration: 200step, global_batch_tokens: 8192, seq_len: 512, lr: 4e-3, "
    past += "stages: [{weights: {code: 1}}], schedule: {}}"
    first, seed = made(tmp_path / "one"), made(tmp_path / "two", "seed=3")
    forked = made(tmp_path / "three", f"data.history=[{past}]")
    result = compare([read_run(first), read_run(seed), read_run(forked)])
    assert result.identity["data.history"] == ["no fork", "no fork", "until step 50: 200step, lr 0.004"]
    assert not [key for key in result.identity if key.startswith("data.history[")]
    assert result.notes == [
        "two is one with another seed: what is called lower or higher there is the noise between seeds"
    ]


def test_a_run_that_has_not_ended_and_another_length_are_named(tmp_path: Path) -> None:
    done, running = made(tmp_path / "one"), made(tmp_path / "two")
    assert compare([read_run(done), read_run(running)]).measured[-1].where.startswith("at the end (steps 400, 400;")
    (running / "status.json").write_text(json.dumps({"state": "running"}))
    write_lines(running / "metrics.jsonl", read_run(running).rows[:-100])
    result = compare([read_run(done), read_run(running)])
    assert result.measured[-1].where.startswith("newest values (steps 400, ")
    assert "two is running: its newest values are compared, not those of its end" in result.notes
    assert any("different numbers of steps" in note for note in result.notes)


def test_a_shift_is_a_difference_and_noise_is_none(tmp_path: Path) -> None:
    runs = [made(tmp_path / name, shift=shift) for name, shift in (("base", 0.0), ("same", 0.0), ("worse", 0.2))]
    result = compare([read_run(run) for run in runs])
    at_step = result.measured[0]
    assert at_step.where.startswith("at step 400")
    same, worse = at_step.rows["loss/train/total"]
    assert same.verdict == "inside the noise"
    assert worse.verdict == "higher"
    assert worse.value == pytest.approx(0.2, abs=0.03)


def chain(draw: random.Random, n: int, kept: float) -> list[float]:
    """Correlated noise: each value has a share of the previous one (AR(1), variance 1)."""
    values = [draw.gauss(0, 1)]
    for _ in range(n - 1):
        values.append(kept * values[-1] + draw.gauss(0, (1 - kept**2) ** 0.5))
    return values


@pytest.mark.sample(2)
@pytest.mark.parametrize(("kept", "steps"), [(0.0, 40), (0.5, 40), (0.9, 40), (0.5, 100), (0.9, 100), (0.9, 1000)])
def test_noise_is_seldom_called_a_difference(proof, record, kept: float, steps: int) -> None:
    n = proof(short=400, full=20_000)
    draw = random.Random(5)
    wrong = untold = 0
    for _ in range(n):
        sides = [chain(draw, steps, kept) for _ in range(2)]
        verdict = of_curves(sides[0], sides[1], what="steps").verdict
        wrong += verdict in ("lower", "higher")
        untold += verdict == "too few steps to tell"
    result = {"cases": n, "steps": steps, "neighbours_alike": kept, "called_different_frac": wrong / n}
    record(f"runs-diff-{kept}-{steps}", {**result, "untold_frac": untold / n})
    assert wrong / n < 0.08  # 5 % and the chance of so few cases
    if kept == 0.0:
        assert untold / n < 0.05  # steps of one run read different documents: forty are enough
    if kept == 0.9 and steps < 1000:
        assert untold / n > 0.9


def test_too_few_steps_give_no_verdict() -> None:
    result = of_curves([1.0] * 12, [1.0 + step / 10 for step in range(12)], what="steps")
    assert (result.verdict, result.half_width) == ("too few steps to tell", None)


APART = {  # how two runs move apart from the same weights on, and together again
    "linear": lambda step: 1.36 * step / 40,
    "saturating": lambda step: 0.9 * (1 - math.exp(-step / 10)),
    "sigmoid": lambda step: 1 / (1 + math.exp((14 - step) / 3)),
    "hill": lambda step: 1.5 * (step / 12) * math.exp(1 - step / 12) - 0.4 * step / 40,
}


@pytest.mark.parametrize("form", APART)
def test_runs_that_move_apart_differ(form: str) -> None:
    """0.7 to 0.9 on average over 40 steps, as two learning rates do on a real model."""
    draw = random.Random(3)
    before = [8 - 2 * step / 40 + draw.gauss(0, 0.1) for step in range(1, 41)]
    after = [8 - 2 * step / 40 + APART[form](step) + draw.gauss(0, 0.1) for step in range(1, 41)]
    result = of_curves(before, after, what="steps")
    assert result.verdict == "higher"
    assert of_curves(after, before, what="steps").verdict == "lower"
    assert result.how == "40 steps, against 3 times the noise of one"


@pytest.mark.parametrize("steps", [20, 40, 120])
def test_seeds_that_drift_apart_a_little_are_no_difference(steps: int) -> None:
    """Two seeds of one config were up to 1.7 times the noise of a step apart (docs/log.md)."""
    draw = random.Random(4)
    for _ in range(200):
        drift = draw.uniform(-1.7, 1.7)
        sides = [[draw.gauss(0, 0.1) for _ in range(steps)] for _ in range(2)]
        sides[1] = [value + drift * 0.14 * math.sin(3 * i / steps) for i, value in enumerate(sides[1])]
        assert "noise of one" not in of_curves(sides[0], sides[1], what="steps").how


def test_another_batch_is_compared_at_the_same_tokens(tmp_path: Path) -> None:
    first, other = made(tmp_path / "small"), made(tmp_path / "large", batch=16384)
    result = compare([read_run(first), read_run(other)])
    assert [table.where.split(" (")[0] for table in result.measured][:2] == ["at step 400", "at 3.277e+06 tokens"]


@pytest.mark.parametrize(("steps", "batches"), [(16, (8, 32)), (400, (512, 2048)), (300, (700, 1024)), (9, (5, 7))])
def test_at_the_same_tokens_every_step_counts_for_its_tokens(
    tmp_path: Path, steps: int, batches: tuple[int, int]
) -> None:
    """The reference is a sum over single tokens; the loss falls, so omitted steps would change it."""
    losses = [[8 / (1 + step * batch / 9000) for step in range(1, steps + 1)] for batch in batches]
    for name, batch, curve in zip("ab", batches, losses, strict=True):
        rows = [{"step": k, "time/token": k * batch, "loss/train/total": loss} for k, loss in enumerate(curve, 1)]
        write_lines(made(tmp_path / name) / "metrics.jsonl", rows)
    table = compare([read_run(tmp_path / "a"), read_run(tmp_path / "b")]).measured[1]
    last = steps * min(batches)
    first = last * (1 - max(0.1, min(1.0, 40 / int(last / max(batches)))))
    result = table.rows["loss/train/total"][0]
    for value, batch, curve in zip((result.before, result.after), batches, losses, strict=True):
        tokens = [loss for loss in curve for _ in range(batch)][round(first) : last]
        assert value == pytest.approx(sum(tokens) / len(tokens), rel=1e-3)


def test_accuracies_have_no_verdict() -> None:
    before = [{"index": i, "prompt": "p", "correct": i % 2 == 0} for i in range(100)]
    after = [{**sample, "correct": True} for sample in before]
    score = {"metric": "accuracy", "value": 0.5, "interval": [0.4, 0.6], "n": 100}
    result = of_scores(score, {**score, "value": 1.0}, (before, after))
    assert (result.value, result.verdict) == (0.5, "no verdict here: smalti eval compare")
    assert of_scores(score, score, (before, before)).verdict == "equal"


def test_bits_per_byte_of_other_documents_are_compared_by_their_intervals() -> None:
    score = {"metric": "bits_per_byte", "value": 0.5, "interval": [0.4, 0.6], "n": 100}
    other = of_scores(score, {**score, "value": 0.7}, ([], []))
    assert other.how == "from both intervals, not paired"
    assert other.half_width == pytest.approx(0.1 * 2**0.5)
    assert other.verdict == "higher"


def test_bits_per_byte_are_paired_by_document() -> None:
    draw = random.Random(1)
    before = [{"index": i, "n_bytes": 1000, "nats": draw.uniform(500, 1500)} for i in range(50)]
    after = [{**sample, "nats": sample["nats"] + draw.gauss(10, 5)} for sample in before]
    values = [sum(one["nats"] for one in side) / 50 / 1000 / 0.6931 for side in (before, after)]
    result = of_scores({"value": values[0]}, {"value": values[1]}, (before, after))
    assert result.verdict == "higher"
    assert result.half_width == pytest.approx(1.96 * 5 / 1000 / 0.6931 / 50**0.5, rel=0.3)


def test_other_windows_give_no_verdict() -> None:
    before = [{"index": i, "n_bytes": 1000, "nats": 1000.0 + i} for i in range(50)]
    after = [{**sample, "nats": sample["nats"] - 3} for sample in before]
    score = {"value": 1.5, "seq_len": 256, "overlap_tokens": 64}
    same = of_scores(score, {**score, "value": 1.49}, (before, after))
    assert same.verdict == "lower"
    for other in ({"seq_len": 512, "overlap_tokens": 64}, {"seq_len": 256, "overlap_tokens": 128}, {"seq_len": 256}):
        result = of_scores(score, {"value": 1.49, **other}, (before, after))
        assert (result.verdict, result.half_width) == ("the windows differ: no verdict", None)
    half_windows = of_scores({"value": 1.6, "seq_len": 256}, {**score, "overlap_tokens": 128}, (before, after))
    assert half_windows.verdict == "lower"


def test_what_is_missing_is_no_difference() -> None:
    assert Difference(None, 1.0).value is None
    assert Difference(1.0, 1.0).verdict == "equal"
    assert Difference(1.0, 2.0).verdict == ""
    assert of_curves([], [], what="steps") == Difference(None, None)
    assert of_scores({}, {"value": 1.0}, ([], [])).verdict == ""


@pytest.mark.parametrize("gone", ["metrics.jsonl", "events.jsonl", "provenance.json", "evals", "config.yaml"])
def test_a_run_that_lacks_something_is_still_compared(tmp_path: Path, gone: str) -> None:
    first, other = made(tmp_path / "one"), made(tmp_path / "two")
    path = other / gone
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    result = compare([read_run(first), read_run(other)])
    assert json.dumps(result.to_json())
    assert bool(result.notes) == (gone == "config.yaml")
