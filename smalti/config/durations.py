"""Lengths of runs and their parts, in steps and tokens. The training loop resolves cadences in wall-clock time."""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self, TypeVar

from pydantic import Field, ValidationError

from smalti.config.schema import Config, Length, NotAllowed, Whole, split_duration

L = TypeVar("L", bound="LengthConfig")


class BatchStageConfig(Config):
    """An initial part of the run with another batch size."""

    until: Length
    """End of the part, counted from the start of the run: ``400step`` or ``1e9tok``."""
    global_batch_tokens: Whole = Field(ge=1)
    """Tokens in each step until then; a multiple of seq_len."""


class LengthConfig(Config):
    """Length and batch sizes of a run: the first fields of ``train:``."""

    duration: Length
    """Length of the run: ``600step`` or ``2e9tok``."""
    global_batch_tokens: Whole = Field(ge=1)
    """Tokens in each step, over all ranks; a multiple of seq_len."""
    batch_ramp: tuple[BatchStageConfig, ...] = ()
    """Initial parts of the run with other batch sizes, in the order of their ends."""


class PastLength(LengthConfig):
    """Length and batch sizes before a fork."""

    at_step: Whole = Field(ge=1)
    """Number of steps completed at the fork."""


@dataclass(frozen=True)
class RunLength:
    """The number of steps of a run and the tokens in each."""

    total_steps: int
    batches: tuple[tuple[int, int], ...]
    """(first step, tokens in a step) of the segments with one batch size, from step 0 on."""

    @classmethod
    def of(cls, train: LengthConfig, history: Sequence[PastLength] = ()) -> Self:
        """Return the length of a run of this config, whose first steps were those of ``history``.

        Raises NotAllowed for a ramp whose parts are empty or pass the end, and for an end before the last fork.
        """
        former, at = None, 0
        for past in history:
            former, at = cls._behind(former, at, past), past.at_step
        return cls._behind(former, at, train)

    @classmethod
    def _behind(cls, former: Self | None, at: int, train: LengthConfig) -> Self:
        """Return the first ``at`` steps of ``former``, followed by the steps of ``train``."""
        parts = [part for part in former.batches if part[0] < at] if former else []
        start, tokens = at, former.tokens(at) if former else 0
        for index, part in enumerate(train.batch_ramp):
            amount, unit = split_duration(part.until)
            end = int(amount) if unit == "step" else start + int((amount - tokens) / part.global_batch_tokens + 0.5)
            if end <= start == at > 0:
                continue  # over before the fork
            if end <= start:
                raise NotAllowed(
                    f"train.batch_ramp[{index}] ends at '{part.until}', which is step {end:,}",
                    allowed=f"an end after step {start:,}",
                    hint=f"give train.batch_ramp[{index}].until a later end",
                )
            _append(parts, start, part.global_batch_tokens)
            tokens += (end - start) * part.global_batch_tokens
            start = end
        _append(parts, start, train.global_batch_tokens)
        amount, unit = split_duration(train.duration)
        total = int(amount) if unit == "step" else start - (int(tokens - amount) // train.global_batch_tokens)
        if total <= at and former:
            raise NotAllowed(
                f"train.duration={train.duration} ends at step {max(total, 0):,}; {at:,} steps were done at the fork",
                allowed=f"more than {at}step",
                hint=f"train.duration={2 * at}step",
            )
        if train.batch_ramp and total <= start:
            raise NotAllowed(
                f"train.batch_ramp ends at step {start:,}; the run, train.duration={train.duration}, ends before",
                allowed="a ramp that ends inside the run",
                hint="make the run longer (train.duration), or the ramp shorter",
            )
        return cls(max(1, total), tuple(parts))

    @classmethod
    def of_plain(cls, config: Mapping[str, Any]) -> Self | None:
        """Return the length of a run from plain values of its config, of any version; None if they do not define it."""
        train = config.get("train")
        if not isinstance(train, Mapping):
            return None
        data = config.get("data")
        history = (data.get("history") if isinstance(data, Mapping) else None) or ()
        try:
            return cls.of(_picked(LengthConfig, train), [_picked(PastLength, past) for past in history])
        except (ValidationError, NotAllowed, TypeError):
            return None

    @property
    def total_tokens(self) -> int:
        """Tokens of the whole run."""
        return self.tokens(self.total_steps)

    def batch_tokens(self, step: int) -> int:
        """Return the tokens of update ``step`` (from 0)."""
        return self.batches[bisect_right(self.batches, step, key=lambda part: part[0]) - 1][1]

    def tokens(self, steps: int) -> int:
        """Return the tokens of the first ``steps`` updates."""
        ends = [*(start for start, _ in self.batches[1:]), steps]
        return sum(
            max(0, min(end, steps) - start) * size for (start, size), end in zip(self.batches, ends, strict=True)
        )

    def step_at(self, duration: str) -> int:
        """Return the step nearest to ``100step``, ``2e9tok`` or ``0.8run`` (a fraction of the steps)."""
        return int(self.exact_steps(duration) + 0.5)

    def exact_steps(self, duration: str) -> float:
        """Return the steps from the start of the run to ``duration``, not rounded.

        Steps beyond the end have the size of the last batch.
        """
        amount, unit = split_duration(duration)
        assert unit in ("step", "tok", "run"), duration
        if unit != "tok":
            return amount * (self.total_steps if unit == "run" else 1)
        return self._steps_of(amount)

    def exact_last_steps(self, duration: str) -> float:
        """Return the steps from ``duration`` before the end of the run to its end, not rounded."""
        amount, unit = split_duration(duration)
        if unit != "tok":
            return self.exact_steps(duration)
        rest = self.total_tokens - amount
        return self.total_steps - (self._steps_of(rest) if rest > 0 else rest / self.batches[0][1])

    def _steps_of(self, tokens: float) -> float:
        before = 0
        for (start, size), (end, _) in zip(self.batches, self.batches[1:], strict=False):
            if before + (end - start) * size >= tokens:
                return start + (tokens - before) / size
            before += (end - start) * size
        start, size = self.batches[-1]
        return start + (tokens - before) / size


def _append(parts: list[tuple[int, int]], start: int, size: int) -> None:
    if not parts or parts[-1][1] != size:
        parts.append((start, size))


def _picked(model: type[L], values: Mapping[str, Any]) -> L:
    return model(**{key: values[key] for key in model.model_fields if key in values})


def check_schedule(length: RunLength, duration: str, warmup: str, decay: str) -> None:
    """Raise NotAllowed where warmup and decay together do not fit into a run of ``length``, given as ``duration``."""
    total = length.total_steps
    rise, fall = length.exact_steps(warmup), length.exact_last_steps(decay)
    run = f"the run, train.duration={duration}, has {total:,} step{'s' if total > 1 else ''}"
    # A share of the run may be half a step more than it says once it is rounded; what is written decides.
    if rise > total * (1 + 1e-9):
        raise NotAllowed(
            f"train.schedule.warmup={warmup} is {rise:,.0f} steps; {run}",
            allowed=f"at most {total}step, less the decay",
            hint="train.schedule.warmup=0.02run, or make the run longer (train.duration)",
        )
    if rise + fall > total * (1 + 1e-9):
        raise NotAllowed(
            f"train.schedule.warmup={warmup} and train.schedule.decay={decay} are {rise:,.0f} + {fall:,.0f} steps; "
            f"{run}",
            allowed=f"together at most {total}step, or 1run",
            hint="train.schedule.warmup=0.02run train.schedule.decay=0.2run, or make the run longer (train.duration)",
        )


def to_seconds(cadence: str) -> float | None:
    """Return the seconds of a cadence in wall-clock time; None for steps, tokens or a fraction of the run."""
    amount, unit = split_duration(cadence)
    factor = {"s": 1, "min": 60, "h": 3600, "d": 86400}.get(unit)
    return None if factor is None else amount * factor
