"""``smalti export`` as it is typed."""

import shutil
import sys
from pathlib import Path

import pytest
from tiny_runs import tiny_run

from smalti.cli.main import run as smalti


@pytest.mark.slow
def test_export_and_verify(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tiny_run(tmp_path, family="dbrx")
    assert smalti(["export", str(run), "--dtype", "bf16", "--verify"]) == 0
    out = capsys.readouterr().out
    assert "step 20, bf16, weights " in out
    assert "transformers computes the same logits: relative error" in out
    assert f"smalti chat {run}" in out


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["nowhere"], "no run folder 'nowhere'"),
        (["nowhere", "--dtype", "fp8"], "fp8"),
        (["models:/a/1", "--from", "s3://bucket/a"], "--from s3://bucket/a with models:/a/1"),
        (["nowhere", "--from", "runs/a"], "hint: smalti export RUN --from s3://bucket/runs/NAME"),
        ([], "hint: smalti export --help"),
    ],
)
def test_bad_requests_exit_2(arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert smalti(["export", *arguments]) == 2
    assert text in capsys.readouterr().err


def test_a_checkpoint_of_a_store_is_exported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tiny_run(tmp_path)
    url = f"memory://{tmp_path.name}/a"
    assert smalti(["runs", "checkpoints", "copy", str(run), "20", url]) == 0
    shutil.rmtree(run / "checkpoints")
    assert smalti(["export", str(run), "--from", url, "--no-register"]) == 0
    assert "step 20, fp32" in capsys.readouterr().out
    assert (run / "export/config.json").is_file()
    assert not (run / "checkpoints").exists()


def test_help_shows_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    assert smalti(["export", "--help"]) == 0
    assert "Example: smalti export runs/demo" in capsys.readouterr().out


def test_a_check_without_transformers_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before the export, which may take long."""
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert smalti(["export", "nowhere", "--verify"]) == 2
    assert "hint: pip install 'smalti[verify]'" in capsys.readouterr().err
