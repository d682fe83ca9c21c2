"""Facts about this machine, without torch: processor, memory and its limits, disks, GPUs by the driver's own tool.

Unknown facts are absent or None.
"""

import os
import re
import shutil
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil

from smalti.base.cgroup import cgroup, memory_limit_bytes
from smalti.base.machine import cpu_count
from smalti.track.provenance import cpu_name

_FLAGS = ("avx2", "avx512f", "avx512_bf16", "avx512_fp16", "amx_bf16", "amx_tile", "asimd", "bf16", "sve")
"""Instructions that determine how fast bfloat16 is on a CPU; the last three are Arm's."""

_TOOLS = ("nvidia-smi", "rocm-smi", "amd-smi", "srun", "kubectl", "docker", "apptainer", "ray")
_GPU_FILES = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")
"""Files of NVIDIA's driver, AMD's, and either under Windows (WSL)."""
_QUERY = "name,memory.total,driver_version,mig.mode.current,ecc.errors.uncorrected.volatile.total"


def cpu() -> dict[str, Any]:
    """Return model, cores, usable cores, and the instructions for bfloat16."""
    return {
        "name": cpu_name(),
        "cores": psutil.cpu_count(logical=False),
        "threads": psutil.cpu_count(),
        "usable": cpu_count(),
        "quota_cpus": cpu_quota(),
        "features": [flag for flag in _FLAGS if flag in _cpu_flags()],
    }


def memory() -> dict[str, Any]:
    """Return total and available bytes, swap, and the limit of the cgroup, if any."""
    main = psutil.virtual_memory()
    return {
        "total_bytes": main.total,
        "available_bytes": main.available,
        "swap_bytes": psutil.swap_memory().total,
        "cgroup_limit_bytes": memory_limit_bytes(),
    }


def disks(folder: str | Path = ".") -> dict[str, dict[str, Any]]:
    """Return kind, bytes and free bytes of ``here`` (the disk of ``folder``) and ``shm`` (``/dev/shm``)."""
    by_name = {"here": _disk(Path(folder).resolve())}
    if Path("/dev/shm").is_dir():
        by_name["shm"] = _disk(Path("/dev/shm"))
    return by_name


def gpus() -> dict[str, Any]:
    """Return ``devices`` as nvidia-smi lists them, or ``problem``: why it cannot. For PyTorch's view see the probes."""
    if shutil.which("nvidia-smi") is None:
        return {"devices": [], "problem": None}
    command = ["nvidia-smi", f"--query-gpu={_QUERY}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return {"devices": [], "problem": f"nvidia-smi: {error}"}
    if done.returncode != 0:
        output = " ".join((done.stdout + done.stderr).split())
        return {"devices": [], "problem": f"nvidia-smi ended with {done.returncode}: {output[:200]}"}
    return {"devices": [gpu for line in done.stdout.splitlines() if (gpu := gpu_of(line))], "problem": None}


def why_no_gpu() -> str | None:
    """Return why PyTorch cannot have a GPU on this machine; None if it may have one."""
    try:
        torch = version("torch")
    except PackageNotFoundError:
        return "PyTorch is not installed"
    if torch.endswith("+cpu"):
        return f"PyTorch {torch} is built for the CPU alone"
    if not any(Path(file).exists() for file in _GPU_FILES):
        return f"this machine has no GPU driver (none of {', '.join(_GPU_FILES)})"
    return None


def gpu_of(line: str) -> dict[str, Any] | None:
    """Parse a line of nvidia-smi's output; None if it does not describe a GPU."""
    parts = [part.strip() for part in line.split(",")]
    if len(parts) != len(_QUERY.split(",")):
        return None
    name, mib, driver, mig, ecc = parts
    return {
        "name": name,
        "memory_bytes": int(mib) * 1024**2 if mib.isdigit() else None,
        "driver": driver,
        "mig": mig == "Enabled",
        "ecc_errors": int(ecc) if ecc.isdigit() else None,
    }


def tools() -> list[str]:
    """Return the programs of drivers, schedulers and containers that are on the path."""
    return [name for name in _TOOLS if shutil.which(name)]


def cpu_quota() -> float | None:
    """Return the CPU quota of the cgroups (2.0 in a container with ``--cpus 2``); None without one."""
    quotas = []
    for text in cgroup("cpu.max", "", ""):
        quota, _, period = text.partition(" ")
        if quota.isdigit() and period.isdigit():
            quotas.append(int(quota) / int(period))
    for text, period in zip(
        cgroup("", "cpu", "cpu.cfs_quota_us"), cgroup("", "cpu", "cpu.cfs_period_us"), strict=False
    ):
        if text.isdigit() and period.isdigit():  # -1: none
            quotas.append(int(text) / int(period))
    return min(quotas, default=None)


def _disk(path: Path) -> dict[str, Any]:
    usage = shutil.disk_usage(path)
    mounts = [mount for mount in psutil.disk_partitions(all=True) if path.is_relative_to(mount.mountpoint)]
    kind = max(mounts, key=lambda mount: len(mount.mountpoint)).fstype if mounts else None
    return {"kind": kind, "total_bytes": usage.total, "free_bytes": usage.free, "writable": os.access(path, os.W_OK)}


def _cpu_flags() -> set[str]:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return set()
    match = re.search(r"^(?:flags|Features)\s*:(.*)$", text, re.MULTILINE)
    return set(match[1].split()) if match else set()
