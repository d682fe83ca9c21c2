"""The section ``train.ema``: the exponential moving average of weights."""

from typing import Self

from pydantic import model_validator

from smalti.config.durations import RunLength
from smalti.config.schema import BelowOne, Config, Duration, split_duration


class EmaConfig(Config):
    """The moving average of weights; exactly one of ``half_life`` and ``decay``.

    In the first 1 / (1 - decay) steps it is the plain mean of all steps, so that initial weights have no part in it.
    """

    half_life: Duration | None = None
    """Steps, tokens or fraction of the run after which the weights of a step count half."""
    decay: BelowOne | None = None
    """Part of the average that a step keeps, below 1; the weights after the step are the rest."""

    @model_validator(mode="after")
    def _one_of_both(self) -> Self:
        if (self.half_life is None) == (self.decay is None):
            raise ValueError("train.ema needs exactly one of half_life (such as 0.02run) and decay (such as 0.999)")
        if self.half_life is not None and split_duration(self.half_life)[0] <= 0:
            raise ValueError(f"half_life={self.half_life} keeps nothing of earlier steps; it must be above 0")
        return self

    def decay_at(self, step: int, length: RunLength) -> float:
        """Return the part of the average that update ``step`` (from 0) of a run of this length keeps."""
        if self.decay is not None:
            decay = self.decay
        else:
            assert self.half_life is not None
            amount, unit = split_duration(self.half_life)
            in_half_lives = (
                length.batch_tokens(step) / amount if unit == "tok" else 1 / length.exact_steps(self.half_life)
            )
            decay = 0.5**in_half_lives
        return min(decay, step / (step + 1))
