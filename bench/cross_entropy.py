"""Memory and time of the output head's loss: Smalti's, plain torch's, and ``F.linear_cross_entropy``.

    make bench NAME=cross_entropy                         T=8192, D=1024, V=128k in fp32 and bf16; about 12 minutes
    make bench NAME=cross_entropy ARGS='--tokens 1024'

Every measurement is a child process that runs forward and backward twice. The peak of memory is that of the process
(Linux) in the first pass, without inputs, weight and their gradients; the time is that of the second. Children return
freed blocks of 1 MiB and more at once: by default glibc does so only above a threshold that grows to 32 MiB, and its
fragmented heap would hide the live memory. Contenders take turns. Gradients are compared with plain torch's in the same
format, and with its fp32 gradients of the same inputs. ``--bound`` fails if Smalti takes more than this share of plain
torch's memory; ``--memory-only`` runs one pass, without gradients.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from paired import ratio_of
from record import RecordOption, record

CONTENDERS = ("plain", "torch", "smalti")
NAMES = {"plain": "F.cross_entropy", "torch": "F.linear_cross_entropy", "smalti": "smalti"}


def main() -> int:
    """Print memory, time and differences; ``--record`` also writes bench/results/cross_entropy.json."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--vocabulary", type=int, default=131_072)
    parser.add_argument("--dtype", choices=("fp32", "bf16"), help="absent: both")
    parser.add_argument("--chunk-bytes", type=int, default=2**28)
    parser.add_argument("--rounds", type=int, default=2, help="children of each contender")
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=CONTENDERS)
    parser.add_argument("--bound", type=float, help="largest share of plain torch's memory that ours may take")
    parser.add_argument("--memory-only", action="store_true", help="neither gradients nor a second, timed pass")
    parser.add_argument("--record", action=RecordOption, help="write bench/results/cross_entropy.json")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(child(options)))
        return 0
    figures = {dtype: compare(options, dtype) for dtype in ([options.dtype] if options.dtype else ("fp32", "bf16"))}
    if options.record:
        shape = {name: getattr(options, name) for name in ("tokens", "width", "vocabulary", "chunk_bytes")}
        print("wrote", record("cross_entropy", {"shape": shape, **figures}))
    shares = [row["memory_share"] for row in figures.values() if "memory_share" in row]
    return int(options.bound is not None and (not shares or max(shares) > options.bound))


def compare(options: argparse.Namespace, dtype: str) -> dict[str, Any]:
    """Measure all contenders in one format by turns; print and return their memory and time."""
    with tempfile.TemporaryDirectory(prefix="cross-entropy-") as folder:
        runs_of: dict[str, list[dict[str, Any]]] = {name: [] for name in options.contenders}
        for turn in range(options.rounds):
            order = options.contenders if turn % 2 == 0 else list(reversed(options.contenders))
            for name in order:
                keep = Path(folder) / name if turn == 0 and not options.memory_only else None
                runs_of[name].append(start(options, name, dtype, keep))
        if dtype == "bf16" and "plain" in runs_of and not options.memory_only:
            start(options, "plain", "fp32", Path(folder) / "exact", as_if=dtype)
        differences = {} if options.memory_only else apart(Path(folder), options.contenders)
    print(f"\n{dtype}: {options.tokens:,} tokens, width {options.width:,}, vocabulary {options.vocabulary:,}")
    result: dict[str, Any] = {}
    for name, runs in runs_of.items():
        peak = max(run["peak_bytes"] for run in runs)
        seconds = [run["wall_s"] for run in runs if "wall_s" in run]
        result[name] = {"peak_bytes": peak, "wall_s": seconds, "gradients_apart": differences.get(name)}
        rest = "" if options.memory_only else f"  {statistics.median(seconds):7.2f} s  {differences[name]}"
        print(f"  {NAMES[name]:22} {peak / 1e6:9.1f} MB above{rest}")
    if "plain" in runs_of and "smalti" in runs_of:
        result["memory_share"] = result["smalti"]["peak_bytes"] / result["plain"]["peak_bytes"]
        print(f"  smalti / plain: {result['memory_share']:.3f} of the memory")
        if options.rounds > 1 and not options.memory_only:
            ratio = ratio_of(result["plain"]["wall_s"], result["smalti"]["wall_s"], names=("plain", "smalti"))
            result["time"] = ratio.figures()
            print(f"  {ratio}")
    return result


