"""How much generated answers during training delay its steps, with the rank and the child process on separate cores.

A run of the demo's size trains on one core while its child process (``evals`` with a task of the kind ``generation``)
answers questions on another. The child is stopped and continued by turns of a few steps (SIGSTOP, SIGCONT); a ratio
compares two neighbouring turns, each without its first step. The bound is 5 %: cores share memory and caches. The
processor time of the rank leaves out what other programs delay. Linux only.

    make bench NAME=eval_in_loop                           21 pairs of turns, about 2 minutes
    make bench NAME=eval_in_loop ARGS='--pairs 5 --cores 0 1'
"""

import argparse
import json
import os
import signal
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from paired import Ratio, ratio_of
from record import ROOT, RecordOption, record

from smalti.config.load import from_dict
from smalti.config.run import RunConfig
from smalti.data.tokenizer.encode import Tokenizer
from smalti.data.tokenizer.patterns import EOD
from smalti.data.tokenizer.train import train_bpe
from smalti.data.tokens.writer import TokenWriter
from smalti.evals.in_loop_generation import Generation
from smalti.evals.in_loop_suite import suite_hook
from smalti.train import Hook, build, fit
from smalti.train.loop import Job
from smalti.train.step import StepResult

BOUND_FRAC = 0.05
VOCAB, SEQ_LEN, BATCH_TOKENS = 4096, 256, 2048
QUESTIONS, ANSWER_TOKENS = 20_000, 96
"""More than the child answers meanwhile."""
FIRST_STEPS = 5


class Enough(Exception):
    """All turns are measured."""


class Turns(Hook):
    """Stops and continues the child by turns, and times the steps."""

    def __init__(self, core: int, pairs: int, steps: int) -> None:
        self.times_s: dict[str, list[tuple[float, float]]] = {"running": [], "stopped": []}
        """Seconds and processor seconds of a step, of each turn."""
        self._core, self._pairs, self._steps = core, pairs, steps
        self._pinned = False
        self._side = ""
        self._done = 0
        self._begin_s = (0.0, 0.0)

    def on_step(self, job: Job, result: StepResult) -> None:
        """End a turn after its last step."""
        self._done += 1
        child = next(hook for hook in job.hooks if isinstance(hook, Generation)).child
        if child is not None and not self._pinned:
            os.sched_setaffinity(child.pid, {self._core})
            self._pinned = True
        if self._side == "" and child is not None and self._answers(job):
            self._turn("running", child.pid)
        elif self._side and self._done == 1:
            self._begin_s = _clocks_s()
        elif self._side and self._done > self._steps:
            assert child is not None, "the child ended too early; more QUESTIONS are needed"
            begin_s, end_s = self._begin_s, _clocks_s()
            self.times_s[self._side].append(
                ((end_s[0] - begin_s[0]) / self._steps, (end_s[1] - begin_s[1]) / self._steps)
            )
            if len(self.times_s["stopped"]) == self._pairs:
                raise Enough
            self._turn("stopped" if self._side == "running" else "running", child.pid)

    def _answers(self, job: Job) -> bool:
        """Return whether the child has made its export and begun with the task."""
        return any("questions" in path.read_text() for path in job.folder.log_folder().glob("eval-*.log"))

    def _turn(self, side: str, process: int) -> None:
        os.kill(process, signal.SIGCONT if side == "running" else signal.SIGSTOP)
        self._side, self._done = side, 0


def _clocks_s() -> tuple[float, float]:
    return time.perf_counter(), time.process_time()


class FirstCheckpoint(Hook):
    """Ends training at the first checkpoint, which the next attempt evaluates."""

    def on_checkpoint(self, job: Job, path: str) -> None:
        """End."""
        raise Enough


