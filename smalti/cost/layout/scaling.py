"""Scaling curves: the predicted step on each of several numbers of devices."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from smalti.base.errors import UserError
from smalti.config.hardware import Hardware
from smalti.config.model import ModelConfig
from smalti.config.run import RunConfig
from smalti.cost.axes import Layout
from smalti.cost.layout.predict import Prediction, predict
from smalti.cost.params import count


@dataclass(frozen=True)
class Point:
    """A number of devices on a curve."""

    prediction: Prediction
    speed_up: float
    """Tokens per second over those of the first point."""
    ideal: float
    """Devices over those of the first point."""

    @property
    def efficiency_frac(self) -> float:
        """Speed-up over the ideal one."""
        return self.speed_up / self.ideal


Choose = Callable[[RunConfig, int], tuple[Layout, int]]
"""(config, devices) -> layout and microbatch; raises UserError if there is none."""


@dataclass(frozen=True)
class Curve:
    """Predictions over numbers of devices."""

    points: tuple[Point, ...]
    """The points in the order of the number of devices."""
    missing: dict[int, str]
    """Numbers of devices without a layout -> why."""


def curve(config: RunConfig, hardware: Hardware, gpus: Sequence[int], choose: Choose, *, weak: bool) -> Curve:
    """Predict each number of devices.

    ``weak``: the batch grows with the devices, up to the config's at the largest number; otherwise it is always the
    config's.
    """
    numbers = sorted(set(gpus))
    if not numbers or numbers[0] < 1:
        raise UserError(f"{', '.join(map(str, gpus)) or 'no'} devices are out of range", allowed="whole numbers from 1")
    batch, seq_len = config.batches_and_lengths[-1]
    predictions, missing = list[Prediction](), dict[int, str]()
    for number in numbers:
        run = with_batch(config, -(-batch // seq_len * number // numbers[-1]) * seq_len) if weak else config
        try:
            layout, microbatch = choose(run, number)
        except UserError as error:
            missing[number] = error.message
        else:
            predictions.append(predict(run, hardware, layout, microbatch))
    points = (
        Point(prediction, prediction.tokens_per_s / predictions[0].tokens_per_s, prediction.gpus / predictions[0].gpus)
        for prediction in predictions
    )
    return Curve(tuple(points), missing)


def with_batch(config: RunConfig, tokens: int) -> RunConfig:
    """Return the run with a constant batch of ``tokens``."""
    update: dict[str, Any] = {"global_batch_tokens": tokens, "batch_ramp": ()}
    return config.model_copy(update={"train": config.train.model_copy(update=update)})


def dense_twin(model: ModelConfig) -> ModelConfig:
    """Return a dense model of the same width and depth, whose MLPs have the active MLP parameters of ``model``."""
    if model.moe is None:
        raise UserError("the model is dense already", allowed="an MoE")
    matrices = 3 if model.gated else 2
    inner = round(count(model).mlp_active / (model.num_hidden_layers * matrices * model.hidden_size))
    return model.model_copy(update={"moe": None, "family": "decoder", "intermediate_size": inner})