def start(
    options: argparse.Namespace, name: str, dtype: str, keep: Path | None, as_if: str | None = None
) -> dict[str, Any]:
    """Run one child, which saves its gradients to ``keep``. ``as_if``: inputs are rounded to this format first."""
    job = {"name": name, "dtype": dtype, "keep": str(keep) if keep else None, "rounded_to": as_if or dtype}
    shape = [f"--{key}={getattr(options, key)}" for key in ("tokens", "width", "vocabulary")]
    done = subprocess.run(
        [sys.executable, __file__, *shape, f"--chunk-bytes={options.chunk_bytes}", "--child", json.dumps(job),
         *(["--memory-only"] if options.memory_only else [])],
        env=os.environ | {"MALLOC_MMAP_THRESHOLD_": str(2**20)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"{name} in {dtype} ended with {done.returncode}:\n{done.stderr[-3000:]}")
    figures: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return figures


def child(options: argparse.Namespace) -> dict[str, Any]:
    """Run forward and backward twice; return the peak bytes of the first and the seconds of the second."""
    import torch

    job = json.loads(options.child)
    dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16}
    dtype, rounded = dtypes[job["dtype"]], dtypes[job["rounded_to"]]
    torch.manual_seed(0)

    def draw(rows: int, scale: float) -> "torch.Tensor":
        return (torch.randn(rows, options.width) * scale).to(rounded).to(dtype).requires_grad_()

    hidden, weight = draw(options.tokens, 1.0), draw(options.vocabulary, 0.05)
    targets = torch.randint(0, options.vocabulary, (options.tokens,))
    targets[::7] = -100
    loss_of = contender(job["name"], options.chunk_bytes)
    few = (hidden[:64].detach().requires_grad_(), weight[:512].detach().requires_grad_(), targets[:64].clamp(max=511))
    loss_of(*few).backward()  # libraries are loaded and threads started
    del few
    before = _memory("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts here
    loss_of(hidden, weight, targets).backward()
    assert hidden.grad is not None
    assert weight.grad is not None
    gradients = hidden.grad.nbytes + weight.grad.nbytes
    peak = _memory("VmHWM") - before - gradients
    if job["keep"]:
        torch.save([hidden.grad, weight.grad], job["keep"])
    if options.memory_only:
        return {"peak_bytes": peak}
    hidden.grad = weight.grad = None
    began = time.perf_counter()
    loss_of(hidden, weight, targets).backward()
    return {"peak_bytes": peak, "wall_s": time.perf_counter() - began}


def contender(name: str, chunk_bytes: int) -> Callable[..., Any]:
    """Return the function (hidden, weight, targets) -> summed loss."""
    import torch
    from torch.nn import functional as F

    from smalti.train.cross_entropy import cross_entropy_head

    if name == "plain":
        return lambda hidden, weight, targets: F.cross_entropy(F.linear(hidden, weight), targets, reduction="sum")
    if name == "torch":
        options = torch.nn.LinearCrossEntropyOptions()
        return lambda hidden, weight, targets: F.linear_cross_entropy(
            hidden, weight, targets, reduction="sum", options=options
        )
    return lambda hidden, weight, targets: cross_entropy_head(targets, chunk_bytes=chunk_bytes)(hidden, weight)[0]


def apart(folder: Path, names: Sequence[str]) -> dict[str, dict[str, float]]:
    """Return ||a - b|| / ||b|| of the gradients of hidden states and weight, from plain torch's and the exact ones."""
    import torch

    differences: dict[str, dict[str, float]] = {name: {} for name in names}
    for reference in ("plain", "exact"):
        if not (folder / reference).exists():
            continue
        expected = torch.load(folder / reference, weights_only=True)
        for name in names:
            gradients = torch.load(folder / name, weights_only=True)
            for key, a, b in zip(("hidden", "weight"), gradients, expected, strict=True):
                distance = float((a.float() - b.float()).norm() / b.float().norm())
                differences[name][f"{key} from {reference}"] = float(f"{distance:.3g}")
    return differences


def _memory(field: str) -> int:
    """Return VmRSS (now) or VmHWM (the peak) of this process in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field} on {os.uname().sysname}")


if __name__ == "__main__":
    raise SystemExit(main())
