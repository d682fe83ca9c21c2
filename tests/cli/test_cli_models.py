"""``smalti models`` as it is typed, and models given by their version."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from cli_in_process import json_of
from registered_folders import write_export, write_run
from tiny_runs import tiny_run

from smalti.cli.main import run as smalti
from smalti.serve.folders import find, find_adapter


@pytest.fixture
def demo(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run whose export is demo/1, and whose checkpoint is demo/2."""
    monkeypatch.chdir(tmp_path)
    run = write_run(tmp_path / "runs/demo")
    for folder in ("export", "checkpoints/step-00000020"):
        assert smalti(["models", "add", f"{run}/{folder}"]) == 0
    return run


def test_add_tag_ls_show_rm(demo: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert smalti(["models", "add", f"{demo}/export"]) == 0
    assert capsys.readouterr().out == f"updated models:/demo/1: model, {demo}/export\n"
    assert smalti(["models", "tag", "models:/demo/1", "production", "--dry-run"]) == 0
    assert smalti(["models", "tag", "demo/1", "production"]) == 0
    line = "production is on demo/1: models:/demo@production\n"
    assert capsys.readouterr().out == f"would be: {line}{line}"
    assert smalti(["models", "ls"]) == 0
    table = capsys.readouterr().out.splitlines()
    assert table[1].split()[:6] == ["demo/2", "-", "checkpoint", "demo", "20", "1.28k"]
    assert table[2].split()[:3] == ["demo/1", "production", "model"]
    assert smalti(["models", "ls", "demo", "--tag", "production", "--json"]) == 0
    (listed,) = json_of(capsys)
    assert (listed["reference"], listed["tags"], listed["step"]) == ("models:/demo/1", ["production"], 20)
    assert smalti(["models", "show", "demo@production"]) == 0
    text = capsys.readouterr().out
    for words in ("tokens      1,280", "code    c1      data/code", "demo: sums  accuracy", "production     -   1"):
        assert words in text
    assert smalti(["models", "show", "demo@production", "--json"]) == 0
    shown = json_of(capsys)
    assert (shown["problem"], shown["data"]["past"]) == (None, "p1")
    assert shown["tag_moves"][0]["to_version"] == 1
    assert smalti(["models", "rm", "demo/1"]) == 2
    assert "hint: smalti models tag demo/1 production --remove" in capsys.readouterr().err
    assert smalti(["models", "tag", "demo/1", "production", "--remove"]) == 0
    assert smalti(["models", "rm", "demo/1"]) == 0
    assert "its files stay" in capsys.readouterr().out
    assert (demo / "export").is_dir()


@pytest.mark.parametrize(("record", "weights"), [
    ({"ema": True}, "moving average"), ({"averaged_steps": [10, 20]}, "mean of steps 10, 20"),
])  # fmt: skip
def test_weights_that_are_not_those_of_a_step_alone_are_named(
    demo: Path, record: dict[str, Any], weights: str, capsys: pytest.CaptureFixture[str]
) -> None:
    write_export(demo / "mean", weights=b"m" * 9000, run=demo, **record)
    assert smalti(["models", "add", str(demo / "mean")]) == 0
    capsys.readouterr()
    assert smalti(["models", "ls"]) == 0
    assert f"model, {weights}  demo" in capsys.readouterr().out.splitlines()[1]
    assert smalti(["models", "show", "demo/3"]) == 0
    assert f"weights     {weights}" in capsys.readouterr().out
    assert smalti(["models", "show", "demo/1"]) == 0
    assert "\nweights" not in capsys.readouterr().out


def test_files_are_deleted_with_yes_only(demo: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, code in ((["--files"], 2), (["--files", "--dry-run"], 0), (["--yes"], 2)):
        assert smalti(["models", "rm", "demo/2", *arguments]) == code
    said = capsys.readouterr()
    assert f"would remove demo/2, and the folder {demo}/checkpoints/step-00000020" in said.out
    assert "with --yes, or --dry-run" in said.err
    assert smalti(["models", "rm", "demo"]) == 2
    assert "'demo' may be another version tomorrow\nallowed: NAME/NUMBER" in capsys.readouterr().err
    assert (demo / "checkpoints/step-00000020").is_dir()
    assert smalti(["models", "rm", "demo/2", "--files", "--yes"]) == 0
    assert not any((demo / "checkpoints").iterdir())


def test_a_folder_that_is_gone_or_replaced_is_marked(demo: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_export(demo / "export", weights=b"later")
    assert smalti(["models", "add", f"{demo}/export", "--name", "demo", "--tag", "candidate", "--json"]) == 0
    (demo / "checkpoints").rename(demo / "away")
    capsys.readouterr()
    assert smalti(["models", "ls", "--json"]) == 0
    assert [version["number"] for version in json_of(capsys)] == [3]
    assert smalti(["models", "ls"]) == 0
    assert "--all lists 2 more" in capsys.readouterr().err
    assert smalti(["models", "ls", "--all"]) == 0
    third, second, first = capsys.readouterr().out.splitlines()[1:]
    assert "candidate" in third
    assert second.endswith("step-00000020 (gone)")
    assert first.endswith("export (now demo/3)")


def test_nothing_is_registered_yet(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert smalti(["models", "ls"]) == 0
    assert "smalti export RUN registers one" in capsys.readouterr().out
    assert smalti(["models", "ls", "demo"]) == 2
    assert smalti(["models", "add", "nowhere"]) == 2
    assert smalti(["models", "tag", "a/b/c", "x"]) == 2
    assert smalti(["serve", "models:/demo@production"]) == 2
    assert "there is no registered model 'demo'" in capsys.readouterr().err


def test_a_version_is_found_where_a_command_takes_a_model(demo: Path, tmp_path: Path) -> None:
    model = find("models:/demo/1")
    assert (model.folder, model.run_folder, model.version) == (f"{demo}/export", str(demo), "demo/1")
    with pytest.raises(Exception, match="models:/demo/2 is a checkpoint") as caught:
        find("models:/demo")
    assert "hint: smalti export models:/demo/2 --output FOLDER" in str(caught.value)
    adapter = tmp_path / "lora"
    write_export(adapter).joinpath("config.json").rename(adapter / "adapter_config.json")
    assert smalti(["models", "add", str(adapter), "--name", "lora"]) == 0
    assert find_adapter("models:/lora") == str(adapter)
    assert find_adapter("some/folder") == "some/folder"
    with pytest.raises(Exception, match="models:/lora/1 is an adapter"):
        find("models:/lora")
    with pytest.raises(Exception, match="models:/demo/1 is a model"):
        find_adapter("models:/demo/1")


def test_two_commands_at_once_both_register(home: Path, tmp_path: Path) -> None:
    started = []
    for number in range(2):
        folder = write_export(tmp_path / str(number), weights=bytes([number]) * 99)
        command = [sys.executable, "-m", "smalti", "models", "add", str(folder), "--name", "demo", "--json"]
        started.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
    numbers = {json.loads(each.communicate(timeout=60)[0])["number"] for each in started}
    assert numbers == {1, 2}


@pytest.mark.slow
def test_an_export_is_registered_evaluated_and_replaced(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    run = tiny_run(tmp_path)
    assert smalti(["export", str(run)]) == 0
    assert "registered as models:/tiny/1\n" in capsys.readouterr().out
    evaluate = ["eval", "run", "models:/tiny/1", "tasks=[heldout]", "max_bytes=200", "resamples=20"]
    assert smalti(evaluate) == 0
    capsys.readouterr()
    assert smalti(["models", "show", "tiny", "--json"]) == 0
    shown = json_of(capsys)
    assert (shown["step"], shown["tokens"], shown["run"]) == (20, 20 * 64, "tiny")
    assert shown["scores"]["demo"]["heldout/code"]["metric"] == "bits_per_byte"
    assert smalti(["export", str(run), "--dtype", "bf16"]) == 0
    assert "registered as models:/tiny/2\n" in capsys.readouterr().out
    assert smalti(["chat", "models:/tiny/1", "--prompt", "def", "--max-tokens", "2"]) == 2
    assert "has changed since tiny/1 was registered; it holds tiny/2 now" in capsys.readouterr().err
    assert smalti(["chat", "models:/tiny", "--prompt", "def", "--max-tokens", "2"]) == 0
    assert smalti(["models", "add", f"{run}/checkpoints/step-00000020", "--tag", "blessed"]) == 0
    again = ["export", "models:/tiny@blessed", "--output", "kept", "--name", "kept"]
    assert smalti([*again, "--step", "20"]) == 2
    assert smalti(again) == 0
    assert "registered as models:/kept/1\n" in capsys.readouterr().out
    assert smalti(["export", "models:/kept"]) == 2
    assert smalti(["export", str(run), "--no-register", "--name", "x"]) == 2
    capsys.readouterr()
    monkeypatch.setenv("SMALTI_HOME", "/proc/smalti")
    assert smalti(["export", str(run)]) == 0
    assert "warning: " in capsys.readouterr().err
    assert smalti(["models", "ls"]) == 2
    assert "hint: choose another folder: export SMALTI_HOME=FOLDER" in capsys.readouterr().err
