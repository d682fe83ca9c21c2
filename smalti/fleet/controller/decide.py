"""What a controller does next, as a pure function of the rows and of what it sees of the processes."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from smalti.base.errors import ExitCode
from smalti.fleet.queue.runs import Attempt, Run
from smalti.fleet.queue.schedule import Entry, Phase, Room, schedule
from smalti.fleet.queue.states import ACTIVE, WAITING, State, after, after_of_member

Sight = Literal["unclaimed", "running", "gone", "not_starting"]
"""What is seen of an open attempt: no process has claimed its nonce; the one that has runs; it was killed, and no
process of the attempt is left; those that were started for it end before they claim it."""

_NOT_STARTING = "its process does not start: see controller.log in the folder fleet of SMALTI_HOME"
_LOST = "the process that watched it was killed, so its exit code is not known"


@dataclass(frozen=True)
class Job:
    """An unfinished run with what a decision needs."""

    run: Run
    attempts: tuple[Attempt, ...]
    needs: tuple[State, ...] = ()
    """States of the runs that it depends on."""
    sight: Sight | None = None
    """Of its last attempt, if that is open and not yet recorded as ended."""
    ran_s: float = 0.0
    """How long all its attempts have run."""

    @property
    def last(self) -> Attempt | None:
        """Its last attempt."""
        return self.attempts[-1] if self.attempts else None

    @property
    def host(self) -> str:
        """The machine of its last attempt; where that has none, of a run of an earlier version, the queue's."""
        return (None if self.last is None else self.last.node) or self.run.host


@dataclass(frozen=True)
class Move:
    """A transition to make."""

    run: Run
    state: State
    cause: str | None = None
    attempt: int | None = None
    detail: str | None = None
    code: int | None = None
    """Exit code of the attempt that has ended."""
    ends: Attempt | None = None
    """An open attempt to record as ended: with ``code``, and ``detail`` as its reason."""
    gpus: tuple[int, ...] | None = None
    """GPUs of a new attempt; None: no attempt begins."""
    node: str | None = None
    """The machine of a new attempt."""
    wait_s: float = 0.0
    retried: Mapping[str, int] | None = None


def decide(jobs: Sequence[Job], room: Room, now_s: float, cordoned: Collection[str] = ()) -> list[Move]:
    """Return the moves of one round. Runs are scheduled in a round without other moves, which change the room.

    cordoned: machines that start no run.
    """
    runs = {job.run.number: job.run for job in jobs}
    moves = [move for job in jobs if (move := _own_move(job, runs.get(job.run.group))) is not None]
    return moves or _scheduled(jobs, room, now_s, cordoned)


def _own_move(job: Job, lead: Run | None) -> Move | None:
    """Return the move of a run that follows from itself and its processes, and of a member from its ``lead``, the run
    that it is a member of; None: that has ended."""
    run, last = job.run, job.last
    if lead is None and run.state in WAITING:
        return Move(run, "STOPPED", "lead", detail="the run has ended")
    if run.state == "PENDING":
        return _after_needs(job)
    if run.state not in ACTIVE:
        return None
    assert last is not None, f"{run.id} is {run.state} without an attempt"
    if last.ended_s is not None:
        if run.member_of is not None and last.code == ExitCode.DONE and lead is not None and lead.state in ACTIVE:
            return None  # the run is done, and about to end
        return _end(run, last, last.code, last.reason, lead)
    if job.sight == "gone":
        return _end(run, last, None, _LOST, lead, ends=last)
    if job.sight == "not_starting":
        return _end(run, last, ExitCode.BUG, _NOT_STARTING, lead, ends=last)
    if job.sight == "unclaimed" and run.state == "TERMINATING":
        return _end(run, last, ExitCode.TERMINATED, "stopped before it was started", lead, ends=last)
    if (lead is None or lead.state not in ACTIVE) and run.state != "TERMINATING":
        return Move(run, "TERMINATING", "lead", last.number, "the run has ended, or is started again")
    if job.sight == "running" and run.state == "STARTING":
        return Move(run, "RUNNING", attempt=last.number)
    if run.state == "RUNNING" and run.max_duration_s is not None and job.ran_s > run.max_duration_s:
        return Move(run, "TERMINATING", "max_duration", last.number, f"it ran longer than {run.max_duration_s:g} s")
    return None


def _after_needs(job: Job) -> Move | None:
    if any(state in ("FAILED", "STOPPED") for state in job.needs):
        return Move(job.run, "FAILED", "dependency", detail="a run that it depends on failed or was stopped")
    return Move(job.run, "QUEUED") if all(state == "COMPLETED" for state in job.needs) else None


