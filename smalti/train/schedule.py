"""The learning rate as a pure function of the step: warmup, plateau, decay.

Warmup, stable, decay (WSD, arXiv 2404.06395); one cosine (arXiv 1608.03983, without restarts); the inverse square root
(Noam, arXiv 1706.03762) with a cooldown (arXiv 2106.04560). A warmup that starts above 0 re-warms a model that was
trained before (arXiv 2403.08763).
"""

import math
from typing import Self

from smalti.config.durations import RunLength
from smalti.config.run import JobConfig
from smalti.config.train import ScheduleConfig


class LearningRate:
    """``rate(step)`` is the rate of update ``step`` (from 0) of ``total_steps``.

    The last step of the warmup has the peak, and the step after the end of the run would have the final rate.
    """

    def __init__(self, config: ScheduleConfig, *, lr: float, length: RunLength) -> None:
        self._config = config
        self._lr = lr
        self._total = length.total_steps
        self._former: list[tuple[int, Self]] = []
        self._warmup = min(length.step_at(config.warmup), self._total)
        cosine = config.name == "cosine"
        self._shape = "cosine" if cosine else config.shape
        decay = self._total - self._warmup if cosine else int(length.exact_last_steps(config.decay) + 0.5)
        self._decay = min(decay, self._total)

    @classmethod
    def of(cls, config: JobConfig) -> Self:
        """Return the schedule of a run: until each fork that of the config before it, then that of the config."""
        history = config.history
        train = config.train
        schedule = cls(train.schedule, lr=train.optimizer.lr, length=config.length)
        for index, past in enumerate(history):
            former = cls(past.schedule, lr=past.lr, length=RunLength.of(past, history[:index]))
            schedule._former.append((past.at_step, former))
        return schedule

    def __call__(self, step: int) -> float:
        """Return the learning rate of update ``step``."""
        for at_step, former in self._former:
            if step < at_step:
                return former(step)
        if step < self._warmup:
            warmup_frac = (step + 1) / self._warmup
            return self._lr * (warmup_frac + self._config.start_frac * (1 - warmup_frac))
        rate = self._lr
        if self._config.name == "inverse_sqrt":
            rate *= math.sqrt(max(self._warmup, 1) / (step + 1))
        remaining = self._total - step
        if remaining > self._decay:
            return rate
        decay_frac = 1 - remaining / (self._decay + 1)
        decayed = {
            "linear": decay_frac,
            "sqrt": math.sqrt(decay_frac),
            "cosine": 0.5 * (1 - math.cos(math.pi * decay_frac)),
        }[self._shape]
        return rate * (1 - (1 - self._config.final_frac) * decayed)
