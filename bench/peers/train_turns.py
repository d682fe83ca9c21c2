"""The child's half of bench/train_cpu.py and tune_trl.py: a trainer that runs one step at each request of its parent.

A trainer runs its own complete loop; it only calls ``boundary`` between two steps, which sends the parent the results
of the last step and waits for the next request. The measured time is from the request to the next boundary, so it
includes everything that a trainer does for a step: reading the batch, update, logging.

One line of JSON each way: the answer to ``ready`` once, then ``{"seconds": s, "processor_s": s, "loss": x}`` for every
line of input. The child ends when its input ends. Its own standard output goes to standard error.
"""

import json
import os
import sys
import time
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch


def decays(name: str, parameter: torch.Tensor) -> bool:
    """The rule that all contenders follow: matrices decay, norms and the embedding do not."""
    return parameter.ndim >= 2 and not any(part in name for part in ("embed", "wte"))


def _clocks() -> tuple[float, float]:
    """Return the time, and the processor time of this process, in seconds."""
    return time.perf_counter(), time.process_time()


class Turns:
    """The pipe to the parent, and the job that it wrote."""

    def __init__(self) -> None:
        self.job: dict[str, Any] = json.loads(Path(sys.argv[1]).read_text())
        self.loss = float("nan")
        """Loss of the last step; the trainer sets it before the boundary."""
        self.counts: dict[str, int] = {}
        """More values of the last step, for the parent."""
        torch.set_num_threads(self.job["threads"])
        self._answers = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)
        self._began_s: tuple[float, float] | None = None

    @cached_property
    def rows(self) -> torch.Tensor:
        """Batches [steps, sequences, tokens], int64, to be taken in this order, round and round."""
        return torch.from_numpy(np.load(self.job["tokens"]))

    def batch(self, step: int) -> torch.Tensor:
        """Rows of a step, [sequences, tokens]; the targets are the next tokens, the last of a row has none."""
        return self.rows[step % len(self.rows)]

    def groups(self, named: Any) -> list[dict[str, Any]]:
        """Parameter groups with the decay that all contenders use."""
        pairs = list(named)
        return [
            {"params": [p for n, p in pairs if decays(n, p)], "weight_decay": self.job["weight_decay"]},
            {"params": [p for n, p in pairs if not decays(n, p)], "weight_decay": 0.0},
        ]

    def adamw(self, named: Any) -> torch.optim.Optimizer:
        """The optimizer that all contenders use: torch's fused AdamW, the fastest on a CPU too."""
        job = self.job
        return torch.optim.AdamW(self.groups(named), lr=job["lr"], betas=job["betas"], eps=job["eps"], fused=True)

    def logits(self, model: Any) -> None:
        """Write the logits of the first row, in fp32 and before any step; ``model`` maps ids [1, T] to logits."""
        with torch.no_grad():
            np.save(self.job["logits"], model(self.batch(0)[:1]).float().numpy())
        self.ready(logits=self.job["logits"])

    def ready(self, **values: Any) -> None:
        """Report that the model is loaded."""
        self._say(values)

    def boundary(self) -> None:
        """Report the step that has ended (if there was one) and wait for the next."""
        if self._began_s is not None:
            spent = (now - begin for now, begin in zip(_clocks(), self._began_s, strict=True))
            self._say({**dict(zip(("seconds", "processor_s"), spent, strict=True)), "loss": self.loss, **self.counts})
        if not sys.stdin.readline():
            os._exit(0)
        self._began_s = _clocks()

    def _say(self, value: dict[str, Any]) -> None:
        self._answers.write(json.dumps(value) + "\n")
        self._answers.flush()
