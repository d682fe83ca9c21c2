"""What ``smalti plan`` says to people: assumptions by name, numbers that cannot be, devices that cannot do it."""

import json
from pathlib import Path

import pytest
from synthetic_machine import machine

from smalti.cli.main import run
from smalti.cli.plan.measure import write


@pytest.fixture
def cpu(tmp_path: Path) -> str:
    path = str(tmp_path / "machine.yaml")
    write(machine(), path)
    return path


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["budget", "gpus=1.5", "days=3"], "error: gpus=1.5 is not a whole number"),
        (["phases", "params=7b", "gpus=1.5", "pairs=1e4"], "error: gpus=1.5 is not a whole number"),
        (["failures", "gpus=1.5"], "error: gpus=1.5 is not valid"),
        (["time", "demo", "--rate", "1e30"], "up to 1e+24"),
        (["time", "demo", "--rate", "nan"], "error: a rate of nan"),
        (["budget", "gpu=a100-80gb", "precision=fp8", "cost_usd=1e6"], "allowed: bf16, fp16, tf32"),
        (["data", "demo", "--tokens", "code=10q"], "such as 7e9, 7b, 1.4T"),
        (["data", "demo", "--tokens", "code=1e30"], "code=1e30 is out of range"),
        (["data", "demo", "--request-latency", "x"], "hint: smalti plan data --help"),
        (["layout", "demo", "--gpu", "apple-m4-max-64gb"], "does not run on Apple"),
        (["budget", "cost_usd=1e6", "--plot", "s3://nowhere/b.png"], "is not an .svg file"),
    ],
)
def test_what_cannot_be_is_refused_by_name(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", *words]) == 2
    assert said in capsys.readouterr().err


def test_tokens_are_read_as_everywhere(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "data", "demo", "--tokens", "code=10b", "--tokens", "prose=0.5T", "--json"]
    assert run(words) == 0
    sources = {one["name"]: one for one in json.loads(capsys.readouterr().out)["sources"]}
    assert (sources["code"]["n_tokens"], sources["prose"]["n_tokens"]) == (10**10, 5 * 10**11)


def test_every_default_of_failures_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", "failures", "gpus=3072", "checkpoint_interval_s=3600", "restart_s=120"]) == 0
    said = capsys.readouterr().out
    for text in ("checkpoint_upload_s=0 (", "failures_during_restart=false (", "the mix of causes: Llama 3's"):
        assert text in said
    assert "warning: a checkpoint every 21m" in said
    assert run(["plan", "failures", "gpus=3072", "failures_during_restart=true"]) == 0
    assert "failures_during_restart=" not in capsys.readouterr().out


@pytest.mark.parametrize(("verb", "more"), [("layout", ["--gpus", "1"]), ("scaling", ["--gpus", "1"])])
def test_a_device_that_is_assumed_is_said(verb: str, more: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", verb, "demo", *more]) == 0
    assert "assumed: --gpu h100-sxm" in capsys.readouterr().out
    assert run(["plan", verb, "demo", *more, "--gpu", "h100-sxm", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["assumed"] == {}


@pytest.mark.parametrize("verb", ["layout", "scaling"])
def test_ranks_of_a_cpu_have_no_layout(verb: str, cpu: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", verb, "demo", "--gpu", cpu, "--gpus", "2"]) == 2
    said = capsys.readouterr().err
    assert "ranks on a CPU share its threads and memory" in said
    assert "hint: smalti plan time RECIPE train.parallel.ranks=2" in said


def test_a_picture_in_a_store_that_is_not_there(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    from smalti.base import cloud

    def refused(url: str, path: str) -> None:
        raise cloud.final_error(url, OSError("connection refused"))

    monkeypatch.setattr(cloud, "put", refused)
    monkeypatch.chdir(tmp_path)
    assert run(["plan", "budget", "cost_usd=1e6", "--plot", "s3://nowhere/b.svg"]) == 75
    said = capsys.readouterr().err
    assert said.startswith("error: s3://nowhere/b.svg: the store does not respond correctly: connection refused")
    assert "hint: run it again" in said
    assert not list(tmp_path.iterdir()), "nothing under a local name"
