"""Finds the cause of the end of an attempt, and the exit code that follows from it."""

import re
import signal
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from smalti.base.errors import ExitCode
from smalti.fleet.agent.outcome import Outcome
from smalti.fleet.agent.pauses import Pause
from smalti.fleet.agent.watch import UNSAVED, Watch
from smalti.fleet.agent.watchdog import Hang
from smalti.fleet.launch.local import LOST_PEER, Rank
from smalti.track.out_of_memory import describe, happened
from smalti.track.run import RunFolder

_TAIL_LINES = 15
_TRACEBACK_LINES = 400
_TRACEBACK = "Traceback (most recent call last)"
_DISK = re.compile(r"could not be written|the disk (is full|fails)|No space left on device")
_RESUME = "run the same command again; it continues from the newest checkpoint"
_START_OVER = "run the same command again; it starts from the beginning"


def judge(watch: Watch, folder: RunFolder) -> Outcome:
    """Return how the attempt ended."""
    cause = watch.cause()
    step = last_step(folder)
    if watch.requests.interrupts > 1:
        return _killed_at_once(folder, step)
    oom_event = happened(folder.events(), folder.attempt)
    if oom_event is not None and watch.stopped_by is None:
        return _out_of_memory(oom_event, cause, watch, step)
    if watch.lost is not None:
        return _node_lost(watch, step)
    if watch.hang is not None:
        return _hung(watch.hang, watch)
    if cause is not None:
        outcome = _lost(cause, watch, step) if cause.code == LOST_PEER else _blamed(cause, watch, step)
        outcome = replace(outcome, step=watch.step_of(outcome.rank, step), node=cause.node)
        return _with_value_not_finite(outcome, folder) if outcome.code == ExitCode.CHECK_FAILED else outcome
    if watch.stopped_by is None:
        return Outcome(ExitCode.DONE, f"finished after step {step}", printed=True)
    outcome = _stopped(watch.stopped_by, watch, folder, step)
    return outcome if watch.pause is None or watch.requests.any else _paused(watch.pause, outcome, step)


def _killed_at_once(folder: RunFolder, step: int) -> Outcome:
    saved = folder.saved_step()
    since = "of this run" if saved is None else f"since the checkpoint of step {saved}"
    reason = f"stopped at once by the second Ctrl-C after step {step}; nothing {since} was saved"
    return Outcome(ExitCode.INTERRUPTED, reason, hint=_RESUME if saved is not None else _START_OVER)


def _paused(pause: Pause, outcome: Outcome, step: int) -> Outcome:
    """Return the outcome of ranks that were asked to save and end without a fault; some may not have."""
    if outcome.code == ExitCode.DONE:
        return outcome
    saved = "" if outcome.code == ExitCode.RETRY else f"; {outcome.reason}"
    return Outcome(ExitCode.RETRY, f"{pause.words}, after step {step}{saved}", cause=pause.cause, step=step)


def _stopped(by: signal.Signals, watch: Watch, folder: RunFolder, step: int) -> Outcome:
    """Return the outcome of stopped ranks: 75 or 130 if they all ended by themselves, 143 if one did not."""
    codes = {rank.code for rank in watch.ranks}
    saved, again = _saved_step(folder), _RESUME if folder.checkpoints.exists() else _START_OVER
    what = "nothing of this attempt was saved" if saved is None else f"the last checkpoint is of step {saved}"
    if codes == {0}:
        return Outcome(ExitCode.DONE, f"finished after step {step}, as {by.name} came", printed=True)
    if ExitCode.RETRY in codes and not watch.out_of_time and codes.isdisjoint(UNSAVED):
        return Outcome(ExitCode.RETRY, f"stopped by {by.name} after step {step}; {what}", hint=again)
    if codes == {ExitCode.INTERRUPTED} and saved is not None:
        return Outcome(ExitCode.INTERRUPTED, f"stopped by {by.name} after step {step}", hint=_RESUME, printed=True)
    why = (
        f"{_unresponsive(watch)} did not end in time"
        if watch.out_of_time
        else "it came while the ranks were not training"
    )
    reason = f"terminated by {by.name} after step {step}: {why}; {what}"
    if not (step or folder.checkpoints.exists() or watch.out_of_time or codes & {ExitCode.RETRY, ExitCode.INTERRUPTED}):
        reason = f"stopped by {by.name} before the first step; nothing was saved"
    return Outcome(ExitCode.TERMINATED, reason, hint=again)


def _node_lost(watch: Watch, step: int) -> Outcome:
    """Return the outcome if a node was lost, whatever its ranks and the others did then."""
    assert watch.lost is not None
    reason = f"node {watch.lost.name} was lost after step {step}: {watch.lost.why}"
    return Outcome(ExitCode.RETRY, reason, hint=_RESUME, cause="node", step=step)


