"""Cost of watching a run: processor time of the agent, and of the slots that its ranks write, as a share of a step.

    make bench NAME=agent_cost                    two minutes of training on 2 ranks

Two ranks (gloo) train a model of a million parameters. The agent's processor time is that of its process between two
steps of the run, divided by the time between them: a share of one core. The time of a slot is that of one change of
phase, measured in this process, times the changes in a step. The bound is 0.5 % for both together, beyond which the
script exits with 1.
"""

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from record import RecordOption, record

from smalti.base.env import child_environment
from smalti.data.tokens.writer import TokenWriter
from smalti.track.progress import Phase, Progress, ProgressWriter, read_slots, slot_file

BOUND_FRAC = 0.005
WARM_STEPS = 20
RECIPE = """\
name: t
model: {vocab_size: 4096, hidden_size: 128, intermediate_size: 352, num_hidden_layers: 4, num_attention_heads: 4}
data:
  sources: {a: tokens}
  seq_len: 256
  stages:
  - weights: {a: 1}
train:
  duration: 100000step
  global_batch_tokens: 4096
  optimizer: {lr: 1e-3}
  parallel: {ranks: 2, device: cpu, threads: 1}
  checkpoint: {every: 1000step}
  eval_every: 1run
"""


def prepare(work: Path) -> None:
    """Write tokens and recipe."""
    rng = np.random.default_rng(0)
    with TokenWriter(work / "tokens", vocab_size=4096, eod_id=0, tokenizer_digest="ab" * 32) as writer:
        for _ in range(2000):
            ids = rng.integers(1, 4000, size=500)
            writer.add(ids, 4 * ids.size)
    (work / "r.yaml").write_text(RECIPE)


def of_agent(work: Path, seconds: float) -> dict[str, float]:
    """Train for so long; return the agent's processor time, and steps and changes of phase of rank 0."""
    start = [sys.executable, "-m", "smalti", "train", "r.yaml"]
    with open(work / "output.txt", "w") as output:
        agent = subprocess.Popen(start, cwd=work, stdout=output, stderr=output, env=child_environment({}))
    try:
        first = _after(agent, work, WARM_STEPS)
        began_s, before = time.monotonic(), psutil.Process(agent.pid).cpu_times()
        time.sleep(seconds)
        last = _after(agent, work, WARM_STEPS)
        wall_s, after = time.monotonic() - began_s, psutil.Process(agent.pid).cpu_times()
    finally:
        agent.terminate()
        agent.wait()
    return {
        "wall_s": wall_s,
        "agent_s": after.user + after.system - before.user - before.system,
        "steps": last.step - first.step,
        "phases": last.phase_count - first.phase_count,
    }


def _after(agent: subprocess.Popen[bytes], work: Path, step: int) -> Progress:
    """Return the slot of rank 0, once it has trained so many steps."""
    while agent.poll() is None:
        slots = [slot for slot in read_slots(slot_file(work / "runs/t/logs/attempt-0", 0)) if slot.rank == 0]
        if slots and slots[0].step >= step:
            return slots[0]
        time.sleep(0.05)
    raise RuntimeError((work / "output.txt").read_text())


def of_slot(work: Path, count: int = 100_000) -> float:
    """Return the seconds of one change of phase."""
    writer = ProgressWriter(work / "slots.bin", local_rank=0, local_ranks=1, rank=0)
    began_s = time.process_time()
    for step in range(count):
        writer.enter(Phase(step % 8), step=step)
    return (time.process_time() - began_s) / count


def main() -> None:
    """Measure, print and check."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--record", action=RecordOption, help="write bench/results/agent_cost.json")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        prepare(work)
        figures: dict[str, Any] = of_agent(work, options.seconds)
        figures["slot_us"] = of_slot(work) * 1e6
    step_s, per_step = figures["wall_s"] / figures["steps"], figures["phases"] / figures["steps"]
    figures["agent_frac"] = figures["agent_s"] / figures["wall_s"]
    figures["slots_frac"] = per_step * figures["slot_us"] / 1e6 / step_s
    total = figures["agent_frac"] + figures["slots_frac"]
    print(f"{figures['steps']} steps of {1000 * step_s:.1f} ms; agent: {figures['agent_frac']:.2%} of a core")
    print(f"{per_step:.1f} slots of {figures['slot_us']:.2f} us in a step: {figures['slots_frac']:.3%} of it")
    print(f"both: {total:.2%}, {BOUND_FRAC:.1%} were asked")
    if options.record:
        print("wrote", record("agent_cost", {**figures, "total_frac": total}))
    sys.exit(total > BOUND_FRAC)


if __name__ == "__main__":
    main()
