"""Predicted and counted peak memory of a training step of six recipes, with and without recomputation.

    make bench NAME=plan_memory ARGS='--record'       # about 6 minutes

Counted are the live storages of a real step on the CPU (tools/counted_step.py), each once, in the second step of a run,
when moments and buffers exist; each count has its own process (two, if weights are sharded over two ranks with gloo).
Predicted is ``smalti plan memory`` (``cost/memory/per_rank.py``). The largest allowed difference is 5 % of the peak.
The resident size of a process is larger than its live tensors: the interpreter and torch take about 300 MB, and glibc
keeps small freed blocks.
"""

import argparse
import json
import os
import socket
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from record import RecordOption, record

from smalti.config.load import from_dict
from smalti.config.run import RunConfig
from smalti.cost.memory.per_rank import memory_per_rank

ALLOWED_FRAC = 0.05
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2}


def _recipe(vocab: int, width: int, inner: int, layers: int, heads: int, seq_len: int, rows: int, **rest: Any) -> Any:
    precision = rest.pop("compute")
    micro = rest.pop("micro", rows)
    packed = rest.pop("packed", False)
    chunk_bytes = rest.pop("chunk_bytes", 2**28)
    return {
        "name": "plan-memory",
        "model": {
            "family": "decoder", "vocab_size": vocab, "hidden_size": width, "intermediate_size": inner,
            "num_hidden_layers": layers, "num_attention_heads": heads, "max_position_embeddings": seq_len, **rest,
        },
        "data": {
            "sources": {"made": "nowhere"}, "seq_len": seq_len, "stages": [{"weights": {"made": 1}}],
            "mask_documents": packed,
        },
        "train": {
            "duration": "10step", "global_batch_tokens": seq_len * rows, "microbatch_tokens": seq_len * micro,
            "optimizer": {"lr": 1e-3}, "precision": {"compute": precision}, "parallel": {"device": "cpu"},
            "loss": {"chunk_bytes": chunk_bytes},
        },
        "track": {"console": False},
    }  # fmt: skip


RECIPES: dict[str, Any] = {
    "dense small": _recipe(4096, 128, 384, 3, 4, 256, 8, compute="fp32", packed=True),
    "dense medium": _recipe(16384, 384, 1024, 6, 6, 512, 8, micro=4, compute="bf16"),
    "dense large": _recipe(32000, 768, 2048, 12, 12, 1024, 2, compute="bf16", num_key_value_heads=4, chunk_bytes=2**25),
    "moe small": _recipe(4096, 128, 192, 3, 4, 256, 8, compute="bf16", norm="layernorm", moe=EXPERTS),
    "moe medium": _recipe(16384, 384, 512, 6, 6, 512, 4, compute="fp32", chunk_bytes=2**25, moe=EXPERTS),
    "moe large": _recipe(
        32000, 512, 768, 8, 8, 2048, 2, micro=1, compute="bf16", moe={**EXPERTS, "num_shared_experts": 1}
    ),
}
"""Recipes whose peak is mostly the loss (large tiles), and others whose peak is mostly the blocks."""
RECOMPUTE = {"none": "keeps all", "full": "runs again"}
ON_TWO_RANKS = ("dense small", "dense medium", "moe small")


