"""The mean of the weights of several checkpoints of a run, which often predicts better than the last of them.

Stochastic weight averaging: Izmailov et al. 2018, arXiv 1803.05407; for language models, of the latest checkpoints:
Kaddour 2022, arXiv 2209.14981.
"""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from smalti.base.errors import UserError
from smalti.distributed.checkpoint.checkpoint import StoredModel
from smalti.track.checkpoints.names import complete, step_of


def checkpoints_to_average(folder: Path, which: str, last_step: int) -> list[str]:
    """Return the checkpoints that ``which`` (``last:5``) means, newest first, from ``last_step`` backwards.

    Raises UserError for anything else, and where the run has fewer.
    """
    match = re.fullmatch(r"last:(\d+)", which)
    if match is None or int(match[1]) < 2:
        raise UserError(
            f"--average {which} is not known", allowed="last:N with N of at least 2", hint="--average last:5"
        )
    count = int(match[1])
    names = [name for name in complete(folder) if step_of(name) <= last_step]
    if len(names) < count:
        raise UserError(
            f"--average {which}: {folder} has {len(names)} checkpoints up to step {last_step}",
            allowed=f"last:2 to last:{len(names)}" if len(names) > 1 else "no average of a single checkpoint",
            hint=f"train with train.checkpoint.keep={count}, or average fewer",
        )
    return [str(folder / name) for name in names[:count]]


class AveragedModel(Mapping[str, Tensor]):
    """The weights of ``StoredModel``, averaged over checkpoints: each tensor is read on access, and summed in fp64.

    Integers and booleans are those of the first checkpoint. DataError for a damaged checkpoint.
    """

    def __init__(self, paths: list[str]) -> None:
        self._models = [StoredModel(path) for path in paths]

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