def config_of(folder: Path, priority: str) -> dict[str, Any]:
    """Write data, tokenizer and questions into ``folder``; return the config of a run there."""
    texts = [path.read_text() for path in sorted((ROOT / "docs").rglob("*.md"))]
    tokenizer = Tokenizer(train_bpe(texts, VOCAB), EOD)
    tokenizer.save(folder / "tokenizer")
    with TokenWriter(
        folder / "tokens", vocab_size=tokenizer.vocab_size, eod_id=tokenizer.eod_id, tokenizer_digest=tokenizer.digest
    ) as writer:
        for text in texts:
            writer.add(np.array(tokenizer.encode(text), dtype=np.int64), len(text.encode()))
    lines = [line for text in texts for line in text.splitlines() if len(line) > 60]
    rows = [{"context": f"{n}: {lines[n % len(lines)]}", "answer": "yes"} for n in range(QUESTIONS)]
    (folder / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = {"kind": "generation", "file": str(folder / "questions.jsonl"), "max_new_tokens": ANSWER_TOKENS}
    return {
        "name": "eval-in-loop",
        "folder": str(folder / "run"),
        "model": {
            "family": "llama", "vocab_size": VOCAB, "hidden_size": 128, "intermediate_size": 384,
            "num_hidden_layers": 3, "num_attention_heads": 4, "max_position_embeddings": SEQ_LEN,
        },
        "data": {
            "sources": {"docs": str(folder / "tokens")}, "tokenizer": str(folder / "tokenizer"), "seq_len": SEQ_LEN,
            "stages": [{"weights": {"docs": 1}}],
        },
        "train": {
            "duration": "1000000step", "global_batch_tokens": BATCH_TOKENS, "optimizer": {"lr": 1e-3},
            "checkpoint": {"every": f"{FIRST_STEPS}step"}, "log_every": "100step", "eval_every": "1run",
            "parallel": {"ranks": 1, "threads": 1, "device": "cpu"},
        },
        "evals": {
            "suite": "bench", "tasks": [task | {"stop": ["<never>"]}], "every": f"{FIRST_STEPS}step",
            "priority": priority,
        },
        "track": {"console": False, "system_every_s": 0},
    }  # fmt: skip


def train(values: dict[str, Any], hook: Hook) -> None:
    """Train until the hook has enough."""
    try:
        fit(build(from_dict(RunConfig, values, "bench").config, tasks=suite_hook, hooks=[hook]))
    except Enough:
        return
    raise RuntimeError("the run ended before all turns were measured")


def measure(folder: Path, cores: list[int], pairs: int, steps: int, priority: str) -> dict[str, Ratio]:
    """Return the time of a step beside the child, by that beside a stopped child, and the same of processor time."""
    os.sched_setaffinity(0, {cores[0]})
    torch.set_num_threads(1)
    values = config_of(folder, priority)
    train(values, FirstCheckpoint())
    values["train"]["checkpoint"] = {"every": "1000000step"}
    turns = Turns(cores[1], pairs, steps)
    train(values, turns)
    names = ("child running", "child stopped")
    sides = [list(zip(*turns.times_s[side], strict=True)) for side in ("running", "stopped")]
    return {
        clock: ratio_of(list(sides[0][n]), list(sides[1][n]), names=names)
        for n, clock in enumerate(("time", "processor time"))
    }


def main() -> None:
    """Print the ratio; ``--record`` also writes bench/results/eval_in_loop.json."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    free = sorted(os.sched_getaffinity(0))
    parser.add_argument("--cores", type=int, nargs=2, default=[free[0], free[-1]], help="of the rank, of the child")
    parser.add_argument("--pairs", type=int, default=21)
    parser.add_argument("--steps", type=int, default=15, help="of a turn")
    parser.add_argument("--priority", choices=("idle", "normal"), default="idle", help="of the child")
    parser.add_argument("--record", action=RecordOption, help="write bench/results/eval_in_loop.json")
    options = parser.parse_args()
    if len(set(options.cores)) < 2:
        parser.error(f"two cores are needed, and there are {free}")
    with tempfile.TemporaryDirectory() as folder:
        ratios = measure(Path(folder), options.cores, options.pairs, options.steps, options.priority)
    for clock, ratio in ratios.items():
        print(f"{clock:15} {ratio}")
    delay_frac = ratios["time"].ratio - 1
    verdict = "within" if delay_frac <= BOUND_FRAC else "above"
    print(f"a step is delayed by {delay_frac:.1%}, {verdict} the bound of {BOUND_FRAC:.0%}")
    if options.record:
        settings = {"cores": options.cores, "priority": options.priority, "steps_of_a_turn": options.steps}
        figures = {clock: ratio.figures() for clock, ratio in ratios.items()}
        bounds = {"delay_frac": delay_frac, "bound_frac": BOUND_FRAC}
        print("wrote", record("eval_in_loop", settings | bounds | figures))


if __name__ == "__main__":
    main()
