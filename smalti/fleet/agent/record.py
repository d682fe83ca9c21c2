"""Records a fault and the end of an attempt in the run folder: its events and its status."""

import signal

from smalti.base import clock
from smalti.base.errors import ExitCode, RetryableError
from smalti.base.log import get
from smalti.fleet.agent.judge import last_step
from smalti.fleet.agent.outcome import Outcome
from smalti.fleet.agent.watch import Watch
from smalti.fleet.launch.local import LOST_PEER, Rank
from smalti.track.events import EventLog
from smalti.track.run import RunFolder


def record_fault(watch: Watch, events: EventLog, folder: RunFolder) -> None:
    """Record which rank or node was at fault, if one was, before anything else is done about it."""
    try:
        write_fault(watch, events, last_step(folder))
    except RetryableError as error:
        get("fleet").warning("the fault is not recorded: %s", error.message)


def record(outcome: Outcome, watch: Watch, events: EventLog, folder: RunFolder, seconds: float) -> None:
    """Record how the attempt ended; where the disk cannot be written, the outcome is returned all the same."""
    stopped = watch.stopped_by is not None and watch.cause() is None
    states = {ExitCode.DONE: "done", ExitCode.INTERRUPTED: "interrupted"}
    state = states.get(ExitCode(outcome.code), "stopped" if stopped else "failed")
    try:
        write_end(outcome, watch, events, last_step(folder), seconds)
        folder.set_status(state, step=last_step(folder), reason=outcome.reason)
    except RetryableError as error:
        get("fleet").warning("the end of the attempt (%s) is not recorded: %s", outcome.reason, error.message)
    finally:
        events.close()


def write_fault(watch: Watch, events: EventLog, step: int) -> None:
    cause, hang = watch.cause(), watch.hang
    ending = {} if watch.decided_s is None else {"ending_s": round(clock.now_s() - watch.decided_s, 3)}
    lost = cause is not None and cause.code == LOST_PEER
    if cause is not None and cause.code is not None and not lost and watch.lost is None:
        how = {"signal": signal.Signals(-cause.code).name} if cause.code < 0 else {"code": cause.code}
        slot = watch.slots.get(cause.rank)
        events.write("rank_died", rank=cause.rank, pid=cause.pid, step=step, **how, **_node(cause),
                     phase=None if slot is None else slot.phase.name.lower(),
                     detected_s=round(watch.detected_s[cause.rank], 3), **ending)  # fmt: skip
    if watch.lost is not None:
        ranks = [rank.rank for rank in watch.ranks if rank.node == watch.lost.name]
        events.write("node_lost", node=watch.lost.name, ranks=ranks, step=step, why=watch.lost.why,
                     detected_s=round(watch.lost.silent_s, 3), **ending)  # fmt: skip
    elif hang is not None:
        guilty = next((rank for rank in watch.ranks if rank.rank == hang.rank), None)
        events.write("rank_hung", rank=hang.rank, pid=guilty and guilty.pid, step=hang.step,
                     phase=hang.phase.name.lower(), detected_s=round(hang.still_s, 3), why=hang.why,
                     evidence=watch.evidence, **({} if guilty is None else _node(guilty)), **ending)  # fmt: skip
    elif watch.any_stopped or lost:
        for rank in watch.left:
            events.write("rank_unresponsive", rank=rank.rank, pid=rank.pid, step=step, stopped=watch.any_stopped,
                         **_node(rank), **ending)  # fmt: skip


def write_end(outcome: Outcome, watch: Watch, events: EventLog, step: int, seconds: float) -> None:
    codes = [int(ExitCode.RETRY) if rank.code == LOST_PEER else rank.code for rank in watch.ranks]
    why = {} if outcome.cause is None else {"cause": outcome.cause}
    events.write("attempt_ended", code=int(outcome.code), reason=outcome.reason, step=step, seconds=round(seconds, 3),
                 codes=codes, **why)  # fmt: skip


def _node(rank: Rank) -> dict[str, str]:
    """Return the node of a rank of another machine."""
    return {} if rank.node is None else {"node": rank.node}
