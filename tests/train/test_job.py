"""Building jobs: from a config, from a module and a loss of one's own, from other weights; and what is refused."""

import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import toy_run
from gloo_ranks import run_ranks
from line_points import Points, squared
from torch import nn

from smalti.base.errors import CheckFailed, DataError, RetryableError, UserError
from smalti.config.load import from_dict
from smalti.config.run import JobConfig, RunConfig
from smalti.distributed.checkpoint import checkpoint
from smalti.model.init import draw
from smalti.track.checkpoints import manifest
from smalti.track.run import RunFolder
from smalti.train import Hook, build, fit
from smalti.train.loop import Job
from smalti.train.step import StepResult


def _changed(config: RunConfig, **changes: Any) -> RunConfig:
    """The config with top-level and ``train__`` fields replaced, validated again."""
    tree = config.model_dump(mode="json")
    for key, value in changes.items():
        place, _, name = key.rpartition("__")
        (tree[place] if place else tree)[name] = value
    return from_dict(RunConfig, tree).config


def _fit(rank: int, config: JobConfig, **given: Any) -> int:
    job = build(config, **given)
    fit(job)
    return job.state.step


def _error(rank: int, config: JobConfig, kind: type[Exception], given: dict[str, Any] | None = None) -> str:
    with pytest.raises(kind) as raised:
        _fit(rank, config, **(given or {}))
    return str(raised.value)


def _weights(config: RunConfig) -> dict[str, torch.Tensor]:
    return checkpoint.read_model(str(checkpoint.newest(f"{config.run_folder}/checkpoints")))


