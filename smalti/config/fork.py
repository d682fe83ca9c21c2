"""A fork: changed settings of a run from its newest checkpoint on. Which fields may change, and the history of forks.

The new config determines every number of the whole run, including the steps before the fork. The history has only steps
that were trained: a fork without a step leaves no entry.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar, cast

from smalti.base.errors import UserError
from smalti.config.data import PastConfig
from smalti.config.identity import difference
from smalti.config.load import from_dict
from smalti.config.run import JobConfig, RunConfig

J = TypeVar("J", bound=JobConfig)

FORK_FIELDS = (
    "data.sources",
    "data.seq_len",
    "data.stages",
    "data.skip",
    "data.heldout",
    "train.duration",
    "train.global_batch_tokens",
    "train.batch_ramp",
    "train.schedule",
    "train.optimizer.lr",
)
"""Identity fields that a fork may change: data, length and learning rate."""


@dataclass(frozen=True)
class Fork:
    """A run before and after it was forked."""

    before: RunConfig
    after: RunConfig
    at_step: int
    changes: tuple[str, ...]
    """The differences, a line each: ``train.duration: 100step -> 200step``."""

    def accepting(self, digest: str) -> "Fork":
        """Return the fork with the digest of its data schedule recorded."""
        return self._recording(accepted=digest)

    def continuing(self) -> "Fork":
        """Return the fork with the data order of a run that had the later config from its first step."""
        return self._recording(order_continues=True)

    @property
    def order_continues(self) -> bool:
        """True if the data order continues; False if the shares of sources are counted from the fork on."""
        return self.after.data.history[-1].order_continues

    def lines(self) -> list[str]:
        """Return lines that describe the changes, and whether the data order changes, for output."""
        order = (
            "stays, but for these changes" if self.order_continues else "changes: shares of sources are counted anew"
        )
        changes = self.changes or ("files of a source that was not read yet",)
        return [*changes, f"the order of the data {order}"]

    def _recording(self, **values: Any) -> "Fork":
        data = self.after.data
        last = data.history[-1].model_copy(update=values)
        data = data.model_copy(update={"history": (*data.history[:-1], last)})
        return replace(self, after=self.after.model_copy(update={"data": data}))


def fork(before: RunConfig, wanted: RunConfig, at_step: int, digest: str) -> Fork:
    """Return the fork of the run ``before`` after ``at_step`` steps that continues with the config ``wanted``.

    digest: that of the data schedule in the newest checkpoint. Raises UserError for a difference in a field that is not
    in ``FORK_FIELDS``, and for a config that is invalid after these steps.
    """
    if wanted.data.history not in ((), before.data.history):
        raise UserError(
            f"data.history is not that of {before.run_folder}",
            allowed="no data.history in the recipe: it is read from the run folder",
        )
    others = [line for line in difference(before, wanted) if not _may_change(line)]
    if others:
        raise UserError(
            f"--fork cannot change these fields of {before.run_folder} (there -> here):"
            + "".join(f"\n  {line}" for line in others),
            allowed=", ".join(FORK_FIELDS),
            hint="undo these changes, or start a new run: name=NEW_NAME init_from=" + before.run_folder,
        )
    history = _history(before, at_step, digest)
    after = _with(wanted, history, before, f"--fork at step {at_step}")
    changes = [line for line in difference(before, after) if not is_of_history(line)]
    return Fork(before, after, at_step, tuple(changes))


def with_history(config: J, stored: JobConfig) -> J:
    """Return ``config``, that of a recipe, with the history of the run folder's config if nothing else differs."""
    if not isinstance(config, RunConfig) or not isinstance(stored, RunConfig):
        return config
    if config.data.history or not stored.data.history:
        return config
    try:
        known = _with(config, stored.data.history, stored, f"{stored.run_folder}/config.yaml")
    except UserError:  # the config is invalid with that history
        return config
    return config if difference(known, stored) else cast(J, known)


def other_settings(saved: JobConfig, config: JobConfig) -> list[str]:
    """Return the differences that show that a checkpoint with the config ``saved`` is not of the run ``config``.

    Its name may differ, and what a fork may change in a run that was forked: the data are compared by their digests.
    """
    lines = difference(saved, config)
    return [line for line in lines if not line.startswith("name: ") and not (config.history and _may_change(line))]


def is_of_history(line: str) -> bool:
    """Return whether a line of a difference is about the history of forks."""
    return line.partition(": ")[0].startswith("data.history")


def _with(config: RunConfig, history: Sequence[PastConfig], stored: RunConfig, label: str) -> RunConfig:
    """Return the config with a history and its sources, which a recipe may no longer name."""
    tree = config.model_dump(mode="json")
    names = {name for past in history for stage in past.stages for name in stage.names}
    sources = stored.model_dump(mode="json")["data"]["sources"]
    tree["data"]["sources"] |= {name: sources[name] for name in sorted(names - set(config.data.sources))}
    tree["data"]["history"] = [past.model_dump(mode="json") for past in history]
    return from_dict(RunConfig, tree, label).config


def _history(before: RunConfig, at_step: int, digest: str) -> Sequence[PastConfig]:
    """Return the history of the steps that were trained: the forks before ``at_step``, and the config until then."""
    trained = [past for past in before.data.history if past.at_step < at_step]
    untrained = [past for past in before.data.history if past.at_step >= at_step]
    if untrained:
        new = {"at_step": at_step, "digest": digest, "accepted": "", "order_continues": False}
        return [*trained, untrained[0].model_copy(update=new)]
    data, train = before.data, before.train
    return [
        *trained,
        PastConfig(
            at_step=at_step,
            digest=digest,
            duration=train.duration,
            global_batch_tokens=train.global_batch_tokens,
            batch_ramp=train.batch_ramp,
            seq_len=data.seq_len,
            stages=data.stages,
            skip=data.skip,
            lr=train.optimizer.lr,
            schedule=train.schedule,
        ),
    ]


def _may_change(line: str) -> bool:
    key = line.partition(": ")[0]
    return any(key == field or key.startswith(f"{field}.") for field in (*FORK_FIELDS, "data.history"))
