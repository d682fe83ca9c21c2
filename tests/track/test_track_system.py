"""System metrics: the readings, those that a machine lacks, the cost of a sample."""

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from smalti.track import names, system
from smalti.track.system import System, gpu_readers


class FakeNvml:
    """pynvml's functions for two GPUs: the second reports neither its power nor, at first, its temperature."""

    NVML_TEMPERATURE_GPU, NVML_CLOCK_SM, NVML_CLOCK_MEM = 0, 1, 2

    class NVMLError(Exception):
        pass

    class NVMLError_NotSupported(NVMLError):
        pass

    def __init__(self) -> None:
        self.asked: list[str] = []

    def nvmlInit(self) -> None:
        pass

    def nvmlDeviceGetCount(self) -> int:
        return 2

    def nvmlDeviceGetHandleByIndex(self, number: int) -> int:
        return number

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> Any:
        return SimpleNamespace(gpu=87, memory=40)

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> Any:
        return SimpleNamespace(used=60 * 2**30, total=80 * 2**30)

    def nvmlDeviceGetPowerUsage(self, handle: int) -> int:
        self.asked.append(f"power {handle}")
        if handle == 1:
            raise self.NVMLError_NotSupported
        return 612_500

    def nvmlDeviceGetTemperature(self, handle: int, sensor: int) -> int:
        if handle == 1 and "temperature" not in self.asked:
            self.asked.append("temperature")
            raise self.NVMLError("timeout")
        return 61

    def nvmlDeviceGetClockInfo(self, handle: int, kind: int) -> int:
        return 1980 if kind == self.NVML_CLOCK_SM else 2619


def test_gpus_in_the_units_of_their_names() -> None:
    nvml = FakeNvml()
    first, second = gpu_readers(nvml)
    assert first() == {
        "system/gpu0/busy_frac": 0.87, "system/gpu0/memory_used_bytes": 60 * 2**30, "system/gpu0/memory_frac": 0.75,
        "system/gpu0/power_watts": 612.5, "system/gpu0/temperature_celsius": 61, "system/gpu0/sm_clock_mhz": 1980,
        "system/gpu0/memory_clock_mhz": 2619,
    }  # fmt: skip
    names.check(first())
    assert "system/gpu1/temperature_celsius" not in second()
    assert second()["system/gpu1/temperature_celsius"] == 61  # it did not tell once, and is asked again
    assert nvml.asked.count("power 1") == 1  # it cannot tell, and is not


def test_a_driver_that_does_not_start_leaves_the_gpus_out(caplog: pytest.LogCaptureFixture) -> None:
    nvml = FakeNvml()

    def refuse() -> None:
        raise nvml.NVMLError("Driver/library version mismatch")

    nvml.nvmlInit = refuse  # type: ignore[method-assign]
    assert gpu_readers(nvml) == []


def test_readings_are_means_since_the_last_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        system, "_nvidia", lambda: [iter([{"system/gpu0/busy_frac": n / 10} for n in (2, 4, 9)]).__next__]
    )
    sampler = System(tmp_path, every_s=3600)
    try:
        sampler.sample()
        sampler.sample()
        assert sampler.take()["system/gpu0/busy_frac"] == pytest.approx(0.3)
        sampler.sample()
        assert sampler.take()["system/gpu0/busy_frac"] == 0.9
        assert sampler.take() == {}
    finally:
        sampler.close()


@pytest.mark.slow
def test_a_machine_that_works_is_seen_to_work(tmp_path: Path) -> None:
    sampler = System(tmp_path, every_s=0.2)
    end_s = time.monotonic() + 1.0
    while time.monotonic() < end_s:
        sum(range(1000))
    sampler.close()
    result = sampler.take()
    names.check(result)
    assert 0 < result["system/cpu_frac"] <= 1
    assert result["system/process_cpu_cores"] > 0.05
    assert 1e6 < result["system/process_memory_bytes"] < result["system/memory_used_bytes"]
    assert result["system/disk_free_bytes"] > 0
    assert 0 < result["system/memory_frac"] < 1


def test_a_sampler_that_fails_ends_with_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(system.log, "get", lambda area: SimpleNamespace(warning=lambda text, *a: said.append(text % a)))
    monkeypatch.setattr(system, "_nvidia", lambda: [lambda: {}["gone"]])
    sampler = System(tmp_path, every_s=0.01)
    sampler._thread.join(timeout=5)
    sampler.close()
    assert said == ["system metrics end here: KeyError: 'gone'"]


def test_a_sample_costs_less_than_a_thousandth_of_ten_seconds(tmp_path: Path) -> None:
    sampler = System(tmp_path, every_s=3600)
    before_s = time.thread_time()
    for _ in range(50):
        sampler.sample()
    assert (time.thread_time() - before_s) / 50 < 0.001 * 10 / 2
    sampler.close()


def test_bytes_of_volumes_that_lie_on_a_disk_count_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def of(n_bytes: int) -> Any:
        return SimpleNamespace(read_bytes=n_bytes, write_bytes=2 * n_bytes)

    result = {"sda": of(100), "sda1": of(90), "dm-0": of(90)}
    monkeypatch.setattr(system.psutil, "disk_io_counters", lambda perdisk=False: result if perdisk else of(190))
    monkeypatch.setattr(system, "_BLOCK", str(tmp_path))
    for name, inside in (("sda", "device"), ("dm-0", "dm")):
        (tmp_path / name / inside).mkdir(parents=True)
    assert system._disks() == [result["sda"]]
    monkeypatch.setattr(system, "_BLOCK", str(tmp_path / "absent"))
    assert system._disks()[0].read_bytes == 190
    monkeypatch.setattr(system.psutil, "disk_io_counters", lambda perdisk=False: {} if perdisk else None)
    assert system._disks() == []
