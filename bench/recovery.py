"""Recovery from faults: Smalti's agent beside torchrun's own restart, on the same run with the same injected faults.

    make bench NAME=recovery                      3 trials of each kind and launcher: about 25 minutes
    make bench NAME=recovery ARGS=--short         a kill and a stopped rank, once each
    make bench NAME=recovery ARGS='--trials 20 --record'   about two and a half hours; --kinds and --launchers choose,
                                                  and what one commit records in several calls is one result

Two ranks (gloo) train a small model; a fault of ``chaos`` happens to one of them. Measured from the fault on: seconds
until the attempt has ended, and until a rank of the next one trains. *Named* is the rank that the launcher reports as
the cause. A launcher that has not restarted after the limit has not recovered.
"""

import argparse
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from record import RecordOption, record

from smalti.base.env import child_environment
from smalti.data.tokens.writer import TokenWriter
from smalti.track.events import read_events
from smalti.track.progress import Phase, Progress, read_slots, slot_file

KINDS = {
    "sigkill": "backward",
    "exception": "forward",
    "sigstop": "backward",
    "held_gil": "forward",
    "deadlock": "optimizer",
    "stuck_data": "data",
}
"""Kind of fault -> the phase in which it happens."""
LAUNCHERS = ("smalti", "torchrun")
RANKS, STEP = 2, 40
RECIPE = """\
name: t
model: {vocab_size: 512, hidden_size: 32, intermediate_size: 64, num_hidden_layers: 2, num_attention_heads: 2}
data:
  sources: {a: tokens}
  seq_len: 32
  stages:
  - weights: {a: 1}
train:
  duration: 100000step
  global_batch_tokens: 256
  optimizer: {lr: 1e-3}
  parallel: {ranks: 2, device: cpu, threads: 1}
  checkpoint: {every: 10step}
  eval_every: 1run
track: {console: false, system_every_s: 0}
"""


@dataclass(frozen=True)
class Trial:
    """One fault and what followed; seconds from the fault on, None: not within the limit."""

    kind: str
    launcher: str
    rank: int
    named: int | None
    """The rank that was reported as the cause."""
    ended_s: float | None
    """The ranks of the attempt have ended."""
    again_s: float | None
    """A rank of the next attempt trains."""


def prepare(work: Path) -> None:
    """Write tokens and recipe."""
    rng = np.random.default_rng(0)
    with TokenWriter(work / "tokens", vocab_size=512, eod_id=0, tokenizer_digest="ab" * 32) as writer:
        for _ in range(200):
            ids = rng.integers(1, 500, size=200)
            writer.add(ids, 4 * ids.size)
    (work / "r.yaml").write_text(RECIPE)


def trial(work: Path, kind: str, launcher: str, number: int, limit_s: float) -> Trial:
    """Start the run, wait for the fault and for what follows, and kill everything."""
    rank, step = number % RANKS, STEP + 7 * number % 20
    folder = work / "runs" / f"{launcher}-{kind}-{number}"
    fault = f"chaos.faults=[{{kind: {kind}, rank: {rank}, step: {step}, phase: {KINDS[kind]}}}]"
    start = [sys.executable, "-m", "smalti"]
    if launcher == "torchrun":
        run = "--standalone", "--nproc-per-node", str(RANKS), "--max-restarts", "3"
        start = [sys.executable, "-m", "torch.distributed.run", *run, "-m", "smalti"]
    output = work / f"{folder.name}.txt"
    with open(output, "w") as file:
        process = subprocess.Popen(
            [*start, "train", "r.yaml", f"folder={folder}", fault],
            cwd=work, stdout=file, stderr=file, start_new_session=True,
            env=child_environment({"SMALTI_HOME": str(work / "home")}),
        )  # fmt: skip
    try:
        fault_s, attempt = _wait_for_fault(folder, process)
        ended_s, again_s = _watch(folder, attempt, fault_s, limit_s)
        named = _named_by_smalti(folder, attempt) if launcher == "smalti" else _named_by_torchrun(output)
        return Trial(kind, launcher, rank, named, ended_s, again_s)
    finally:
        _kill_tree(process)


