"""The learning rate as a pure function of the step: warmup, stable, decay (arXiv 2404.06395)."""

import math
from typing import Self

from smalti.config.durations import RunLength
from smalti.config.run import JobConfig
from smalti.config.train import ScheduleConfig


class WarmupStableDecay:
    """``schedule(step)`` is the rate of update ``step`` (from 0) of ``total_steps``."""

    def __init__(self, config: ScheduleConfig, *, lr: float, length: RunLength) -> None:
        self._config, self._lr, self._total = config, lr, length.total_steps
        self._former: list[tuple[int, Self]] = []
        self._warmup = min(length.step_at(config.warmup), self._total)
        self._decay = min(int(length.exact_last_steps(config.decay) + 0.5), self._total)

    @classmethod
    def of(cls, config: JobConfig) -> Self:
        """The schedule of a run: until each fork what held then, later what the config says."""
        history, train = config.history, config.train
        schedule = cls(train.schedule, lr=train.optimizer.lr, length=config.length)
        for index, past in enumerate(history):
            former = cls(past.schedule, lr=past.lr, length=RunLength.of(past, history[:index]))
            schedule._former.append((past.at_step, former))
        return schedule

    def __call__(self, step: int) -> float:
        """Learning rate of update ``step``."""
        for at_step, former in self._former:
            if step < at_step:
                return former(step)
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
