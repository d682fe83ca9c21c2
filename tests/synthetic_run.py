"""Writes a synthetic run folder: two sources in two stages, a resume, a suite of evals."""

import json
import math
from pathlib import Path
from typing import Any

CONFIG = """\
name: demo
seed: 17
model:
  family: dbrx
  vocab_size: 4096
  hidden_size: 128
data:
  sources: {code: data/tokens/code/train, prose: data/tokens/prose/train}
train:
  duration: 600step
  global_batch_tokens: 8192
# </pre><script>alert(1)</script>
"""


def write_lines(path: Path, rows: list[dict[str, Any]]) -> None:
    """JSON lines."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def metric_rows(steps: int = 600, batch_tokens: int = 8192) -> list[dict[str, Any]]:
    """Rows of metrics.jsonl, deterministic noise included."""
    rows, code = [], 0.0
    for step in range(1, steps + 1):
        share = 0.4 if step <= 0.8 * steps else 0.75
        code += batch_tokens * share
        noise = math.sin(step * 12.9898) * math.cos(step * 4.1414)
        loss = 2.1 + 6.3 * math.exp(-step / 45) + 0.9 * math.exp(-step / 260) + 0.12 * noise
        lr = 3e-3 * min(1.0, step / 20, max(0.0, (steps - step) / (0.2 * steps)))
        tokens = step * batch_tokens
        row = {
            "step": step,
            "time": f"2026-03-01T12:{step // 60 % 60:02d}:{step % 60:02d}.000Z",
            "loss/train/total": loss,
            "lr-AdamW/group0": lr,
            "l2_norm/grad/global": 0.4 + 3 * math.exp(-step / 30) + 0.1 * abs(noise),
            "throughput/tokens_per_sec": 16_000 + 600 * noise - (5000 if step % 150 == 0 else 0),
            "throughput/device/mfu": 0.152 + 0.006 * noise,
            "moe/load_imbalance": 1.15 + 0.6 * math.exp(-step / 80) + 0.05 * noise,
            "time/token": tokens,
            "time/train": step * 0.51 / 3600,
            "data/mix/code/tokens": code,
            "data/mix/prose/tokens": tokens - code,
        }
        rows.append(row)
        if step % 60 == 0:
            held_out: dict[str, Any] = {"step": step, "time": row["time"]}
            for source, offset in (("code", 0.0), ("prose", 0.55)):
                held_out[f"metrics/eval/{source}/LanguageCrossEntropy"] = loss - 0.12 * noise + 0.1 + offset
                held_out[f"metrics/eval/{source}/bits_per_byte"] = (loss - 0.12 * noise + 0.1 + offset) / 1.45
            rows.append(held_out)
    return rows


def write_run(folder: Path, *, steps: int = 600) -> Path:
    """Write a whole run folder."""
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(CONFIG)
    (folder / "provenance.json").write_text(json.dumps({"smalti": "0.1.0", "torch": "2.13.0", "commit": "abc1234"}))
    (folder / "status.json").write_text(json.dumps({"state": "done", "attempt": 1, "step": steps}))
    write_lines(folder / "metrics.jsonl", metric_rows(steps))
    events = [
        {"time": "2026-03-01T12:00:00.000Z", "attempt": 0, "event": "attempt_started", "ranks": 2},
        {
            "time": "2026-03-01T12:00:02.100Z",
            "attempt": 0,
            "event": "auto_resolved",
            "peak_flops_per_s": 8.3e11,
            "params_total": 6_100_000,
            "params_active": 2_400_000,
        },
        {"time": "2026-03-01T12:01:16.000Z", "attempt": 0, "event": "checkpoint_saved", "step": 150, "seconds": 0.31},
        {"time": "2026-03-01T12:02:10.000Z", "attempt": 0, "event": "rank_died", "rank": 1, "signal": "SIGKILL"},
        {"time": "2026-03-01T12:02:31.000Z", "attempt": 1, "event": "resumed", "step": 150},
        {"time": "2026-03-01T12:06:20.000Z", "attempt": 1, "event": "run_finished", "step": steps},
    ]
    write_lines(folder / "events.jsonl", events)
    write_evals(folder / "evals" / "demo" / "2026-03-01T12-07-00.000Z")
    samples = [
        {"prompt": "def read_lines(path):\n", "completion": '    """Read <b>lines</b> & more."""\n    with open(path)'},
        {"prompt": "The module", "completion": " provides a simple interface to the file."},
    ]
    write_lines(folder / "samples.jsonl", samples)
    return folder


def write_evals(folder: Path) -> None:
    """One suite: two held-out sources, two generated tasks."""
    folder.mkdir(parents=True)

    def held_out(value: float, gzip: float, xz: float) -> dict[str, Any]:
        return {
            "metric": "bits_per_byte",
            "value": value,
            "interval": [value - 0.04, value + 0.05],
            "n": 120,
            "gzip_bits_per_byte": gzip,
            "xz_bits_per_byte": xz,
        }

    def ranked(value: float, chance: float, verdict: str) -> dict[str, Any]:
        return {
            "metric": "accuracy",
            "value": value,
            "interval": [value - 0.05, value + 0.06],
            "n": 200,
            "chance": chance,
            "verdict": verdict,
        }

    tasks = {
        "heldout/code": held_out(1.58, 1.81, 1.52),
        "heldout/prose": held_out(2.11, 2.74, 2.45),
        "arithmetic": ranked(0.13, 0.1, "not distinguishable from chance"),
        "brackets": ranked(0.64, 1 / 6, "above chance"),
    }
    (folder / "results.json").write_text(json.dumps({"suite": "demo", "model": "runs/demo/export", "tasks": tasks}))
    samples = [
        {"task": "heldout/code", "index": 0, "beginning": "import os"},
        {
            "task": "arithmetic",
            "prompt": "2+3=5\n4+4=8\n1+6=",
            "candidates": ["7", "9"],
            "gold": 0,
            "choice": 0,
            "correct": True,
        },
        {"task": "brackets", "prompt": "([<", "candidates": [">])", ")]>"], "gold": 0, "choice": 1, "correct": False},
    ]
    write_lines(folder / "samples.jsonl", samples)
