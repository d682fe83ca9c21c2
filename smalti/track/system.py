"""What the machine of rank 0 does while it trains: CPU, memory, disks, network, GPUs.

Promises: a thread samples every ``every_s`` seconds and the training only takes the means; what a machine does not have
or does not tell is absent, never 0. Measured: 0.7 ms a sample without a GPU. One machine: the others have ranks, but
nobody looks. GPUs are NVIDIA's (NVML), all of the machine.
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
    """Samples in a thread of its own from its making to ``close``."""

    def __init__(self, folder: str | Path, *, every_s: float) -> None:
        """``folder``: the free space of its disk is told."""
        self._machine, self._gpus = _Machine(folder), _nvidia()
        self._every_s = every_s
        self._lock = threading.Lock()
        self._sums: Reading = {}
        self._counts: dict[str, int] = {}
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="smalti-system", daemon=True)
        self._thread.start()

    def take(self) -> Reading:
        """The mean of each value over the samples since the last call; empty where there was none."""
        with self._lock:
            means = {name: total / self._counts[name] for name, total in self._sums.items()}
            self._sums, self._counts = {}, {}
        return means

    def close(self) -> None:
        """Stop sampling."""
        self._closing.set()
        self._thread.join(timeout=5)

    def sample(self) -> None:
        """Take one sample now."""
        found = self._machine.read()
        for gpu in self._gpus:
            found.update(gpu())
        with self._lock:
            for name, value in found.items():
                self._sums[name] = self._sums.get(name, 0.0) + value
                self._counts[name] = self._counts.get(name, 0) + 1

    def _run(self) -> None:
        while not self._closing.wait(self._every_s):
            try:
                self.sample()
            except Exception as error:  # a machine that stops telling must not stop the training
                log.get("track").warning("system metrics end here: %s: %s", type(error).__name__, error)
                return


class _Machine:
    """Counters of the operating system, as rates since the reading before."""

    def __init__(self, folder: str | Path) -> None:
        self._folder = str(folder)
        self._process = psutil.Process()
        self._at_s = clock.now_s()
        self._counters = self._read_counters()

    def read(self) -> Reading:
        """Names of ``track.names`` and values, over the time since the last call."""
        now_s, counters = clock.now_s(), self._read_counters()
        seconds = max(now_s - self._at_s, 1e-6)
        grown = {name: max(0.0, counters[name] - self._counters.get(name, 0.0)) for name in counters}
        self._at_s, self._counters = now_s, counters
        found = {f"system/{name}_per_s": grown[name] / seconds for name in grown if name.endswith("_bytes")}
        if (whole := grown.get("cpu_all", 0.0)) > 0:
            found["system/cpu_frac"] = min(1.0, grown["cpu_busy"] / whole)
        found["system/process_cpu_cores"] = grown["process_cpu"] / seconds
        found["system/process_memory_bytes"] = float(self._process.memory_info().rss)
        memory = psutil.virtual_memory()
        found["system/memory_used_bytes"] = float(memory.total - memory.available)
        found["system/memory_frac"] = 1 - memory.available / memory.total
        found["system/disk_free_bytes"] = float(psutil.disk_usage(self._folder).free)
        found["system/load_1min"] = os.getloadavg()[0]
        return found

    def _read_counters(self) -> dict[str, float]:
        times = psutil.cpu_times()
        idle = times.idle + getattr(times, "iowait", 0.0)
        # Linux counts the time of guests in user's already.
        whole = sum(times) - getattr(times, "guest", 0.0) - getattr(times, "guest_nice", 0.0)
        own = self._process.cpu_times()
        found = {"cpu_all": whole, "cpu_busy": whole - idle, "process_cpu": own.user + own.system}
        if disks := _disks():
            found["disk_read_bytes"] = float(sum(disk.read_bytes for disk in disks))
            found["disk_write_bytes"] = float(sum(disk.write_bytes for disk in disks))
        cards = {name: card for name, card in psutil.net_io_counters(pernic=True).items() if name != "lo"}
        if cards:
            found["net_in_bytes"] = float(sum(card.bytes_recv for card in cards.values()))
            found["net_out_bytes"] = float(sum(card.bytes_sent for card in cards.values()))
        return found


def _disks() -> list[Any]:
    """Counters of the disks; none in a container without disks of its own.

    On Linux only what is a device: volumes of LVM, RAID or encryption lie on one, and would count its bytes again.
    """
    found = psutil.disk_io_counters(perdisk=True) or {}
    devices = [disk for name, disk in found.items() if os.path.exists(f"{_BLOCK}/{name}/device")]
    if devices or not found:
        return devices
    total = psutil.disk_io_counters()
    return [] if total is None else [total]


def _nvidia() -> list[Callable[[], Reading]]:
    """A reader for each NVIDIA GPU; none without a driver, and none without the package, which is said then."""
    if not Path("/proc/driver/nvidia/version").exists():
        return []
    try:
        import pynvml
    except ImportError:
        log.get("track").warning("no metrics of the GPUs: pip install 'smalti[gpu]'")
        return []
    return gpu_readers(pynvml)


def gpu_readers(nvml: Any) -> list[Callable[[], Reading]]:
    """A reader for each GPU that the library ``nvml`` (pynvml's functions) tells of; none where it does not start."""
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
        found: Reading = {}
        for source in list(sources):
            try:
                found |= {f"system/gpu{number}/{name}": float(value) for name, value in source().items()}
            except nvml.NVMLError_NotSupported:  # by this GPU, or by a slice of it: no use in asking again
                sources.remove(source)
            except nvml.NVMLError:
                continue
        return found

    return read


def _memory(info: Any) -> Reading:
    return {"memory_used_bytes": info.used, "memory_frac": info.used / info.total}