def _distance(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    return sum(float((one[name] - other[name]).square().sum()) for name in one) ** 0.5


class Line(nn.Module):
    """y = a x + b"""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


def _own(rank: int, root: Path, world_size: int) -> list[float]:
    config = from_dict(
        JobConfig,
        {
            "name": "line",
            "folder": str(root / "run"),
            "train": {
                "duration": "300step",
                "global_batch_tokens": 12,
                "optimizer": {"lr": 0.05, "weight_decay": 0},
                "precision": {"compute": "fp32"},
                "eval_every": "1run",
            },
            "track": {"console": False},
        },
    ).config
    torch.manual_seed(rank)  # each rank starts elsewhere: rank 0's weights count
    job = build(config, model=Line(), loss=squared, batches=Points(rank, world_size))
    fit(job)
    return [parameter.detach().full_tensor().item() for parameter in job.state.model.parameters()]


@pytest.mark.slow
@pytest.mark.parametrize("axis", ["tensor", "expert", "sequence", "pipeline"])
def test_a_model_of_ones_own_takes_no_axis_beside_replicate_and_shard(axis: str, tmp_path: Path) -> None:
    tree = {
        "name": "own",
        "folder": str(tmp_path / "run"),
        "train": {
            "duration": "2step",
            "global_batch_tokens": 12,
            "optimizer": {"lr": 1e-3},
            "parallel": {"ranks": 2, axis: 2},
        },
    }
    given = {"model": Line(), "loss": squared, "batches": Points(0, 2)}
    for message in run_ranks(2, _error, from_dict(JobConfig, tree).config, UserError, given):
        assert f"train.parallel.{axis}=2 has no effect on a model of your own" in message
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_any_module_with_its_own_loss_trains(tmp_path: Path) -> None:
    one = run_ranks(1, _own, tmp_path / "1", 1)[0]
    two = run_ranks(2, _own, tmp_path / "2", 2)
    assert one == pytest.approx([2.0, 1.0], abs=1e-3)
    assert two[0] == two[1] == pytest.approx(one, rel=1e-5)
    lines = (tmp_path / "1" / "run" / "metrics.jsonl").read_text().splitlines()
    assert "loss/train/total" in json.loads(lines[0])


@pytest.mark.slow
def test_a_job_config_alone_describes_no_model(tmp_path: Path) -> None:
    tree = toy_run.config(tmp_path).model_dump(mode="json")
    for section in ("model", "data", "evals", "launch", "adapter", "tune"):
        del tree[section]
    message = run_ranks(1, _error, from_dict(JobConfig, tree).config, UserError)[0]
    assert "no model" in message
    assert "hint:" in message


class NoBatches(Points):
    """Batches that end too early."""

    def batch(self, step: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        return super().batch(step) if step < 2 else []


@pytest.mark.slow
def test_a_step_without_a_microbatch_is_refused_by_name(tmp_path: Path) -> None:
    tree = toy_run.config(tmp_path).model_dump(mode="json")
    for section in ("model", "data", "evals", "launch", "adapter", "tune"):
        del tree[section]
    given = {"model": Line(), "loss": squared, "batches": NoBatches(0, 1)}
    message = run_ranks(1, _error, from_dict(JobConfig, tree).config, UserError, given)[0]
    assert "batch(2) of NoBatches returned no microbatch" in message
    assert "hint:" in message


def _measures_nothing(*_: Any) -> None:
    return None


@pytest.mark.slow
def test_what_is_retained_needs_something_that_measures(tmp_path: Path) -> None:
    first = toy_run.config(tmp_path, duration="2step")
    assert run_ranks(1, _fit, first) == [2]
    data = first.data.model_dump(mode="json")
    data |= {"heldout": {"old": data["sources"]["code"]}, "retain": {"old": 0.02}}
    second = _changed(first, name="second", folder=str(tmp_path / "runs/second"), init_from=first.run_folder, data=data)
    message = run_ranks(1, _error, second, UserError, {"evaluation": _measures_nothing})[0]
    assert "nothing measures the held-out sets" in message


@pytest.mark.slow
def test_init_from_takes_weights_only(tmp_path: Path) -> None:
    first = toy_run.config(tmp_path, duration="20step")
    assert run_ranks(1, _fit, first) == [20]
    second = _changed(first, name="second", folder=str(tmp_path / "runs/second"), init_from=first.run_folder,
                      train__duration="2step")  # fmt: skip
    assert run_ranks(1, _fit, second) == [2]
    state = manifest.read_state(checkpoint.newest(f"{second.run_folder}/checkpoints") or "")
    assert (state["step"], state["tokens"]) == (2, 768)
    before, after = _weights(first), _weights(second)
    fresh = {name: draw(name, tensor.shape, first.model, first.seed) for name, tensor in before.items()}
    assert 0 < _distance(after, before) < 0.5 * _distance(after, fresh)  # two steps from the trained weights


@pytest.mark.slow
def test_init_from_another_shape_or_nothing_is_refused(tmp_path: Path) -> None:
    first = toy_run.config(tmp_path, duration="2step")
    run_ranks(1, _fit, first)
    model = first.model.model_dump(mode="json") | {"hidden_size": 64}
    other = _changed(first, name="other", folder=str(tmp_path / "o"), init_from=first.run_folder, model=model)
    assert "model.hidden_size is 64; in init_from=" in run_ranks(1, _error, other, UserError)[0]
    nothing = _changed(first, name="n", folder=str(tmp_path / "n"), init_from=str(tmp_path / "tokens"))
    assert "is none of" in run_ranks(1, _error, nothing, DataError)[0]


@pytest.mark.exhaustive
def test_init_from_another_number_of_layers_is_refused(tmp_path: Path) -> None:
    first = toy_run.config(tmp_path, duration="2step")
    run_ranks(1, _fit, first)
    model = first.model.model_dump(mode="json") | {"num_hidden_layers": 1}
    shallow = _changed(first, name="s", folder=str(tmp_path / "s"), init_from=first.run_folder, model=model)
    assert "model.num_hidden_layers is 1; in init_from=" in run_ranks(1, _error, shallow, UserError)[0]


@pytest.mark.exhaustive
def test_a_run_resumes_without_what_it_was_initialised_from(tmp_path: Path) -> None:
    first = toy_run.config(tmp_path, duration="2step")
    run_ranks(1, _fit, first)
    second = _changed(first, name="second", folder=str(tmp_path / "second"), init_from=first.run_folder)
    run_ranks(1, _fit, second)
    Path(first.run_folder).rename(tmp_path / "elsewhere")
    assert run_ranks(1, _fit, second) == [2]


def _train_s(folder: str) -> list[float]:
    lines = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
    return [line["time/train"] for line in lines if "time/train" in line]


def _fit_until(rank: int, config: RunConfig, step: int) -> int:
    """Stop as SIGTERM does, after ``step``."""

    class Terminate(Hook):
        def on_step(self, job: Job, result: StepResult) -> None:
            if job.state.step == step - 1:
                os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(RetryableError):
        _fit(rank, config, hooks=[Terminate()])
    return step


def _refused_at_the_start(rank: int, config: RunConfig) -> bool:
    class Refuses(Hook):
        def on_start(self, job: Job) -> None:
            raise CheckFailed("not today")

    job = build(config, hooks=[Refuses()])
    with pytest.raises(CheckFailed, match="not today"):
        fit(job)
    assert job.recorder._system is not None
    return job.recorder._system._closing.is_set()


@pytest.mark.exhaustive
def test_a_hook_that_raises_at_the_start_ends_the_recording_too(tmp_path: Path) -> None:
    assert run_ranks(1, _refused_at_the_start, toy_run.config(tmp_path)) == [True]


@pytest.mark.slow
def test_damaged_newer_checkpoints_are_set_aside_and_later_ones_kept(tmp_path: Path) -> None:
    config = toy_run.config(tmp_path, checkpoint={"every": "4step", "keep": 2})
    run_ranks(1, _fit_until, config, 12)
    folder = Path(config.run_folder) / "checkpoints"
    names = sorted(path.name for path in folder.glob("step-*"))
    assert names == ["step-00000008", "step-00000012"]
    (folder / names[1] / "train_state.json").write_text("{}")
    assert run_ranks(1, _fit, config) == [24]
    assert sorted(path.name for path in folder.glob("*step-*")) == [
        "rejected-step-00000012",
        "step-00000020",
        "step-00000024",
    ]
    hours = _train_s(config.run_folder)
    assert hours == sorted(hours)
    assert (folder / "latest").read_text().strip() == "step-00000024"


@pytest.mark.slow
def test_a_missing_newest_checkpoint_is_named_and_no_checkpoint_at_all_stops_the_run(tmp_path: Path) -> None:
    config = toy_run.config(tmp_path, checkpoint={"every": "4step"})
    run_ranks(1, _fit_until, config, 12)
    folder = RunFolder(config.run_folder)
    shutil.rmtree(folder.checkpoint(12))
    assert run_ranks(1, _fit, config) == [24]
    reasons = [event["reason"] for event in folder.events() if event["event"] == "checkpoint_rejected"]
    assert reasons == ["it is missing, or not complete"]
    shutil.rmtree(folder.checkpoints)
    before = (folder.path / "metrics.jsonl").read_text()
    assert "has no complete checkpoint, but this run had one of step 24" in run_ranks(1, _error, config, UserError)[0]
    assert (folder.path / "metrics.jsonl").read_text() == before


@pytest.mark.exhaustive
def test_without_a_usable_checkpoint_the_run_stops_and_nothing_is_lost(tmp_path: Path) -> None:
    config = toy_run.config(tmp_path, checkpoint={"every": "4step"})
    run_ranks(1, _fit_until, config, 12)
    folder = Path(config.run_folder)
    for path in folder.glob("checkpoints/step-*/manifest.json"):
        path.write_text(path.read_text() + " ")
    before = {path: path.read_bytes() for path in [*folder.glob("checkpoints/**/*.json"), folder / "metrics.jsonl"]}
    messages = run_ranks(2, _error, config, DataError)
    assert all("step-00000012" in message and "step-00000008" in message for message in messages)
    assert all(path.read_bytes() == content for path, content in before.items())


def test_a_mesh_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    config = toy_run.config(tmp_path, parallel={"replicate": 2})
    message = run_ranks(3, _error, config, UserError)[0]
    assert "does not divide the 3 ranks" in message
    assert "hint: train.parallel.replicate=3" in message  # the nearest that can be laid


def test_cuda_without_cuda_is_refused(tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    config = toy_run.config(tmp_path, parallel={"device": "cuda"})
    assert "no CUDA device" in run_ranks(1, _error, config, UserError)[0]


@pytest.mark.slow
def test_a_finished_run_is_left_as_it_is(tmp_path: Path) -> None:
    config = toy_run.config(tmp_path, duration="3step")
    assert run_ranks(1, _fit, config) == [3]
    before = (Path(config.run_folder) / "metrics.jsonl").read_text()
    assert run_ranks(1, _fit, config) == [3]
    assert (Path(config.run_folder) / "metrics.jsonl").read_text() == before


@pytest.mark.slow
def test_other_data_under_a_checkpoint_is_refused(tmp_path: Path) -> None:
    config = toy_run.config(tmp_path, duration="6step", checkpoint={"every": "2step"})
    run_ranks(1, _fit, config)
    for file in (tmp_path / "tokens" / "code").iterdir():
        file.unlink()
    toy_run.write_tokens(tmp_path / "tokens" / "code", seed=99)
    assert "code" in run_ranks(1, _error, config, UserError)[0]
