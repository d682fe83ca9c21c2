"""``smalti env``: what a bug report needs, quickly, and never a secret."""

import json
import os
import time

import pytest

from smalti.base.machine import without_home
from smalti.cli.env import variables
from smalti.cli.main import run as smalti
from smalti.fleet import machine

SECRETS = {
    "WANDB_API_KEY": "canary-1",
    "AWS_SECRET_ACCESS_KEY": "canary-2",
    "HF_TOKEN": "canary-3",
    "HTTPS_PROXY": "http://me:canary-4@proxy:1",
    "MLFLOW_TRACKING_URI": "http://me:canary-5@host",
    "TORCH_HOME": "/data/canary-6/cache",
    "MASTER_ADDR": "canary-7",
    "NCCL_TOKEN": "canary-8",
    "OMP_NUM_THREADS": "2 $(canary-9)",
    "UNKNOWN_CANARY": "canary-10",
}


def test_no_secret_is_told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    for arguments in ([], ["--json"]):
        assert smalti(["env", "--no-torch", *arguments]) == 0
        out = capsys.readouterr().out
        assert "canary" not in out
        assert "WANDB_API_KEY" in out
        assert "UNKNOWN" not in out


def test_values_that_hold_no_secret_are_told() -> None:
    told = variables({"OMP_NUM_THREADS": "4", "RANK": "0", "NCCL_DEBUG": "INFO", "CUDA_VISIBLE_DEVICES": "0,1"})
    assert told == {"OMP_NUM_THREADS": "4", "RANK": "0", "NCCL_DEBUG": "INFO", "CUDA_VISIBLE_DEVICES": "0,1"}


def test_home_is_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/srv/people/ada")
    assert without_home({"a": ["/srv/people/ada/x", "/srv/people/adam", "/home/bob/y /Users/eve/z"]}) == {
        "a": ["~/x", "/srv/people/adam", "~/y ~/z"]
    }


def test_what_a_report_needs_is_there(capsys: pytest.CaptureFixture[str]) -> None:
    began = time.perf_counter()
    assert smalti(["env", "--no-torch", "--json"]) == 0
    assert time.perf_counter() - began < 3  # 0.3 s on two quiet cores
    found = json.loads(capsys.readouterr().out)
    assert found["smalti"]["version"]
    assert 1 <= found["cpu"]["usable"] <= (os.cpu_count() or 1)
    assert found["memory"]["total_bytes"] > found["memory"]["available_bytes"] > 0
    assert found["disks"]["here"]["free_bytes"] > 0
    assert all(one["problem"] is None for one in found["packages"]["core"].values())
    assert found["torch"] is None


@pytest.mark.slow
def test_torch_is_asked_in_a_child(capsys: pytest.CaptureFixture[str]) -> None:
    assert smalti(["env"]) == 0
    out = capsys.readouterr().out
    for text in ("torch bf16_on_cpu", "torch distributed", "gloo", "torch grouped_mm", "packages: data"):
        assert text in out, text


def test_a_broken_torch_is_part_of_the_report(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: object
) -> None:
    from smalti.base.errors import SmaltiError
    from smalti.fleet import measure

    def broken(**_: object) -> None:
        raise SmaltiError("the probe torch_facts ended with exit code 1:\nlibcudart.so: not found")

    monkeypatch.setattr(measure, "torch_facts", broken)
    assert smalti(["env"]) == 0
    assert "libcudart.so: not found" in capsys.readouterr().out


def test_gpus_are_named_as_the_table_of_devices_names_them(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = ("NVIDIA H100 80GB HBM3, 81559, 570.1, Disabled, 0", "NVIDIA H100 80GB HBM3, 81559, 570.1, Enabled, 0",
             "NVIDIA H20, 97871, 570.1, Disabled, 0")  # fmt: skip
    monkeypatch.setattr(machine, "gpus", lambda: {"devices": [machine.gpu_of(line) for line in lines], "problem": None})
    assert smalti(["env", "--no-torch"]) == 0
    out = capsys.readouterr().out
    assert "NVIDIA H100 80GB HBM3 (h100-sxm), 79.6 GiB" in out
    assert out.count("(unknown device, so without MFU)") == 2
    assert smalti(["env", "--no-torch", "--json"]) == 0
    devices = json.loads(capsys.readouterr().out)["gpus"]["devices"]
    assert [one["known_as"] for one in devices] == ["h100-sxm", None, None]