def _end(
    run: Run, last: Attempt, code: int | None, reason: str | None, lead: Run | None, *, ends: Attempt | None = None
) -> Move:
    stopped_for = run.cause if run.state == "TERMINATING" else None
    if run.member_of is not None:
        following = after_of_member(code, stopped_for=stopped_for, has_lead=lead is not None)
    else:
        following = after(
            code,
            stopped_for=stopped_for,
            retries=run.retries,
            retries_by_cause=run.retries_by_cause,
            retried=run.retried,
        )
    retried = None
    if following.state == "RECOVERING":
        retried = {**run.retried, following.cause: run.retried.get(following.cause, 0) + 1}
    return Move(
        run,
        following.state,
        following.cause,
        last.number,
        reason,
        code=code,
        ends=ends,
        wait_s=following.wait_s,
        retried=retried,
    )


def _scheduled(jobs: Sequence[Job], room: Room, now_s: float, cordoned: Collection[str]) -> list[Move]:
    moves = [
        Move(job.run, "STARTING", attempt=len(job.attempts), gpus=())
        for job in jobs
        if job.run.engine == "slurm" and _is_due(job.run, now_s)  # another queue has its room
    ]
    local = [job for job in jobs if job.run.engine == "local"]
    moves += _placed(local, {job.run.host: room for job in local if job.run.host not in cordoned}, now_s)
    on_hosts = [job for job in jobs if job.run.hosts is not None]
    rooms: dict[str, Room] = {}
    for hosts in (job.run.hosts for job in on_hosts):
        assert hosts is not None
        rooms |= {name: Room(hosts.cores, hosts.gpus) for name in hosts.names if name not in cordoned}
    return moves + _placed(on_hosts, rooms, now_s)


def _placed(jobs: Sequence[Job], rooms: Mapping[str, Room], now_s: float) -> list[Move]:
    """Return the moves of runs that share these machines."""
    by_number = {job.run.number: job for job in jobs}
    entries = [_entry(job, phase, now_s) for job, phase in _phases(jobs, now_s)]
    planned = schedule(entries, rooms)
    held: dict[str, set[int]] = {}
    for job in jobs:
        if job.run.state in ACTIVE and job.last is not None:
            held.setdefault(job.host, set()).update(job.last.gpus)
    moves = []
    for number, host in planned.start.items():
        run, taken = by_number[number].run, held.setdefault(host, set())
        gpus = tuple(gpu for gpu in range(rooms[host].gpus) if gpu not in taken)[: run.gpus]
        if len(gpus) < run.gpus:  # its GPUs have other numbers than those of an earlier controller
            continue
        taken.update(gpus)
        moves.append(Move(run, "STARTING", attempt=len(by_number[number].attempts), gpus=gpus, node=host))
    for number in dict.fromkeys(by_number[number].run.group for number in planned.preempt):  # a run leaves all hosts
        job = by_number[number]
        assert job.last is not None
        moves.append(Move(job.run, "TERMINATING", "preempted", job.last.number))
    return moves


def _is_due(run: Run, now_s: float) -> bool:
    return run.state in ("QUEUED", "RECOVERING") and run.not_before_s <= now_s


def _phases(jobs: Sequence[Job], now_s: float) -> Iterator[tuple[Job, Phase]]:
    """Return the phase of each run that has or wants room. Members wait with the run that they belong to, which is
    started when those of its attempt before have ended."""
    runs = {job.run.number: job.run for job in jobs}
    busy = {job.run.member_of for job in jobs if job.run.state in ACTIVE}
    for job in jobs:
        run = job.run
        lead = runs.get(run.group)
        is_there = lead is not None and lead.state in ("STARTING", "RUNNING")
        if run.state in ACTIVE:
            yield job, "leaving" if run.state == "TERMINATING" or not is_there else "running"
        elif lead is None or run.state not in ("QUEUED", "RECOVERING"):
            continue
        elif _is_due(run, now_s) if is_there else _is_due(lead, now_s) and lead.number not in busy:
            yield job, "waiting"


def _entry(job: Job, phase: Phase, now_s: float) -> Entry:
    run = job.run
    started_s = job.last.started_s if job.last is not None else None
    return Entry(
        run.number, phase, Room(run.cores, run.gpus), run.priority, run.preemptible, started_s or now_s,
        host=job.host if job.last is not None else "",
        hosts=(run.host,) if run.hosts is None else run.hosts.names,
        cluster="" if run.hosts is None else run.cluster,
        member_of=run.member_of,
    )  # fmt: skip
