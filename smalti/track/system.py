"""System metrics of rank 0's machine: CPU, memory, disks, network, and its NVIDIA GPUs (NVML).

A thread samples every ``every_s`` seconds (0.7 ms a sample without a GPU) and training takes the means. A value that
the machine does not have or report is absent, never 0. Other machines are not sampled.
"""

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from smalti.base import clock, log

Reading = dict[str, float]
_BLOCK = "/sys/block"


class System:
    """Samples in a thread from construction to ``close``."""

    def __init__(self, folder: str | Path, *, every_s: float) -> None:
        """Start sampling; ``folder`` determines the disk whose free space is reported."""
        self._machine = _Machine(folder)
        self._gpus = _nvidia()
        self._every_s = every_s
        self._lock = threading.Lock()
        self._sums: Reading = {}
        self._counts: dict[str, int] = {}
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="smalti-system", daemon=True)
        self._thread.start()

    def take(self) -> Reading:
        """Return the mean of each value over the samples since the last call; empty where there was none."""
        with self._lock:
            means = {name: total / self._counts[name] for name, total in self._sums.items()}
            self._sums = {}
            self._counts = {}
        return means

    def close(self) -> None:
        """Stop sampling."""
        self._closing.set()
        self._thread.join(timeout=5)

    def sample(self) -> None:
        """Take one sample now."""
        reading = self._machine.read()
        for gpu in self._gpus:
            reading.update(gpu())
        with self._lock:
            for name, value in reading.items():
                self._sums[name] = self._sums.get(name, 0.0) + value
                self._counts[name] = self._counts.get(name, 0) + 1

    def _run(self) -> None:
        while not self._closing.wait(self._every_s):
            try:
                self.sample()
            except Exception as error:  # a failing sensor must not stop the training
                log.get("track").warning("system metrics end here: %s: %s", type(error).__name__, error)
                return


class _Machine:
    """Reads the operating system's counters as rates since the last reading."""

    def __init__(self, folder: str | Path) -> None:
        self._folder = str(folder)
        self._process = psutil.Process()
        self._read_s = clock.now_s()
        self._counters = self._read_counters()

    def read(self) -> Reading:
        """Return values under the names of ``track.names``, over the time since the last call."""
        now_s = clock.now_s()
        counters = self._read_counters()
        seconds = max(now_s - self._read_s, 1e-6)
        grown = {name: max(0.0, counters[name] - self._counters.get(name, 0.0)) for name in counters}
        self._read_s = now_s
        self._counters = counters
        reading = {f"system/{name}_per_s": grown[name] / seconds for name in grown if name.endswith("_bytes")}
        if (whole := grown.get("cpu_all", 0.0)) > 0:
            reading["system/cpu_frac"] = min(1.0, grown["cpu_busy"] / whole)
        reading["system/process_cpu_cores"] = grown["process_cpu"] / seconds
        reading["system/process_memory_bytes"] = float(self._process.memory_info().rss)
        memory = psutil.virtual_memory()
        reading["system/memory_used_bytes"] = float(memory.total - memory.available)
        reading["system/memory_frac"] = 1 - memory.available / memory.total
        reading["system/disk_free_bytes"] = float(psutil.disk_usage(self._folder).free)
        reading["system/load_1min"] = os.getloadavg()[0]
        return reading

    def _read_counters(self) -> dict[str, float]:
        times = psutil.cpu_times()
        idle = times.idle + getattr(times, "iowait", 0.0)
        # Linux counts guest time in user time already.
        whole = sum(times) - getattr(times, "guest", 0.0) - getattr(times, "guest_nice", 0.0)
        process = self._process.cpu_times()
        counters = {"cpu_all": whole, "cpu_busy": whole - idle, "process_cpu": process.user + process.system}
        if disks := _disks():
            counters["disk_read_bytes"] = float(sum(disk.read_bytes for disk in disks))
            counters["disk_write_bytes"] = float(sum(disk.write_bytes for disk in disks))
        cards = {name: card for name, card in psutil.net_io_counters(pernic=True).items() if name != "lo"}
        if cards:
            counters["net_in_bytes"] = float(sum(card.bytes_recv for card in cards.values()))
            counters["net_out_bytes"] = float(sum(card.bytes_sent for card in cards.values()))
        return counters


def _disks() -> list[Any]:
    """Return the counters of the disks; none in a container without disks.

    On Linux only devices: volumes of LVM, RAID or encryption are on a device and would count its bytes again.
    """
    disks = psutil.disk_io_counters(perdisk=True) or {}
    devices = [disk for name, disk in disks.items() if os.path.exists(f"{_BLOCK}/{name}/device")]
    if devices or not disks:
        return devices
    total = psutil.disk_io_counters()
    return [] if total is None else [total]


def _nvidia() -> list[Callable[[], Reading]]:
    """Return a reader for each NVIDIA GPU; none without a driver, and none, with a warning, without the package."""
    if not Path("/proc/driver/nvidia/version").exists():
        return []
    try:
        import pynvml
    except ImportError:
        log.get("track").warning("no metrics of the GPUs: pip install 'smalti[gpu]'")
        return []
    return gpu_readers(pynvml)


def gpu_readers(nvml: Any) -> list[Callable[[], Reading]]:
    """Return a reader for each GPU of the library ``nvml`` (pynvml's functions); none where it does not start."""
    try:
        nvml.nvmlInit()
        handles = [nvml.nvmlDeviceGetHandleByIndex(number) for number in range(nvml.nvmlDeviceGetCount())]
    except nvml.NVMLError as error:
        log.get("track").warning("no metrics of the GPUs: NVML says %s", error)
        return []
    return [_gpu_reader(nvml, number, handle) for number, handle in enumerate(handles)]


def _gpu_reader(nvml: Any, number: int, handle: Any) -> Callable[[], Reading]:
    sources: list[Callable[[], Reading]] = [
        lambda: {"busy_frac": nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100},
        lambda: _memory(nvml.nvmlDeviceGetMemoryInfo(handle)),
        lambda: {"power_watts": nvml.nvmlDeviceGetPowerUsage(handle) / 1000},
        lambda: {"temperature_celsius": nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)},
        lambda: {"sm_clock_mhz": nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM)},
        lambda: {"memory_clock_mhz": nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_MEM)},
    ]

    def read() -> Reading:
        reading: Reading = {}
        for source in list(sources):
            try:
                reading |= {f"system/gpu{number}/{name}": float(value) for name, value in source().items()}
            except nvml.NVMLError_NotSupported:  # by this GPU or MIG slice: do not query it again
                sources.remove(source)
            except nvml.NVMLError:
                continue
        return reading

    return read


def _memory(info: Any) -> Reading:
    return {"memory_used_bytes": info.used, "memory_frac": info.used / info.total}
