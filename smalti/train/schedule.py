"""The learning rate as a pure function of the step: warmup, stable, decay (arXiv 2404.06395)."""

import math
from typing import Self

from smalti.config.durations import to_steps
from smalti.config.train import ScheduleConfig, TrainConfig


class WarmupStableDecay:
    """``schedule(step)`` is the rate of update ``step`` (from 0) of ``total_steps``."""

    def __init__(self, config: ScheduleConfig, *, lr: float, total_steps: int, global_batch_tokens: int) -> None:
        self._config, self._lr, self._total = config, lr, total_steps
        self._warmup = to_steps(config.warmup, total_steps=total_steps, global_batch_tokens=global_batch_tokens)
        self._decay = to_steps(config.decay, total_steps=total_steps, global_batch_tokens=global_batch_tokens)

    @classmethod
    def of(cls, train: TrainConfig, *, total_steps: int) -> Self:
        """The schedule of a ``train:`` section."""
        return cls(
            train.schedule,
            lr=train.optimizer.lr,
            total_steps=total_steps,
            global_batch_tokens=train.global_batch_tokens,
        )

    def __call__(self, step: int) -> float:
        """Learning rate of update ``step``."""
        if step < self._warmup:
            return self._lr * (step + 1) / self._warmup
        remaining = self._total - step
        if remaining > self._decay:
            return self._lr
        passed = 1 - remaining / (self._decay + 1)
        fall = {
            "linear": passed,
            "sqrt": math.sqrt(passed),
            "cosine": 0.5 * (1 - math.cos(math.pi * passed)),
        }[self._config.shape]
        return self._lr * (1 - (1 - self._config.final_frac) * fall)