def main() -> int:
    """Print a table; ``--record`` also writes bench/results/plan_memory.json. Fails if a difference is too large."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--recipe", choices=RECIPES, action="append", help="default: all")
    parser.add_argument(
        "--ranks", type=int, choices=(1, 2), action="append", help="default: 1, and 2 for three recipes"
    )
    parser.add_argument("--record", action=RecordOption, help="write bench/results/plan_memory.json")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(child(options.child)))
        return 0
    figures: dict[str, Any] = {}
    print(f"{'recipe':14} {'ranks':5} {'blocks':10} {'predicted':>12} {'counted':>12} {'ratio':>7}  phase (predicted)")
    for name in options.recipe or RECIPES:
        for ranks in options.ranks or ((1, 2) if name in ON_TWO_RANKS else (1,)):
            for recompute in RECOMPUTE:
                row = compare(name, ranks, recompute)
                figures[f"{name}, {ranks} ranks, {RECOMPUTE[recompute]}"] = row
                report(name, ranks, recompute, row)
    worst = max(abs(row["ratio"] - 1) for row in figures.values())
    print(f"largest difference {worst:.1%}; allowed {ALLOWED_FRAC:.0%}")
    if options.record:
        print("wrote", record("plan_memory", {**figures, "largest_difference_frac": worst}))
    return int(worst > ALLOWED_FRAC)


def config_of(name: str, ranks: int, recompute: str) -> RunConfig:
    """Return the config of a recipe of the table."""
    changes = (f"train.parallel.ranks={ranks}", f"train.parallel.activation_checkpointing={recompute}")
    return from_dict(RunConfig, RECIPES[name], overrides=changes).config


def compare(name: str, ranks: int, recompute: str) -> dict[str, Any]:
    """Return predicted and counted bytes of one case, in total and by part."""
    config = config_of(name, ranks, recompute)
    predicted, counted = memory_per_rank(config), start(name, ranks, recompute)
    parts = asdict(predicted.peak.parts)
    alike = {part: round(parts.pop(part)) for part in ("weights", "moments", "gathered", "batch")}
    return {
        "predicted_bytes": predicted.tensors_bytes,
        "counted_bytes": counted["peak_bytes"],
        "ratio": predicted.tensors_bytes / counted["peak_bytes"],
        "predicted_phase": predicted.peak.phase,
        "counted_phase": counted["phase"],
        "predicted_parts": {**alike, "rest": round(sum(parts.values()))},
        "counted_parts": counted["parts"],
        "predicted_phases": predicted.phases,
        "counted_phases": counted["phases"],
        "first_step_bytes": counted["first_step_bytes"],
        "process_bytes": counted["process_bytes"],
    }


def report(name: str, ranks: int, recompute: str, row: dict[str, Any]) -> None:
    """Print a line of totals, and one of the parts."""
    predicted, counted = row["predicted_bytes"] / 1e6, row["counted_bytes"] / 1e6
    print(
        f"{name:14} {ranks:5} {RECOMPUTE[recompute]:10} {predicted:9.1f} MB {counted:9.1f} MB {row['ratio']:7.3f}  "
        f"{row['counted_phase']} ({row['predicted_phase']})"
    )
    parts = [
        f"{part} {row['predicted_parts'][part] / 1e6:.1f}/{size / 1e6:.1f}"
        for part, size in row["counted_parts"].items()
    ]
    print(f"{'':21} {', '.join(parts)}; first step {row['first_step_bytes'] / 1e6:.1f}", flush=True)


def start(name: str, ranks: int, recompute: str) -> dict[str, Any]:
    """Count in separate processes; return the count of the rank with the highest peak."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    job = json.dumps({"name": name, "ranks": ranks, "recompute": recompute})
    running = [_start(job, rank, ranks, port) for rank in range(ranks)]
    counts = []
    for process in running:
        out, error = process.communicate()
        if process.returncode:
            raise RuntimeError(f"{name} on {ranks} ranks ended with {process.returncode}:\n{error[-3000:]}")
        counts.append(json.loads(out.splitlines()[-1]))
    fullest: dict[str, Any] = max(counts, key=lambda count: count["peak_bytes"])
    return fullest


def _start(job: str, rank: int, ranks: int, port: int) -> "subprocess.Popen[str]":
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_PORT": port}
    world = {name: str(value) for name, value in place.items()} | {"MASTER_ADDR": "127.0.0.1"}
    command, pipe = [sys.executable, __file__, "--child", job], subprocess.PIPE
    return subprocess.Popen(command, env=os.environ | (world if ranks > 1 else {}), stdout=pipe, stderr=pipe, text=True)


def child(job: str) -> dict[str, Any]:
    """Run two steps of a recipe; return the figures of the second."""
    from counted_step import counted, counted_steps

    from smalti.distributed.group import world as worlds

    case = json.loads(job)
    first, second = (counted(step.live) for step in counted_steps(config_of(**case)))
    worlds.leave()
    return {**asdict(second), "first_step_bytes": first.peak_bytes, "process_bytes": _peak_of_process()}


def _peak_of_process() -> int | None:
    status = Path("/proc/self/status")
    if not status.exists():
        return None
    (line,) = [line for line in status.read_text().splitlines() if line.startswith("VmHWM:")]
    return int(line.split()[1]) * 1024


if __name__ == "__main__":
    raise SystemExit(main())
