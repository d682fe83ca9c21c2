"""Starts the probes as child processes and reads their results, so that no caller imports torch.

Results are not cached, because other work on the machine changes them. The caller may save ``measured_machine`` as a
device file.
"""

import json
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from typing import Any

from pydantic import ValidationError

from smalti.base.env import child_environment
from smalti.base.errors import SmaltiError, UserError
from smalti.base.machine import cpu_count
from smalti.config.hardware import Hardware
from smalti.config.measured import Format, Measured
from smalti.fleet.machine import cpu, memory

Report = Callable[[str], None]


def measured_machine(
    *,
    threads: int = 0,
    formats: Sequence[Format] = ("bf16", "fp32"),
    report: Report = lambda line: None,
    timeout_s: float = 300.0,
) -> Hardware:
    """Measure this machine's CPU with ``threads`` threads (0: all usable cores), about 30 s per format, as a device.

    ``report`` is called with what is being measured. The peak of a format is its fastest product; the bandwidth is that
    of a large copy, read and written. fp32 is always measured too: the router and the update compute in it.
    """
    threads = threads or cpu_count()
    wanted = tuple(dict.fromkeys((*formats, "fp32")))
    arguments = ["--threads", str(threads)]
    arguments += [word for name in wanted for word in ("--format", name)]
    # torchrun sets OMP_NUM_THREADS=1; the probe gets its threads explicitly.
    answer = run_probe("machine", arguments, {"OMP_NUM_THREADS": str(threads)}, timeout_s, report)
    if cpu_count() > 1:
        report("an all-reduce between two processes")
        answer["collective"] = run_probe("all_reduce", [], {"OMP_NUM_THREADS": "1"}, timeout_s)
    try:
        measured = Measured.model_validate(answer)
    except ValidationError as error:
        raise SmaltiError(f"the result of the probe cannot be read: {error}") from error
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


def measured_gpu(*, report: Report = lambda line: None, timeout_s: float = 300.0) -> Hardware:
    """Measure PyTorch's default GPU as a device: its fastest products, a copy, its memory.

    No network is measured, so it is a single device. UserError if PyTorch sees none.
    """
    report("large products and a copy on the GPU")
    answer = run_probe("gpu", [], {}, timeout_s)
    if "problem" in answer:
        raise UserError(answer["problem"], allowed="a machine with one", hint="without --device the CPU is measured")
    by = f"measured on {answer['date']}, {answer['software']}"
    return Hardware.model_validate(
        {
            "name": "this-machine",
            "title": answer["name"],
            "kind": answer["kind"],
            "peak_flops_per_s": answer["peak_flops_per_s"],
            "matmul_frac": 1.0,
            "memory_bytes": answer["memory_bytes"],
            "memory_bytes_per_s": answer["memory_bytes_per_s"],
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
    """Return what this PyTorch can do (``probes/torch_facts.py``); SmaltiError if it cannot be imported."""
    return run_probe("torch_facts", [], {}, timeout_s)


def run_probe(
    probe: str, arguments: list[str], extra: dict[str, str], timeout_s: float, report: Report = lambda line: None
) -> dict[str, Any]:
    """Run a probe and return the JSON object that it prints last; ``report`` receives its stderr line by line.

    SmaltiError if it fails, or has not ended after ``timeout_s``; then it is killed.
    """
    command = [sys.executable, "-m", f"smalti.fleet.probes.{probe}", *arguments]
    environment = child_environment(extra)
    with (
        tempfile.TemporaryFile("w+") as printed,
        subprocess.Popen(command, env=environment, stdout=printed, stderr=subprocess.PIPE, text=True) as child,
    ):
        assert child.stderr is not None
        timer = threading.Timer(timeout_s, child.kill)
        timer.start()
        errors = []
        try:
            for line in child.stderr:
                errors.append(line.rstrip())
                report(errors[-1])
            code = child.wait()
        except BaseException:  # Ctrl-C, or a closed terminal: nothing is left
            child.kill()
            raise
        finally:
            late = timer.finished.is_set()
            timer.cancel()
        printed.seek(0)
        lines = printed.read().strip().splitlines()
    if late:
        after = f"; it was at: {errors[-1]}" if errors else ""
        raise SmaltiError(f"the probe {probe} did not end within {timeout_s:.0f} s{after}", hint=" ".join(command[1:]))
    if code != 0:
        tail = "\n".join(errors[-5:])
        raise SmaltiError(f"the probe {probe} ended with exit code {code}:\n{tail}", hint=" ".join(command[1:]))
    return dict(json.loads(lines[-1]))
