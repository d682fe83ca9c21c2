"""Classifiers are deterministic, honest where nothing can be learned, calibrated, and safe to load."""

import json
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from smalti.base.errors import DataError
from smalti.cli.main import run
from smalti.config.build import BuildConfig
from smalti.data.build.job import build
from smalti.data.prepare.classifier.features import features
from smalti.data.prepare.classifier.measure import area_under_curve, calibrate, reliability
from smalti.data.prepare.classifier.model import Classifier
from smalti.data.prepare.classifier.train import train_classifier

WORDS = ("river", "stone", "window", "paper", "music", "garden", "bread", "winter", "letter", "road")


def write(path: Path, n: int, marks: tuple[str, ...], *, seed: int) -> str:
    """Write documents of random words, each with one of ``marks`` in it."""
    generator = np.random.default_rng(seed)
    rows = [
        {"text": " ".join([*generator.choice(WORDS, 30).tolist(), str(generator.choice(marks)), f"n{seed}x{number}"])}
        for number in range(n)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_a_difference_is_learned_and_the_file_is_the_same_each_time(tmp_path: Path) -> None:
    good = write(tmp_path / "good.jsonl", 150, ("theorem", "experiment", "history"), seed=1)
    bad = write(tmp_path / "bad.jsonl", 150, ("casino", "cheap pills", "click here"), seed=2)
    paths = [str(tmp_path / name) for name in ("a.npz", "b.npz")]
    for path in paths:
        train_classifier(good, bad).save(path)
    assert Path(paths[0]).read_bytes() == Path(paths[1]).read_bytes()
    classifier = Classifier.load(paths[0])
    assert classifier.report["auc"] > 0.95
    assert classifier.score("river stone history winter garden") > classifier.score("river stone casino winter garden")


def test_where_there_is_no_difference_none_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, seed in (("good", 3), ("bad", 4)):
        generator = np.random.default_rng(seed)
        texts = [" ".join(generator.choice(WORDS, 40).tolist()) for _ in range(200)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    command = ["data", "classifier", "train", "--good", str(tmp_path / "good.jsonl"), "--bad"]
    assert run([*command, str(tmp_path / "bad.jsonl"), "--output", str(tmp_path / "q.npz")]) == 0
    assert "no difference between good and bad documents is shown" in capsys.readouterr().out
    assert run([*command, str(tmp_path / "bad.jsonl"), "--output", str(tmp_path / "q.bin")]) == 2


def test_features_do_not_depend_on_where_a_word_is() -> None:
    one, other = set(features("red").tolist()), set(features("a long beginning, then RED").tolist())
    assert one < other
    assert len(features("")) == 0
    assert len(features("é" * 30_000)) > 0


def test_the_area_is_the_share_of_ordered_pairs_and_its_interval_covers_it() -> None:
    assert area_under_curve(np.array([1.0, 2.0]), np.array([1.0, 0.0]))[0] == 3.5 / 4
    assert area_under_curve(np.arange(50.0) + 100, np.arange(50.0)) == (1.0, (1 - 3 / 50, 1.0))
    generator = np.random.default_rng(1)
    truth, covered = 0.7602, 0  # of two normal distributions that are one standard deviation apart
    for _ in range(300):
        _, (low, high) = area_under_curve(generator.normal(1, 1, 60), generator.normal(0, 1, 80))
        covered += low < truth < high
    assert 0.91 < covered / 300 < 0.99


def test_calibration_recovers_the_probabilities() -> None:
    generator = np.random.default_rng(2)
    logits = generator.normal(0, 2, 20_000)
    labels = (generator.random(20_000) < 1 / (1 + np.exp(-(0.5 * logits - 1)))).astype(float)
    slope, offset = calibrate(logits, labels)
    assert (slope, offset) == pytest.approx((0.5, -1.0), abs=0.06)
    rows = reliability(1 / (1 + np.exp(-(slope * logits + offset))), labels)
    assert all(abs(row["mean_score"] - row["good_frac"]) < 0.05 for row in rows if row["documents"] > 500)
    assert all(np.isfinite(calibrate(np.array([-5.0, -4.0, 4.0, 5.0]), np.array([0.0, 0, 1, 1]))))


def test_damage_and_contradictions_are_refused(tmp_path: Path) -> None:
    good = write(tmp_path / "good.jsonl", 60, ("theorem",), seed=1)
    bad = write(tmp_path / "bad.jsonl", 60, ("casino",), seed=2)
    with pytest.raises(DataError, match="both good and bad"):
        train_classifier(good, good)
    with pytest.raises(DataError, match="has 3 different documents"):
        train_classifier(write(tmp_path / "few.jsonl", 3, ("x",), seed=5), bad)
    path = tmp_path / "q.npz"
    classifier = train_classifier(good, bad)
    classifier.save(str(path))
    with np.load(path) as arrays:
        content = {name: arrays[name] for name in arrays.files}
    content["weights"] = classifier.weights + 1
    np.savez(path, **content)
    with pytest.raises(DataError, match="is damaged"):
        Classifier.load(str(path))
    path.write_bytes(b"no zip")
    with pytest.raises(DataError, match="is no classifier"):
        Classifier.load(str(path))


def test_a_build_scores_documents_and_drops_those_below_the_threshold(tmp_path: Path) -> None:
    good = write(tmp_path / "good.jsonl", 150, ("theorem", "experiment"), seed=1)
    bad = write(tmp_path / "bad.jsonl", 150, ("casino", "lottery"), seed=2)
    model = tmp_path / "quality.npz"
    train_classifier(good, bad).save(str(model))
    rows = [json.loads(line) for path in (good, bad) for line in Path(path).read_text().splitlines()[:20]]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    recipe = {
        "name": "q", "inputs": [{"path": str(tmp_path / "in.jsonl"), "rules": ["none"]}], "workers": 1,
        "output": str(tmp_path / "out"), "quality_model": str(model), "min_quality": 0.5, "dedup": "exact",
    }  # fmt: skip
    build(BuildConfig.model_validate(recipe))
    kept = pq.read_table(tmp_path / "out/documents/in/train.parquet").to_pylist()
    drops = pq.read_table(tmp_path / "out/drops/in.parquet").to_pylist()
    assert len(kept) + len(drops) == 40
    classifier = Classifier.load(str(model))
    assert all(row["quality"] == classifier.score(row["text"]) >= 0.5 for row in kept)
    assert {row["rule"] for row in drops} == {"quality"}
    assert all(row["score"] < 0.5 and row["reason"] == f"quality {row['score']:.3g} is below 0.5" for row in drops)
    assert sum("theorem" in row["text"] or "experiment" in row["text"] for row in kept) > 16
    train_classifier(good, bad, seed=18).save(str(model))
    assert build(BuildConfig.model_validate(recipe)).is_new
    assert not build(BuildConfig.model_validate(recipe)).is_new
    with pytest.raises(DataError, match="does not exist"):
        build(BuildConfig.model_validate(recipe | {"quality_model": str(tmp_path / "none.npz")}))
    with pytest.raises(ValueError, match="no effect without quality_model"):
        BuildConfig.model_validate(recipe | {"quality_model": None})
