"""The checkpoint that is exported, or the mean of several: of a folder, or in a store, where its parts are read."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from smalti.base import store
from smalti.base.errors import DataError, UserError
from smalti.base.objects import Requests
from smalti.config.load import dump, load_text
from smalti.config.run import RunConfig
from smalti.distributed.checkpoint import checkpoint
from smalti.distributed.checkpoint.average import AveragedModel, checkpoints_to_average
from smalti.distributed.checkpoint.copied import CopiedModel, name_of_copy
from smalti.track.checkpoints import manifest
from smalti.track.checkpoints.copies import Copies
from smalti.track.checkpoints.names import best, complete, folder_name, last_saved, step_of


@dataclass(frozen=True)
class Source:
    """A checkpoint, or the mean of those up to it."""

    place: str
    """Its folder, or its URL in a store."""
    weights: Mapping[str, Tensor]
    """By the names of the ``state_dict``; each is read on access."""
    state: Mapping[str, Any]
    """``train_state.json``."""
    averaged: tuple[int, ...] = ()
    """Steps of the checkpoints whose mean the weights are."""
    ema: bool = False
    """Whether the weights are their moving average."""

    @property
    def step(self) -> int:
        """Step of the checkpoint."""
        return step_of(self.place)


def open_source(
    run: Path,
    config: RunConfig,
    checkpoints: str | Path | None,
    *,
    step: int | None,
    average: str | None = None,
    ema: bool = False,
) -> Source:
    """Open the checkpoint of ``step``, else the best, else the newest; arguments as those of ``export``.

    Raises UserError where there is no such checkpoint, DataError where it is damaged or that of another run.
    """
    if checkpoints is not None and not store.is_local(checkpoints):
        return _open_copy(str(checkpoints), config, step=step, average=average, ema=ema)
    folder = run / "checkpoints" if checkpoints is None else Path(checkpoints)
    path = _checkpoint(run, step, folder)
    state = manifest.read_state(path)
    _require_same_run(path, state, config)
    if average is None:
        return Source(path, checkpoint.StoredModel(path, ema=ema, verified=True), state, ema=ema)
    names = checkpoints_to_average(complete(folder), str(folder), average, step_of(path))
    weights = AveragedModel(
        [checkpoint.StoredModel(folder / name, verified=step_of(name) == step_of(path)) for name in names]
    )
    return Source(path, weights, state, tuple(map(step_of, names)))


def _open_copy(url: str, config: RunConfig, *, step: int | None, average: str | None, ema: bool) -> Source:
    copies = Copies(url, Requests())
    last = name_of_copy(copies, step)
    names = [last]
    if average is not None:
        keep = "train.checkpoint.save_to_keep"
        names = checkpoints_to_average(copies.complete(), url, average, step_of(last), option=keep)
    models = [CopiedModel(copies, name, ema=ema) for name in names]
    for model in models:
        _require_same_model(model, config)
        _require_same_run(model.place, model.state(), config)
    first = models[0]
    if average is None:
        return Source(first.place, first, first.state(), ema=ema)
    return Source(first.place, AveragedModel(models), first.state(), tuple(map(step_of, names)))


def _require_same_run(place: str, state: Mapping[str, Any], config: RunConfig) -> None:
    reason = manifest.of_another_run(state, dump(config), config.name)
    if reason is not None:
        raise DataError(f"checkpoint {place} cannot be used: {reason}", hint="name the run that has saved it")


def _require_same_model(copied: CopiedModel, config: RunConfig) -> None:
    """The check for checkpoints of earlier versions, which do not say of which run they are."""
    if copied.config is None:
        return
    stored = load_text(RunConfig, copied.config, f"{copied.place}/config.yaml").config
    for section in ("model", "adapter"):
        if getattr(stored, section) != getattr(config, section):
            raise DataError(f"{copied.place} is of another run: its {section} section is not that of {config.name}")


def _checkpoint(run: Path, step: int | None, folder: Path) -> str:
    """Return the path of a checkpoint whose digests were compared."""
    step = best(folder) if step is None else step
    if step is None:
        newest = checkpoint.newest(folder)
        if newest is None:
            raise _no_checkpoint(run, folder)
        return newest
    path = folder / folder_name(step)
    problem = checkpoint.fault(path) if path.is_dir() else "it does not exist"
    if problem is not None:
        others = sorted(step_of(name) for name in complete(folder) if step_of(name) != step)
        raise UserError(
            f"checkpoint {path} cannot be used: {problem}",
            allowed=f"--step {', '.join(map(str, others)) or '(the run has no other)'}",
            hint=f"smalti runs checkpoints verify {run}",
        )
    return str(path)


def _no_checkpoint(run: Path, folder: Path) -> UserError:
    last = last_saved(run)
    if last is None:
        return UserError(f"the run {run} has no complete checkpoint yet", hint=f"smalti train {run / 'config.yaml'}")
    return UserError(
        f"{folder} has no complete checkpoint; the last one of the run, of step {last:,}, was deleted or moved",
        hint=f"copy it back to {folder}, or export a copy in a store with --from URL; 'smalti runs checkpoints {run}' "
        "lists the copies that were made",
    )
