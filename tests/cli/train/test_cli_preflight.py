"""What is refused before a process of a run starts: what it retains must still be measured as before the first step,
the metric of the best checkpoint must be one that is measured."""

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import toy_run
import yaml
from cli_in_process import run_cli
from example_config import VALUES
from tiny_models import family_config

from smalti.base.errors import UserError
from smalti.cli.train import preflight
from smalti.config.fork import Fork
from smalti.config.load import dump, from_dict
from smalti.config.run import RunConfig
from smalti.track.line_file import LineFile
from smalti.track.names import require_evaluated
from smalti.track.run import RunFolder


def continued(root: Path, *, saved_step: int | None, **changes: Any) -> tuple[RunConfig, RunConfig]:
    """A run that continues a model, with a checkpoint; its config, and that with changes (``data__seq_len=128``)."""
    tree = yaml.safe_load(yaml.safe_dump(VALUES)) | {"name": "next", "folder": str(root / "run"), "init_from": "model"}
    for name in ("tokens", "heldout"):
        (root / name).mkdir()
    tree["data"] |= {"sources": {"code": str(root / "tokens")}, "stages": [{"weights": {"code": 1}}],
                     "heldout": {"old": str(root / "heldout")}, "retain": {"old": 0.02}}  # fmt: skip
    before = from_dict(RunConfig, tree).config
    for key, value in changes.items():
        section, _, name = key.partition("__")
        tree[section][name] = value
    folder = Path(before.run_folder)
    folder.mkdir()
    (folder / "config.yaml").write_text(yaml.safe_dump(before.model_dump(mode="json")))
    LineFile(folder / "metrics.jsonl").write({"step": 0, "metrics/eval/old/bits_per_byte": 1.0})
    LineFile(folder / "events.jsonl").write({"event": "eval", "step": 0, "attempt": 0})
    if saved_step is not None:
        mark = folder / f"checkpoints/step-{saved_step:08d}"
        mark.mkdir(parents=True)
        (mark / "COMPLETE").write_text("")
    return before, from_dict(RunConfig, tree).config


def test_a_fork_with_another_seq_len_is_refused_while_something_is_retained(tmp_path: Path) -> None:
    before, after = continued(tmp_path, saved_step=10, data__seq_len=128)
    with pytest.raises(UserError, match=r"data\.retain compares .* data\.seq_len 256 -> 128") as caught:
        preflight.check(after, ranks=1, fork=Fork(before, after, 10, ("data.seq_len: 256 -> 128",)))
    assert "data.retain={}" in str(caught.value.hint)


def test_a_resume_that_would_measure_otherwise_is_refused(tmp_path: Path) -> None:
    _, after = continued(tmp_path, saved_step=10, train__eval_tokens=512)
    with pytest.raises(UserError, match=r"train\.eval_tokens"):
        preflight.check(after, ranks=1)


def test_a_run_that_changes_nothing_of_it_passes(tmp_path: Path) -> None:
    before, _ = continued(tmp_path, saved_step=10)
    preflight.check(before, ranks=1)


@pytest.mark.parametrize("saved_step", [0, 10**6])
def test_nothing_is_compared_at_the_beginning_or_in_a_finished_run(tmp_path: Path, saved_step: int) -> None:
    _, after = continued(tmp_path, saved_step=saved_step, train__eval_tokens=512)
    preflight.check(after, ranks=1)


@pytest.mark.parametrize(("family", "targets", "warns"), [
    ("dbrx", ["attention", "mlp"], True), ("dbrx", ["attention"], False), ("mixtral", ["experts"], False),
])  # fmt: skip
def test_adapters_without_a_format_are_named_before_the_first_step(
    family: str, targets: list[str], warns: bool
) -> None:
    tree = yaml.safe_load(yaml.safe_dump(VALUES)) | {"init_from": "model", "adapter": {"targets": targets}}
    config = from_dict(RunConfig, tree | {"model": family_config(family, context=256).model_dump(mode="json")}).config
    reason = preflight.only_merged(config)
    assert (reason is not None) == warns
    if reason is not None:
        assert "family dbrx keeps all experts in one matrix; the run can be exported with --merge alone" in reason


