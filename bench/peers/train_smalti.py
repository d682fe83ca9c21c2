"""Smalti's own loop (``smalti.train.fit``), one step at a time; started by bench/train_cpu.py."""

from typing import Any

import torch
from torch.nn.functional import pad
from train_turns import Turns

from smalti.config.load import from_dict
from smalti.config.run import JobConfig
from smalti.config.train import LossConfig
from smalti.model.huggingface import load_folder
from smalti.train import Hook, build, fit
from smalti.train.batches import IGNORE, Microbatch
from smalti.train.loss import LanguageLoss


class Rows:
    """The benchmark's batches as one microbatch a step."""

    def __init__(self, turns: Turns) -> None:
        self._turns = turns

    def batch(self, step: int) -> list[Microbatch]:
        """Inputs, and as targets the tokens that follow them."""
        rows = self._turns.batch(step)
        positions = torch.arange(rows.shape[1]).expand_as(rows)
        return [Microbatch(rows, pad(rows[:, 1:], (0, 1), value=IGNORE), positions, None)]

    def state(self, step: int) -> dict[str, Any]:
        """Nothing to resume."""
        return {}

    def check(self, state: dict[str, Any], step: int) -> None:
        """Nothing to compare."""


class TakeTurns(Hook):
    """Waits for the parent before each step."""

    def __init__(self, turns: Turns) -> None:
        self._turns = turns

    def on_start(self, job: Any) -> None:
        """The first step."""
        self._turns.boundary()

    def on_step(self, job: Any, result: Any) -> None:
        """Every other step."""
        self._turns.loss = float(result.loss)
        self._turns.boundary()


def main() -> None:
    """Build the job as a user's Python program does, and fit."""
    turns = Turns()
    job = turns.job
    model = load_folder(job["model"], torch.float32)
    turns.logits(lambda ids: model(ids).value)
    config = from_dict(
        JobConfig,
        {
            "name": "train-cpu",
            "folder": job["folder"],
            "train": {
                "duration": "1000000step",
                "global_batch_tokens": turns.rows[0].numel(),
                "optimizer": {key: job[key] for key in ("lr", "betas", "eps", "weight_decay", "clip_norm")},
                "schedule": {"warmup": "0step", "decay": "0step"},
                "precision": {"compute": job["precision"]},
                "parallel": {"threads": job["threads"], "compile": job["compile"], "device": "cpu"},
            },
            "track": {"console": False},
        },
    ).config
    loss = LanguageLoss(model.config, LossConfig())
    fit(build(config, model=model.train(), loss=loss, batches=Rows(turns), hooks=[TakeTurns(turns)]))


if __name__ == "__main__":
    main()