def _lost(lost: Rank, watch: Watch, step: int) -> Outcome:
    """Return the outcome if all ranks that died had lost another one: those that were left did not answer."""
    if not watch.left:
        tail = tuple(lost.last_lines(_TAIL_LINES))
        reason = f"the ranks lost the connection to each other after step {step}"
        return Outcome(ExitCode.RETRY, reason, tail, _RESUME, cause="network")
    tail = tuple(watch.left[0].last_lines(_TAIL_LINES))
    reason = f"{_unresponsive(watch)} did not answer after step {step}"
    alone = watch.left[0].rank if len(watch.left) == 1 else None
    return Outcome(ExitCode.RETRY, reason, tail, _RESUME, cause="hang", rank=alone)


def _hung(hang: Hang, watch: Watch) -> Outcome:
    """Return the outcome if the watchdog has ended the attempt."""
    guilty = next((rank for rank in watch.ranks if rank.rank == hang.rank), None)
    who = "every rank" if guilty is None else guilty.name
    reason = f"{who} made no progress for {hang.still_s:.0f} s in {hang.phase.name.lower()} after step {hang.step}"
    reason += f": {hang.why}" if hang.why else ""
    tail = () if guilty is None else tuple(guilty.last_lines(_TAIL_LINES))
    node = None if guilty is None else guilty.node
    return Outcome(ExitCode.RETRY, reason, tail, _RESUME, cause="hang", rank=hang.rank, node=node, step=hang.step)


def _unresponsive(watch: Watch) -> str:
    """Return ``rank 1 (pid 17), which was stopped (SIGSTOP or a debugger),``."""
    names = [rank.name for rank in watch.left]
    verb = "was" if len(names) == 1 else "were"
    return ", ".join(names) + (f", which {verb} stopped (SIGSTOP or a debugger)," if watch.any_stopped else "")


def _with_value_not_finite(outcome: Outcome, folder: RunFolder) -> Outcome:
    """Return ``outcome`` with the loss or gradient norm that ended the run, if one did."""
    events = [event for event in folder.events() if event["attempt"] == folder.attempt]
    number = next((event for event in events if event["event"] == "not_finite"), None)
    if number is None:
        return outcome
    return replace(outcome, reason=f"the {number['cause']} was {number['value']} at step {number['step']}")


def _blamed(cause: Rank, watch: Watch, step: int) -> Outcome:
    assert cause.code is not None
    who = cause.name
    tail = tuple(cause.last_lines(_TAIL_LINES))
    if cause.code < 0:
        killed_hint = _RESUME
        if cause.code == -signal.SIGKILL:
            killed_hint += " (if nobody killed it, the machine may be out of memory: see 'dmesg')"
        name = signal.Signals(-cause.code).name
        beside = f"; {_unresponsive(watch)} did not answer either" if watch.any_stopped else ""
        reason = f"{who} was killed by {name} after step {step}{beside}"
        return Outcome(ExitCode.RETRY, reason, tail, killed_hint, cause="killed", rank=cause.rank)
    known = cause.code in set(ExitCode)
    code = cause.code if known else int(ExitCode.RETRY)
    all_agree = all(rank.code == cause.code for rank in watch.ranks)
    printed = known and (cause.rank == 0 or all_agree)
    reason = f"{who} exited with code {cause.code} after step {step}"
    hint = _RESUME if code == ExitCode.RETRY else None
    outcome = Outcome(code, reason, () if printed else tail, hint, printed, rank=cause.rank)
    if code in (ExitCode.USAGE, ExitCode.CHECK_FAILED):
        return outcome
    log = "\n".join(cause.last_lines(_TRACEBACK_LINES))
    if cause.code == ExitCode.RETRY:
        return replace(outcome, cause="disk" if _DISK.search(log) else "reported")
    start = log.rfind(_TRACEBACK)
    return replace(outcome, cause="exception", traceback=None if start < 0 else log[start:])


def _out_of_memory(oom_event: Mapping[str, Any], cause: Rank | None, watch: Watch, step: int) -> Outcome:
    """Return the outcome if a rank ran out of memory, which is the cause whichever rank died first."""
    smaller = oom_event["next_microbatch_tokens"]
    if smaller is None:  # the rank has printed a hint
        outcome = _blamed(next(rank for rank in watch.ranks if rank.rank == oom_event["rank"]), watch, step)
        return replace(outcome, code=ExitCode.USAGE, reason=describe(oom_event), cause="oom")
    hint = f"the next attempt starts by itself with microbatches of {smaller:,} tokens"
    return Outcome(ExitCode.RETRY, describe(oom_event), hint=hint, cause="oom", next_microbatch_tokens=smaller)


def _saved_step(folder: RunFolder) -> int | None:
    """Return the step of the newest checkpoint that this attempt saved."""
    saves = [event for event in folder.events() if event["event"] == "checkpoint_saved"]
    return next((int(event["step"]) for event in reversed(saves) if event["attempt"] == folder.attempt), None)


def last_step(folder: RunFolder) -> int:
    """Return the last step that was logged; 0 before the first."""
    return max((int(line["step"]) for line in folder.metrics()), default=0)