def test_cuda_where_none_can_be_is_refused_before_a_rank_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from smalti.cli.main import run
    from smalti.cli.train import app as train
    from smalti.fleet import machine

    monkeypatch.setattr(machine, "why_no_gpu", lambda: "there is none")
    monkeypatch.setattr(train, "_as_agent", lambda *given, **more: 0)
    monkeypatch.setattr(preflight, "check", lambda *given, **more: None)
    monkeypatch.setattr(preflight, "data_is_local", lambda config: False)
    assert run(["train", "demo", "train.parallel.device=auto"]) == 0
    assert run(["train", "demo", "train.parallel.device=cuda"]) == 2
    assert "train.parallel.device=cuda, but there is none\nallowed: auto, cpu" in capsys.readouterr().err


@pytest.mark.parametrize(("metric", "hint"), [
    ("nonsense", "metrics/eval/prose/LanguageCrossEntropy"),
    ("loss/train/total", "metrics/eval/prose/LanguageCrossEntropy"),
    ("metrics/eval/prosa/LanguageCrossEntropy", "metrics/eval/prose/LanguageCrossEntropy"),
    ("metrics/eval/code/bits_per_bite", "metrics/eval/code/LanguageCrossEntropy"),
    ("metrics/eval_ema/code/bits_per_byte", "metrics/eval/code/LanguageCrossEntropy"),
])  # fmt: skip
def test_a_best_metric_that_no_evaluation_measures_is_refused_before_the_start(metric: str, hint: str) -> None:
    with pytest.raises(UserError, match=f"train.checkpoint.best={metric} is not measured in this run") as caught:
        require_evaluated(metric, ["prose", "code"], has_ema=False)
    assert caught.value.hint == f"train.checkpoint.best={hint}"


def test_a_best_metric_that_may_be_measured_passes() -> None:
    for name in (None, "metrics/eval/prose/bits_per_byte", "metrics/eval/prose/reward_loss", "icl/metrics/a/b/stderr"):
        require_evaluated(name, ["prose"], has_ema=False)
    require_evaluated("metrics/eval_ema/prose/LanguageCrossEntropy", ["prose"], has_ema=True)
    require_evaluated("metrics/eval/prose/LanguageCrossEntropy", [], has_ema=False)  # a warning: nothing is held out
    with pytest.raises(UserError, match="is not measured"):
        require_evaluated("nonsense", [], has_ema=False)


def test_a_run_folder_on_a_read_only_disk_is_named_as_such(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "recipe.yaml").write_text(dump(toy_run.config(tmp_path)))
    monkeypatch.setattr(os, "access", lambda *_: False)
    for flag, why in ((os.ST_RDONLY, "written: Read-only file system"), (0, "written or read: Permission denied")):
        monkeypatch.setattr(os, "statvfs", lambda _, flag=flag: SimpleNamespace(f_flag=flag))
        done = run_cli(tmp_path, "train", "recipe.yaml")
        assert (done.returncode, f"{tmp_path} cannot be {why}" in done.stderr) == (2, True), done.stderr


def test_a_refused_start_is_recorded_and_the_metric_is_refused_by_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SMALTI_PEER_KEY", "a key")
    config = toy_run.config(tmp_path, checkpoint={"peer_copies": "5step", "peer_node": "127.0.0.1:1"})
    (tmp_path / "recipe.yaml").write_text(dump(config))
    refused = run_cli(tmp_path, "train", "recipe.yaml", "train.checkpoint.best=nonsense")
    assert (refused.returncode, Path(config.run_folder).exists()) == (2, False), refused.stderr
    done = run_cli(tmp_path, "train", "recipe.yaml")
    assert done.returncode == 75, done.stderr
    status = RunFolder.read(config.run_folder).status()
    assert status["state"] == "failed"
    assert status["reason"].startswith("it did not start: train.checkpoint.peer_node=127.0.0.1:1 was not asked")
