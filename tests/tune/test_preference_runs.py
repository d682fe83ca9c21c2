"""Runs of ``tune.preference`` and ``tune.reward``: prepared, trained in this process, exported; what is refused."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_runs import tiny_run

from smalti.base.errors import DataError, UserError
from smalti.cli.working_directory import load_run
from smalti.config.run import RunConfig
from smalti.data.examples.folder import ExamplesRecord
from smalti.distributed.checkpoint.export import export, verify
from smalti.evals.in_loop import heldout_hook
from smalti.model.huggingface import load_folder
from smalti.train import build, fit
from smalti.tune.run import Tuning


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("preferences")
    tiny_run(root, context=384)
    random.seed(0)
    with (root / "pairs.jsonl").open("w") as pairs, (root / "labels.jsonl").open("w") as labels:
        for n in range(60):
            pair = {"prompt": f"add {n} and 1", "chosen": f"{n + 1}", "rejected": f"it is {n - 1}"}
            pairs.write(json.dumps(pair) + "\n")
            answer = {
                "prompt": pair["prompt"],
                "completion": pair["chosen" if n % 3 else "rejected"],
                "label": bool(n % 3),
            }
            labels.write(json.dumps(answer) + "\n")
    rows = [{"prompt": f"add {n} and 1", "completion": f"{n + 1}"} for n in range(60)]
    (root / "answers.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return root


def config_of(root: Path, recipe: str, **changes: Any) -> RunConfig:
    values: dict[str, Any] = {
        "init_from": str(root / "runs/tiny"),
        "tune.examples.files": f"[{root / ('labels.jsonl' if recipe == 'kto' else 'pairs.jsonl')}]",
        "tune.examples.template": "chatml",
        "tune.prepared": str(root / "prepared"),
        "tune.examples.heldout_frac": 0.2,
        "train.global_batch_tokens": 1536,
        "train.duration": "4step",
        "train.optimizer.lr": 1e-3,
        "train.precision.compute": "fp32",
        "train.parallel.device": "cpu",
        "track.console": False,
        **changes,
    }
    return load_run(
        recipe, [f"{key}={str(value).lower() if value is False else value}" for key, value in values.items()]
    ).config


def _run(config: RunConfig) -> Any:
    if config.tune is not None and not config.tune.has_own_loss:
        return fit(build(config, evaluation=heldout_hook))
    tuning = Tuning()
    return fit(build(config, make_loss=tuning.loss, evaluation=tuning.evaluation))


@pytest.mark.exhaustive
def test_a_cached_and_a_live_reference_train_alike(root: Path, tmp_path: Path) -> None:
    cached = config_of(root, "dpo", folder=tmp_path / "cached")
    live = config_of(root, "dpo", folder=tmp_path / "live", **{"tune.preference.reference": "live"})
    records = [ExamplesRecord.load(config.data.sources["examples"].path) for config in (cached, live)]
    assert [record.columns for record in records] == [("reference_first", "reference_second"), ()]
    first, second = _run(cached).metrics, _run(live).metrics
    compared = [name for name in first if "preference" in name or name == "loss/train/total"]
    assert len(compared) == 14
    for name in compared:
        assert first[name] == pytest.approx(second[name], rel=2e-4, abs=2e-5), name
    assert first["metrics/eval/validation/preference_accuracy"] > 0.9
    assert (tmp_path / "cached/checkpoints/best").exists()


@pytest.mark.exhaustive
@pytest.mark.parametrize("adapter", [{}, {"adapter.rank": 4, "train.optimizer.lr": 1e-2}], ids=["full", "lora"])
def test_a_reward_model_is_trained_and_exported(adapter: dict[str, Any], root: Path, tmp_path: Path) -> None:
    config = config_of(root, "reward", folder=tmp_path / "run", **{"train.duration": "6step", **adapter})
    assert config.model.num_labels == 1
    result = _run(config)
    assert result.metrics["metrics/eval/validation/reward_accuracy"] > 0.9
    folder = export(tmp_path / "run", merge=bool(adapter))
    assert json.loads((Path(folder) / "config.json").read_text())["architectures"] == ["LlamaForSequenceClassification"]
    assert load_folder(folder).config.num_labels == 1
    assert verify(folder) < 1e-5
    card = (Path(folder) / "README.md").read_text()
    assert "pipeline_tag: text-classification" in card
    assert "A reward model of" in card
    if adapter:  # the score of the run is where the next one begins
        changes = {**adapter, "adapter.init_from": export(tmp_path / "run")}
        tuning = Tuning()
        following = config_of(root, "reward", folder=tmp_path / "next", **changes)
        job = build(following, make_loss=tuning.loss, evaluation=tuning.evaluation)
        score: Any = job.state.model.get_parameter("score.weight")
        assert torch.equal(score.full_tensor(), load_folder(folder).get_parameter("score.weight"))
        assert "num_labels=1" in (tmp_path / "run/adapter/README.md").read_text()


def test_examples_of_labelled_answers(root: Path) -> None:
    config = config_of(root, "kto", **{"tune.preference.reference": "live"})
    record = ExamplesRecord.load(config.data.sources["examples"].path)
    assert record.pairs
    assert record.columns == ("label",)
    assert config.tune is not None
    assert config.tune.loss == "kto, beta 0.1"


@pytest.mark.parametrize(
    ("recipe", "changes", "named"),
    [
        ("dpo", {"tune.preference.gamma": 2}, "gamma=2.0 has no effect with loss=dpo"),
        ("dpo", {"tune.preference.loss": "robust_dpo"}, "label_smoothing=0 is dpo"),
        ("dpo", {"tune.preference.loss": "simpo", "tune.preference.reference": "live"}, "which has no reference"),
        ("dpo", {"train.parallel.sequence": 2, "train.parallel.ranks": 2}, "train.parallel.sequence=2 with tune"),
        ("reward", {"train.parallel.pipeline": 2, "train.parallel.ranks": 2}, "train.parallel.pipeline=2 with tune"),
        ("reward", {"tune.preference.loss": "dpo"}, "tune has the sections preference and reward"),
        ("reward", {"model.num_labels": "null"}, None),
        ("instruct", {"model.num_labels": 1}, "model.num_labels=1 without tune.reward"),
        ("dpo", {"tune.preference.loss": "kto", "tune.preference.reference": "live"}, "is not an answer with a label"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused(root: Path, recipe: str, changes: dict[str, Any], named: str | None) -> None:
    if recipe == "instruct" and changes:
        changes = {**changes, "tune.examples.files": f"[{root / 'answers.jsonl'}]"}
    if named is None:
        assert config_of(root, recipe, **changes).tune is not None
        return
    with pytest.raises((UserError, DataError), match=named):
        config_of(root, recipe, **changes)


def test_a_config_with_a_loss_of_its_own_needs_it(root: Path, tmp_path: Path) -> None:
    config = config_of(root, "dpo", folder=tmp_path / "run", **{"tune.preference.loss": "simpo"})
    with pytest.raises(UserError, match=r"the loss of this config is simpo, beta 2, and build\(\) was given none"):
        build(config, evaluate=lambda model, step: {})


@pytest.mark.exhaustive
def test_a_model_is_distilled_from_another(root: Path, tmp_path: Path) -> None:
    changes = {"tune.examples.files": f"[{root / 'answers.jsonl'}]", "train.checkpoint.best": "null"}
    teacher = tmp_path / "teacher"
    _run(config_of(root, "instruct", folder=teacher, **changes, **{"train.duration": "6step"}))
    config = config_of(root, "instruct", folder=tmp_path / "run", **changes, **{"tune.distill.teacher": teacher})
    result = _run(config)
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    divergences = [row["loss/train/divergence"] for row in rows if "loss/train/divergence" in row]
    assert divergences[-1] < 0.8 * divergences[0]
    assert result.metrics["loss/train/total"] == pytest.approx(divergences[-1])
