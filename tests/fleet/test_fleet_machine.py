"""Facts about the machine: output of the driver's tool, limits of cgroups; unknown facts are None."""

from pathlib import Path

import pytest

from smalti.base import cgroup
from smalti.fleet import machine


def test_a_line_of_nvidia_smi() -> None:
    gpu = machine.gpu_of("NVIDIA H200, 143771, 580.65.06, Disabled, 0")
    assert gpu == {
        "name": "NVIDIA H200",
        "memory_bytes": 143771 * 1024**2,
        "driver": "580.65.06",
        "mig": False,
        "ecc_errors": 0,
    }
    odd = machine.gpu_of("GeForce, [N/A], 550, [N/A], [N/A]")
    assert odd is not None
    assert (odd["memory_bytes"], odd["mig"], odd["ecc_errors"]) == (None, False, None)
    assert machine.gpu_of("No devices were found") is None


@pytest.mark.parametrize(
    ("script", "problem"), [("exit 0", None), ("echo NVML: driver mismatch >&2; exit 18", "driver mismatch")]
)
def test_a_broken_driver_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, problem: str | None
) -> None:
    (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\n{script}\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    listed = machine.gpus()
    assert listed["devices"] == []
    assert (problem or "") in (listed["problem"] or "")
    assert (listed["problem"] is None) == (problem is None)


def test_the_lowest_limit_of_all_cgroups_above_counts(tmp_path: Path) -> None:
    inner = tmp_path / "a" / "b"
    inner.mkdir(parents=True)
    (inner / "memory.max").write_text("max\n")
    (tmp_path / "a" / "memory.max").write_text("1000\n")
    assert cgroup._upwards(tmp_path, "/a/b", "memory.max") == ["max", "1000"]
    assert cgroup._upwards(tmp_path, "/../x", "memory.max") == []
    assert (cgroup.memory_limit_bytes() or 1) > 0
    assert 0 < cgroup.main_memory_bytes() <= machine.memory()["total_bytes"]


def test_this_machine() -> None:
    assert machine.cpu()["name"]
    assert machine.memory()["total_bytes"] > 0
    assert machine.disks()["here"]["writable"] in (True, False)


@pytest.mark.parametrize(
    ("torch", "file", "words"),
    [
        ("2.13.0+cpu", "driver", "PyTorch 2.13.0+cpu is built for the CPU alone"),
        ("2.13.0+cu130", "nowhere", "no GPU driver"),
        ("2.13.0+cu130", "driver", None),
        ("2.13.0", "driver", None),
    ],
)
def test_a_gpu_that_cannot_be_is_known_without_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, torch: str, file: str, words: str | None
) -> None:
    (tmp_path / "driver").touch()
    monkeypatch.setattr(machine, "version", lambda name: torch)
    monkeypatch.setattr(machine, "_GPU_FILES", (str(tmp_path / file),))
    reason = machine.why_no_gpu()
    assert reason is None if words is None else words in str(reason)
