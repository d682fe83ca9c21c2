"""A fork: changed settings of a run from its newest checkpoint on. Which fields may change, and what the past was.

Guarantees: the new config still fixes every number of the whole run, steps before the fork included; only what was
lived is kept (a fork that never made a step leaves no trace). Knows nothing of checkpoints or data.
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

FUTURE = (
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
"""Identity fields that say what is learned when, and how fast: a fork may change them, the others are the run."""


@dataclass(frozen=True)
class Fork:
    """A run before and after it was forked."""

    before: RunConfig
    after: RunConfig
    at_step: int
    changes: tuple[str, ...]
    """What differs, a line each: ``train.duration: 100step -> 200step``."""

    def accepting(self, digest: str) -> "Fork":
        """The same with the digest of the new future's data on record."""
        return self._recording(accepted=digest)

    def continuing(self) -> "Fork":
        """The same with the order of the data going on as if the run had had its later config from the beginning."""
        return self._recording(order_continues=True)

    @property
    def order_continues(self) -> bool:
        """Whether the shares of sources are not counted anew from the fork on."""
        return self.after.data.history[-1].order_continues

    def lines(self) -> list[str]:
        """What changes after the fork, and whether the order of the data does, for people."""
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
    """Give the run ``before``, of which ``at_step`` steps are done, the future that ``wanted`` describes.

    ``digest`` names the future that the run had (of its newest checkpoint). UserError for a difference that is not of
    the future, and for a future that the run cannot have.
    """
    if wanted.data.history not in ((), before.data.history):
        raise UserError(f"data.history is not that of {before.run_folder}", allowed="none; the run folder knows it")
    others = [line for line in difference(before, wanted) if not _is_future(line)]
    if others:
        raise UserError(
            f"--fork changes the future of {before.run_folder}; these fields are the run itself (there -> here):"
            + "".join(f"\n  {line}" for line in others),
            allowed=", ".join(FUTURE),
            hint="take them back, or start a new run: name=NEW_NAME init_from=" + before.run_folder,
        )
    history = _history(before, at_step, digest)
    after = _with(wanted, history, before, f"--fork at step {at_step}")
    changes = [line for line in difference(before, after) if not is_of_history(line)]
    return Fork(before, after, at_step, tuple(changes))


def with_history(config: J, stored: JobConfig) -> J:
    """``config``, as a recipe gives it, with the history that only the run folder knows, where nothing else differs."""
    if not isinstance(config, RunConfig) or not isinstance(stored, RunConfig):
        return config
    if config.data.history or not stored.data.history:
        return config
    try:
        known = _with(config, stored.data.history, stored, f"{stored.run_folder}/config.yaml")
    except UserError:  # what differs does not even go with that history
        return config
    return config if difference(known, stored) else cast(J, known)


def is_of_history(line: str) -> bool:
    """Whether a line of a difference is about what forks left behind."""
    return line.partition(": ")[0].startswith("data.history")


def _with(config: RunConfig, history: Sequence[PastConfig], stored: RunConfig, label: str) -> RunConfig:
    """With that history, and the sources that it read, which a recipe may no longer name."""
    tree = config.model_dump(mode="json")
    names = {name for past in history for stage in past.stages for name in stage.names}
    sources = stored.model_dump(mode="json")["data"]["sources"]
    tree["data"]["sources"] |= {name: sources[name] for name in sorted(names - set(config.data.sources))}
    tree["data"]["history"] = [past.model_dump(mode="json") for past in history]
    return from_dict(RunConfig, tree, label).config


def _history(before: RunConfig, at_step: int, digest: str) -> Sequence[PastConfig]:
    """What was lived: the history as far as ``at_step``, and the config that held until then."""
    kept = [past for past in before.data.history if past.at_step < at_step]
    never_lived = [past for past in before.data.history if past.at_step >= at_step]
    if never_lived:
        new = {"at_step": at_step, "digest": digest, "accepted": "", "order_continues": False}
        return [*kept, never_lived[0].model_copy(update=new)]
    data, train = before.data, before.train
    return [
        *kept,
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


def _is_future(line: str) -> bool:
    key = line.partition(": ")[0]
    return any(key == field or key.startswith(f"{field}.") for field in (*FUTURE, "data.history"))
