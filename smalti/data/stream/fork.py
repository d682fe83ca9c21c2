"""Plans the fork of a run: settings change from its newest checkpoint on; its past must stay what it was.

Nothing is written. The result has been checked against the digests of the checkpoint, so an accepted fork resumes.
Reads one small file of the checkpoint and the indexes of the sources, no token.
"""

from dataclasses import replace
from math import gcd
from typing import Any

from smalti.base import store
from smalti.base.errors import UserError
from smalti.config.fork import Fork, fork
from smalti.config.identity import difference
from smalti.config.run import RunConfig
from smalti.data.order.schedule import build_schedule
from smalti.data.stream.state import future_digest
from smalti.data.stream.stream import Stream
from smalti.track.run import RunFolder


def plan_fork(config: RunConfig) -> Fork | None:
    """Plan the fork of the run in ``config``'s folder; None if it was already forked in just this way, with or without
    a checkpoint since, so that the same command again resumes.

    UserError where there is no run or no checkpoint, where nothing differs, where something differs that is not the
    future, and where the past would change.
    """
    folder = RunFolder(config.run_folder)
    if not (folder.path / "config.yaml").exists():
        raise UserError(
            f"there is no run in {config.run_folder}, so --fork has nothing to fork",
            allowed="a run with a checkpoint",
            hint="leave --fork out to start it",
        )
    folder.require_checkpoints()
    at_step, before = folder.saved_step(), folder.config()
    if at_step is None:
        raise UserError(
            f"{config.run_folder} has no checkpoint yet, so there is no past for --fork to keep",
            allowed="a run with a checkpoint",
            hint=f"start a new run: name={config.name}-2",
        )
    saved = store.read_json(folder.checkpoint(at_step) / "train_state.json")["stream"]
    known = folder.with_history(config)
    if not difference(before, known) and not _data_changed(known, saved, at_step):
        if before.data.history:
            return None
        raise UserError(
            f"--fork would change nothing: {config.run_folder} has this very config and data",
            allowed="a change of the data, its order, the length or the learning rate",
            hint="leave --fork out to go on",
        )
    found = fork(before, config, at_step, future_digest(saved))
    if _agrees(found):
        found = found.continuing()
    found.after.data.require_every_source_used()
    stream = _stream(found.after)
    found = found.accepting(future_digest(stream.state(at_step)))
    if not difference(before, found.after):
        return None
    found = replace(found, changes=(*found.changes, *stream.identity.content_changes(saved)))
    if found.changes and _is_over(found):
        raise UserError(
            f"--fork would change nothing: {at_step:,} steps of {config.run_folder} are done, and these changes only "
            "concern them, or come to the same:" + "".join(f"\n  {line}" for line in found.changes),
            allowed=f"a change of what comes after step {at_step:,}",
            hint="take the changes back to go on; a stage's end (until) counts from the start of the run",
        )
    stream.check(saved, at_step)
    return replace(found, changes=(*found.changes, *_moved_stage_ends(found)))


def _agrees(fork: Fork) -> bool:
    """Whether the new config by itself chooses the same sequences for the steps that are done: the order then does not
    depend on the fork."""
    before = build_schedule(fork.before.data, fork.before.length)
    after = fork.continuing().after
    try:
        return build_schedule(after.data, after.length).past_digest(fork.at_step) == before.past_digest(fork.at_step)
    except UserError:  # what it says of those steps may not even fit the run
        return False


_OF_SCHEDULE = ("data.stages", "train.duration", "train.global_batch_tokens", "train.batch_ramp")
"""Fields whose whole effect is the schedule, and through it the learning rate."""


def _is_over(fork: Fork) -> bool:
    """Whether all changes are of the schedule, and it is the same from the fork on."""
    keys = [line.partition(": ")[0] for line in fork.changes]
    if not all(any(key == field or key.startswith(f"{field}.") for field in _OF_SCHEDULE) for key in keys):
        return False
    return _future(fork.before, fork.at_step) == _future(fork.after, fork.at_step)


def _moved_stage_ends(fork: Fork) -> list[str]:
    """A line for each stage whose end, as it is written, is another step of the new length than of the old one."""
    before, after = fork.before, fork.after
    if before.data.stages != after.data.stages:
        return []  # the change itself names the ends
    ends = [
        (index, before.length.step_at(stage.until), after.length.step_at(stage.until))
        for index, stage in enumerate(after.data.stages[:-1])
    ]
    return [
        f"stage {index} ends at step {old:,} -> {new:,}"
        for index, old, new in ends
        if old != new and max(old, new) > fork.at_step
    ]


def _future(config: RunConfig, step: int) -> list[Any]:
    """Batch, seq_len and exact weights of each step from ``step`` on, as spans."""
    schedule = build_schedule(config.data, config.length)
    found: list[Any] = []
    for span in schedule.spans:
        parts = gcd(*span.weights)
        weights = {name: n // parts for name, n in zip(schedule.sources, span.weights, strict=True) if n}
        if span.start_step <= step:
            found.clear()  # over, or the one that the fork stands in
        if not found or found[-1][1:] != [span.rows, span.seq_len, weights]:
            found.append([max(span.start_step, step), span.rows, span.seq_len, weights])
    return [*found, schedule.total_steps]


def _data_changed(config: RunConfig, saved: dict[str, Any], step: int) -> bool:
    """Whether files that the run has yet to read are others than when it was saved, or forked since."""
    accepted = [past.accepted for past in config.data.history if past.at_step >= step]
    known = (accepted and accepted[-1]) or future_digest(saved)
    return future_digest(_stream(config).state(step)) != known


def _stream(config: RunConfig) -> Stream:
    return Stream(config.data, seed=config.seed, length=config.length, microbatch_tokens=1)
