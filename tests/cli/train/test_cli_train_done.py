"""A run that is done is found to be so before a rank is started; ranks are started where they may have work to do."""

import json
from pathlib import Path

import pytest
from cli_in_process import run_cli
from tiny_runs import tiny_run

from smalti.cli.train.done import finished
from smalti.config.load import load
from smalti.config.run import RunConfig
from smalti.track.run import RunFolder


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 40 steps with a checkpoint of the last one and a recorded end."""
    run = tiny_run(tmp_path_factory.mktemp("done"), step=40)
    loaded = load(RunConfig, str(run / "config.yaml"), [f"folder={run}"])
    folder = RunFolder.open(loaded.config, loaded.origins)
    folder.set_status("done", step=40)
    folder.close()
    return run


def config_of(run: Path, *overrides: str) -> RunConfig:
    return load(RunConfig, str(run / "config.yaml"), [f"folder={run}", *overrides]).config


def test_the_command_starts_nothing(done: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("smalti.fleet.agent.run", None)
    ended = run_cli(done.parent.parent, "train", str(done))
    assert ended.returncode == 0, ended.stderr
    assert f"{done}: done, 40 steps (already finished); next: smalti export" in ended.stderr
    assert RunFolder.read(done).attempts() == [0]
    assert RunFolder.read(done).status()["state"] == "done"


@pytest.mark.parametrize("placement", ["train.eval_every=20step", "train.parallel.ranks=2"])
def test_another_placement_may_be_work(done: Path, placement: str) -> None:
    assert finished(config_of(done)) is not None
    assert finished(config_of(done, placement)) is None


@pytest.mark.parametrize("what", ["end", "checkpoint", "shard"])
def test_what_is_missing_or_damaged_is_work(tmp_path: Path, what: str) -> None:
    run = tiny_run(tmp_path, step=20 if what == "checkpoint" else 40)
    (run / "status.json").write_text(json.dumps({"state": "running" if what == "end" else "done"}))
    (run / "logs/attempt-0").mkdir(parents=True)
    for shard in (run / "checkpoints").rglob("*.safetensors") if what == "shard" else ():
        shard.write_bytes(shard.read_bytes()[:-8])
    assert finished(config_of(run)) is None
