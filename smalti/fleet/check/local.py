"""The report of one node, without torch: facts that must be the same on all nodes, and its disk.

A report is a JSON value: ``node`` (host name), ``boot`` (the same for nodes that share a machine), ``facts`` (name ->
value), ``problems`` (each with ``kind`` and ``message``) and ``disk_bytes_per_s``. A probe adds ``products`` and
``links``.
"""

import platform
import socket
from collections import Counter
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from smalti.base.errors import SmaltiError
from smalti.base.units import format_bytes
from smalti.fleet import machine
from smalti.fleet.measure import run_probe

Json = dict[str, Any]

DISK_BYTES = 2**26
"""Written to the folder of the run and read back."""
_NET = Path("/sys/class/net")


def report_of_node(folder: Path, *, timeout_s: float) -> Json:
    """Return the report of this node; ``folder`` is where runs are written."""
    gpus = machine.gpus()
    report: Json = {
        "node": socket.gethostname(),
        "boot": _read(Path("/proc/sys/kernel/random/boot_id")),
        "facts": facts(gpus["devices"]),
        "problems": [],
    }
    if gpus["problem"]:
        report["problems"].append({"kind": "driver", "message": gpus["problem"]})
    for number, gpu in enumerate(gpus["devices"]):
        if gpu["ecc_errors"]:
            message = f"GPU {number} has {gpu['ecc_errors']} uncorrected ECC errors since the driver was loaded"
            report["problems"].append({"kind": "gpu_memory", "message": message})
    try:
        report |= measure_disk(folder, timeout_s)
    except SmaltiError as error:
        report["problems"].append({"kind": "disk", "message": error.message})
    return report


def measure_disk(folder: Path, timeout_s: float) -> Json:
    """Return ``disk_bytes_per_s`` of a folder. SmaltiError where it cannot be written, or does not answer."""
    answer = run_probe("disk", [str(folder), str(DISK_BYTES)], {}, timeout_s)
    if "problem" in answer:
        raise SmaltiError(answer["problem"])
    return answer


def facts(gpus: Sequence[Json] = ()) -> dict[str, str]:
    """Return what must not differ between the nodes of a run: hardware, driver, system, limits, packages.

    gpus: those of the node, as ``machine.gpus`` lists them.
    """
    import smalti

    cpu = machine.cpu()
    names = Counter(str(gpu["name"]) for gpu in gpus)
    values = {
        "cpu": f"{cpu['name']}, {cpu['usable']} threads",
        "memory": format_bytes(round(machine.memory()["total_bytes"], -9)),
        "NUMA nodes": str(len(list(Path("/sys/devices/system/node").glob("node[0-9]*")))),
        "GPUs": ", ".join(f"{count} x {name}" for name, count in sorted(names.items())) or "none",
        "GPU driver": ", ".join(sorted({str(gpu["driver"]) for gpu in gpus})) or "none",
        "MTU": ", ".join(map(str, _mtus())),
        "/dev/shm": format_bytes(machine.disks()["shm"]["total_bytes"]) if Path("/dev/shm").is_dir() else "none",
        "kernel": platform.release(),
        "clock source": _read(Path("/sys/devices/system/clocksource/clocksource0/current_clocksource")) or "unknown",
        "python": platform.python_version(),
        "smalti": smalti.__version__,
    }  # fmt: skip
    return values | {f"limit {name}": value for name, value in _limits().items()} | _packages()


def _mtus() -> list[int]:
    """Return the different MTUs of the network interfaces that are up, without loopback."""
    mtus = set()
    for interface in _NET.iterdir() if _NET.is_dir() else ():
        value = _read(interface / "mtu")
        if interface.name != "lo" and _read(interface / "operstate") == "up" and value:
            mtus.add(int(value))
    return sorted(mtus)


def _limits() -> dict[str, str]:
    """Return the soft limits that runs at scale meet: open files, processes, locked memory."""
    try:
        import resource
    except ImportError:  # Windows
        return {}
    names = {"open files": "RLIMIT_NOFILE", "processes": "RLIMIT_NPROC", "locked memory": "RLIMIT_MEMLOCK"}
    values = {
        name: resource.getrlimit(getattr(resource, key))[0] for name, key in names.items() if hasattr(resource, key)
    }
    return {name: "unlimited" if value == resource.RLIM_INFINITY else str(value) for name, value in values.items()}


def _packages() -> dict[str, str]:
    """Return the version of each installed distribution."""
    versions: dict[str, str] = {}
    for package in metadata.distributions():
        if name := package.metadata["Name"]:
            versions.setdefault(f"package {name.lower()}", package.version)  # the first in the search path is imported
    return dict(sorted(versions.items()))


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return None
