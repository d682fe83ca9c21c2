"""Plans the fork of a run: settings change from its newest checkpoint on, the steps before stay the same.

Nothing is written. The result is checked against the digests of the checkpoint, so an accepted fork resumes. Reads one
small file of the checkpoint and the indexes of the sources, no tokens.
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
    """Plan the fork of the run in ``config``'s folder; None if it was already forked in this way, with or without a
    checkpoint since, so that the same command again resumes.

    Raises UserError if there is no run or no checkpoint, if nothing differs, if a setting differs that cannot change in
    a fork, and if the past would change.
    """
    folder = RunFolder(config.run_folder)
    if not (folder.path / "config.yaml").exists():
        raise UserError(
            f"there is no run in {config.run_folder}, so --fork has nothing to fork",
            allowed="a run with a checkpoint",
            hint="omit --fork to start it",
        )
    folder.require_checkpoints()
    at_step = folder.saved_step()
    before = folder.config()
    if at_step is None:
        raise UserError(
            f"{config.run_folder} has no checkpoint yet that --fork could continue from",
            allowed="a run with a checkpoint",
            hint=f"start a new run: name={config.name}-2",
        )
    saved = store.read_json(folder.checkpoint(at_step) / "train_state.json")["stream"]
    known = folder.with_history(config)
    if not difference(before, known) and not _data_changed(known, saved, at_step):
        if before.data.history:
            return None
        raise UserError(
            f"--fork would change nothing: {config.run_folder} has the same config and data",
            allowed="a change of the data, its order, the length or the learning rate",
            hint="omit --fork to resume",
        )
    plan = fork(before, config, at_step, future_digest(saved))
    if _has_same_past(plan):
        plan = plan.continuing()
    plan.after.data.require_every_source_used()
    stream = _stream(plan.after)
    plan = plan.accepting(future_digest(stream.state(at_step)))
    if not difference(before, plan.after):
        return None
    plan = replace(plan, changes=(*plan.changes, *stream.identity.content_changes(saved)))
    if plan.changes and _has_same_future(plan):
        raise UserError(
            f"--fork would change nothing: {at_step:,} steps of {config.run_folder} are done, and these changes only "
            "concern them, or have no effect:" + "".join(f"\n  {line}" for line in plan.changes),
            allowed=f"a change of the steps after {at_step:,}",
            hint="undo the changes to resume; a stage's end (until) counts from the start of the run",
        )
    stream.check(saved, at_step)
    return replace(plan, changes=(*plan.changes, *_moved_stage_ends(plan)))


def _has_same_past(fork: Fork) -> bool:
    """Whether the new config without a fork chooses the same sequences for the completed steps."""
    before = build_schedule(fork.before.data, fork.before.length)
    after = fork.continuing().after
    try:
        return build_schedule(after.data, after.length).past_digest(fork.at_step) == before.past_digest(fork.at_step)
    except UserError:  # its schedule of these steps may be invalid for the length of the run
        return False


_OF_SCHEDULE = ("data.stages", "train.duration", "train.global_batch_tokens", "train.batch_ramp")
"""Fields that change only the schedule, and through it the learning rate."""


def _has_same_future(fork: Fork) -> bool:
    """Whether only fields of the schedule change, and the schedule is the same from the fork on."""
    keys = [line.partition(": ")[0] for line in fork.changes]
    if not all(any(key == field or key.startswith(f"{field}.") for field in _OF_SCHEDULE) for key in keys):
        return False
    return _future(fork.before, fork.at_step) == _future(fork.after, fork.at_step)


def _moved_stage_ends(fork: Fork) -> list[str]:
    """Return a line for each stage whose unchanged ``until`` is another step, because the length has changed."""
    before = fork.before
    after = fork.after
    if before.data.stages != after.data.stages:
        return []  # listed among the changes
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
    """Return batch, seq_len and exact weights of the steps from ``step`` on, as spans."""
    schedule = build_schedule(config.data, config.length)
    spans: list[Any] = []
    for span in schedule.spans:
        parts = gcd(*span.weights)
        weights = {name: n // parts for name, n in zip(schedule.sources, span.weights, strict=True) if n}
        if span.start_step <= step:
            spans.clear()  # spans before the one that contains the fork
        if not spans or spans[-1][1:] != [span.rows, span.seq_len, weights]:
            spans.append([max(span.start_step, step), span.rows, span.seq_len, weights])
    return [*spans, schedule.total_steps]


def _data_changed(config: RunConfig, saved: dict[str, Any], step: int) -> bool:
    """Whether the data after ``step`` has changed since the run was saved or last forked."""
    accepted = [past.accepted for past in config.data.history if past.at_step >= step]
    known = (accepted and accepted[-1]) or future_digest(saved)
    return future_digest(_stream(config).state(step)) != known


def _stream(config: RunConfig) -> Stream:
    return Stream(config.data, seed=config.seed, length=config.length, microbatch_tokens=1)
