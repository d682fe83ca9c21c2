"""Starts the probes as child processes and reads their answer, so that no caller imports torch.

Nothing is cached: what was measured yesterday, beside other work, is wrong today. ``measured_machine`` can be saved as
a file of a device by who calls it.
"""

import json
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from typing import Any

from pydantic import ValidationError

from smalti.base.env import child_environment, cpu_count
from smalti.base.errors import SmaltiError, UserError
from smalti.config.hardware import Hardware
from smalti.config.measured import Format, Measured
from smalti.fleet.machine import cpu, memory

Tell = Callable[[str], None]


def measured_machine(
    *,
    threads: int = 0,
    formats: Sequence[Format] = ("bf16", "fp32"),
    tell: Tell = lambda line: None,
    timeout_s: float = 300.0,
) -> Hardware:
    """This machine's CPU as a device, measured with ``threads`` threads (0: all usable cores); about 30 s a format.

    ``tell`` hears what is being measured. The peak of a format is its fastest product; the bandwidth is that of a large
    copy, read and written. fp32 is always among the formats: the router and the update work in it.
    """
    threads = threads or cpu_count()
    wanted = tuple(dict.fromkeys((*formats, "fp32")))
    arguments = ["--threads", str(threads)]
    arguments += [word for name in wanted for word in ("--format", name)]
    # torchrun sets OMP_NUM_THREADS=1; the probe is told its threads outright.
    found = _answer("machine", arguments, {"OMP_NUM_THREADS": str(threads)}, timeout_s, tell)
    if cpu_count() > 1:
        tell("an all-reduce between two processes")
        found["collective"] = _answer("all_reduce", [], {"OMP_NUM_THREADS": "1"}, timeout_s)
    try:
        measured = Measured.model_validate(found)
    except ValidationError as error:
        raise SmaltiError(f"what the probe measured cannot be read: {error}") from error
    return _as_device(measured)


def _as_device(measured: Measured) -> Hardware:
    about, by = cpu(), f"measured on {measured.date} with {measured.threads} threads, {measured.software}"
    elements, copy_s = measured.kernels["fp32"]["copy"][-1]
    peaks = {
        name: max(point[3] for points in of_operands.values() for point in points)
        for name, of_operands in measured.matmul.items()
    }
    return Hardware.model_validate(
        {
            "name": "this-machine",
            "title": str(about["name"] or "this machine"),
            "kind": "cpu",
            "peak_flops_per_s": peaks,
            "memory_bytes": memory()["total_bytes"],
            "memory_bytes_per_s": elements * 8 / copy_s,
            "sources": {
                "peak_flops_per_s": f"{by}: the fastest product",
                "memory_bytes": "the operating system",
                "memory_bytes_per_s": f"{by}: a copy of {elements * 4 / 2**20:.0f} MiB, read and written",
            },
            "measured": measured.model_dump(),
        }
    )


def measured_gpu(*, tell: Tell = lambda line: None, timeout_s: float = 300.0) -> Hardware:
    """The GPU that PyTorch takes first here as a device: its fastest products, a copy, its memory.

    No network is measured, so it is one device without others. UserError where PyTorch sees none.
    """
    tell("large products and a copy on the GPU")
    found = _answer("gpu", [], {}, timeout_s)
    if "problem" in found:
        raise UserError(found["problem"], allowed="a machine with one", hint="without --device the CPU is measured")
    by = f"measured on {found['date']}, {found['software']}"
    return Hardware.model_validate(
        {
            "name": "this-machine",
            "title": found["name"],
            "kind": found["kind"],
            "peak_flops_per_s": found["peak_flops_per_s"],
            "matmul_frac": 1.0,
            "memory_bytes": found["memory_bytes"],
            "memory_bytes_per_s": found["memory_bytes_per_s"],
            "sources": {
                "peak_flops_per_s": f"{by}: the fastest product",
                "matmul_frac": "the peak is that of a large product",
                "memory_bytes": "its driver",
                "memory_bytes_per_s": f"{by}: a large copy, read and written",
            },
            "notes": [
                "Its peak is a product that was measured: an MFU of it is higher than one of a published peak.",
                "No link to other devices was measured.",
            ],
        }
    )


def torch_facts(*, timeout_s: float = 60.0) -> dict[str, Any]:
    """What PyTorch here can do (``probes/torch_facts.py``); SmaltiError where it cannot even be imported."""
    return _answer("torch_facts", [], {}, timeout_s)


def _answer(
    probe: str, arguments: list[str], extra: dict[str, str], timeout_s: float, tell: Tell = lambda line: None
) -> dict[str, Any]:
    """The JSON object that a probe prints last; ``tell`` hears the lines of its stderr as they come."""
    command = [sys.executable, "-m", f"smalti.fleet.probes.{probe}", *arguments]
    environment = child_environment(extra)
    with (
        tempfile.TemporaryFile("w+") as printed,
        subprocess.Popen(command, env=environment, stdout=printed, stderr=subprocess.PIPE, text=True) as child,
    ):
        assert child.stderr is not None
        timer = threading.Timer(timeout_s, child.kill)
        timer.start()
        said = []
        for line in child.stderr:
            said.append(line.rstrip())
            tell(said[-1])
        code = child.wait()
        late = timer.finished.is_set()
        timer.cancel()
        printed.seek(0)
        lines = printed.read().strip().splitlines()
    if late:
        raise SmaltiError(f"the probe {probe} did not end within {timeout_s:.0f} s", hint=" ".join(command[1:]))
    if code != 0:
        tail = "\n".join(said[-5:])
        raise SmaltiError(f"the probe {probe} ended with exit code {code}:\n{tail}", hint=" ".join(command[1:]))
    return dict(json.loads(lines[-1]))
