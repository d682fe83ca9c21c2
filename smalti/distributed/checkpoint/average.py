"""The mean of the weights of several checkpoints of a run, which often predicts better than the last of them.

Stochastic weight averaging: Izmailov et al. 2018, arXiv 1803.05407; for language models, of the latest checkpoints:
Kaddour 2022, arXiv 2209.14981.
"""

import re
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from smalti.base.errors import UserError
from smalti.track.checkpoints.names import step_of


def checkpoints_to_average(
    names: Sequence[str], place: str, which: str, last_step: int, *, option: str = "train.checkpoint.keep"
) -> list[str]:
    """Return the checkpoints that ``which`` (``last:5``) means, newest first, from ``last_step`` backwards.

    names: all of them, newest first, in the folder or store ``place``. option: of the config, which says how many are
    kept there. Raises UserError for anything else, and where there are fewer.
    """
    match = re.fullmatch(r"last:(\d+)", which)
    if match is None or int(match[1]) < 2:
        raise UserError(
            f"--average {which} is not known", allowed="last:N with N of at least 2", hint="--average last:5"
        )
    count = int(match[1])
    names = [name for name in names if step_of(name) <= last_step]
    if len(names) < count:
        raise UserError(
            f"--average {which}: {place} has {len(names)} checkpoints up to step {last_step}",
            allowed=f"last:2 to last:{len(names)}" if len(names) > 1 else None,
            hint=f"train with {option}={count}, or average fewer",
        )
    return names[:count]


class AveragedModel(Mapping[str, Tensor]):
    """The mean of the weights of checkpoints: each tensor is read on access, one checkpoint after another, and summed
    in fp64. Integers and booleans are those of the first checkpoint.
    """

    def __init__(self, models: Sequence[Mapping[str, Tensor]]) -> None:
        self._models = models

    def __getitem__(self, name: str) -> Tensor:
        first = self._models[0][name]
        if not first.is_floating_point():
            return first
        total = first.to(torch.float64)
        for model in self._models[1:]:
            total += model[name]
        return total.div_(len(self._models)).to(first.dtype)

    def __iter__(self) -> Iterator[str]:
        return iter(self._models[0])

    def __len__(self) -> int:
        return len(self._models[0])
