"""The exponential moving average of weights (``train.ema``), in fp32.

It is kept with the moments of each parameter, so it is sharded, saved in checkpoints and resumed as they are.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.optim.sgd import sgd

from smalti.config.durations import RunLength
from smalti.config.ema import EmaConfig
from smalti.distributed.parallel.dtensors import local


class WeightAverage:
    """Updates the average of every trained parameter, ``optimizer.state[parameter]["ema"]``."""

    def __init__(self, config: EmaConfig, length: RunLength, optimizer: torch.optim.Optimizer) -> None:
        self._config, self._length = config, length
        self._weights = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        for parameter in self._weights:
            optimizer.state[parameter]["ema"] = torch.zeros_like(parameter)
        self._averages = [optimizer.state[parameter]["ema"] for parameter in self._weights]

    @torch.no_grad()
    def update(self, step: int, skip: Tensor) -> None:
        """Add the weights after update ``step`` (from 0); nothing changes where ``skip``, shape (), is 1."""
        weights, averages = ([local(tensor) for tensor in tensors] for tensors in (self._weights, self._averages))
        # average += (1 - decay) (weight - average), by the kernel that can skip on the device
        sgd(averages, weights, [None] * len(averages), fused=True, found_inf=skip, weight_decay=1.0, maximize=True,
            lr=1 - self._config.decay_at(step, self._length), momentum=0.0, dampening=0.0, nesterov=False)  # fmt: skip

    @contextmanager
    def as_weights(self, model: nn.Module) -> Iterator[None]:
        """Context manager: ``model`` has the average as its weights, and afterwards its own again, to the bit.

        They change places, so only the largest weight is in memory twice. No save may copy them meanwhile.
        """
        self._exchange(model)
        try:
            yield
        finally:
            self._exchange(model)

    @torch.no_grad()
    def _exchange(self, model: nn.Module) -> None:
        for weight, average in zip(self._weights, self._averages, strict=True):
            before = local(weight).clone()
            local(weight).copy_(local(average))
            local(average).copy_(before)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()  # what an evaluation has gathered is kept where the model is small