def _wait_for_fault(folder: Path, process: subprocess.Popen[bytes]) -> tuple[float, int]:
    """Return when the fault happened, on CLOCK_MONOTONIC, and its attempt."""
    end_s = time.monotonic() + 240
    while time.monotonic() < end_s and process.poll() is None:
        for event in read_events(folder):
            if event["event"] == "fault_injected":
                return event["mono_ns"] / 1e9, event["attempt"]
        time.sleep(0.02)
    raise RuntimeError(f"{folder}: the fault did not happen within 240 s")


def _watch(folder: Path, attempt: int, fault_s: float, limit_s: float) -> tuple[float | None, float | None]:
    """Return the seconds until the ranks of the attempt have ended, and until a later one trains."""
    before = _slots(folder, attempt)
    ended_s = None
    while (now_s := time.monotonic()) < fault_s + limit_s:
        if ended_s is None and not any(_lives(slot.pid) for slot in before):
            ended_s = now_s - fault_s
        later = _slots(folder, attempt + 1)
        if any(slot.spent_s(Phase.FORWARD) > 0 for slot in later):
            return ended_s, now_s - fault_s
        time.sleep(0.02)
    return ended_s, None


def _slots(folder: Path, attempt: int) -> list[Progress]:
    return read_slots(slot_file(folder / "logs" / f"attempt-{attempt}", 0))


def _lives(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def _named_by_smalti(folder: Path, attempt: int) -> int | None:
    causes = ("rank_died", "rank_hung", "rank_unresponsive")
    named = [e["rank"] for e in read_events(folder) if e["event"] in causes and e["attempt"] == attempt]
    return named[0] if named else None


def _named_by_torchrun(output: Path) -> int | None:
    match = re.search(r"failed \(exitcode: -?\d+\) local_rank: (\d+)", output.read_text())
    return int(match[1]) if match else None


def _kill_tree(process: subprocess.Popen[bytes]) -> None:
    """Kill a launcher and all ranks below it."""
    try:
        below = psutil.Process(process.pid).children(recursive=True)
    except psutil.Error:
        below = []
    process.kill()
    process.wait()
    for each in below:
        try:
            os.kill(each.pid, signal.SIGKILL)
        except ProcessLookupError:
            continue


def summary(trials: list[Trial]) -> dict[str, Any]:
    """Return counts and times of the trials of one kind and launcher."""
    named = [trial for trial in trials if trial.named is not None]
    right = sum(trial.named == trial.rank for trial in named)
    return {
        "trials": len(trials),
        "precision": right / len(named) if named else None,
        "recall": right / len(trials),
        "recovered": sum(trial.again_s is not None for trial in trials),
        **_spread("ended", [trial.ended_s for trial in trials]),
        **_spread("again", [trial.again_s for trial in trials]),
    }


def _spread(name: str, seconds: list[float | None]) -> dict[str, float | None]:
    known = sorted(value for value in seconds if value is not None)
    if len(known) < len(seconds) or not known:  # some never: no median is known
        return {f"{name}_median_s": None, f"{name}_p95_s": None}
    p95 = known[min(len(known) - 1, round(0.95 * (len(known) - 1)))]
    return {f"{name}_median_s": round(statistics.median(known), 2), f"{name}_p95_s": round(p95, 2)}


def main() -> None:
    """Run the trials by turns, print a line for each kind and launcher."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=3)
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS), default=list(KINDS))
    parser.add_argument("--launchers", nargs="+", choices=LAUNCHERS, default=list(LAUNCHERS))
    parser.add_argument("--limit-s", type=float, default=60.0, help="seconds to wait for the next attempt")
    parser.add_argument("--short", action="store_true", help="a kill and a stopped rank, once each")
    parser.add_argument("--record", action=RecordOption, help="write bench/results/recovery.json, after each")
    options = parser.parse_args()
    kinds, count = (["sigkill", "sigstop"], 1) if options.short else (options.kinds, options.trials)
    with tempfile.TemporaryDirectory() as work:
        prepare(Path(work))
        for kind in kinds:
            for launcher in options.launchers:
                done = [trial(Path(work), kind, launcher, number, options.limit_s) for number in range(count)]
                figures = {"limit_s": options.limit_s, **summary(done), "each": [asdict(each) for each in done]}
                print(f"{kind:12} {launcher:9} {json.dumps(summary(done))}", flush=True)
                if options.record:
                    record("recovery", {f"{kind}/{launcher}": figures})


if __name__ == "__main__":
    main()
