"""Injects the faults of the section ``chaos`` of a run's config into this rank, at their step and phase.

Each is recorded as an event ``fault_injected`` before it happens, and one that is recorded does not happen again: an
attempt that repeats its step trains on. Without the section nothing here is called.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch.distributed as dist

from smalti.base import env
from smalti.base.errors import UserError
from smalti.config.chaos import FaultConfig
from smalti.config.chaos_needs import require_possible
from smalti.config.schema import NotAllowed
from smalti.distributed.checkpoint import shards
from smalti.distributed.checkpoint.saver import WRITE_TIMEOUT
from smalti.track.checkpoints.names import step_of
from smalti.track.events import EventLog
from smalti.track.progress import Phase, ProgressWriter
from smalti.train import faults
from smalti.train.batches import TokenBatches
from smalti.train.hooks import Hook
from smalti.train.loop import Job

_OF_STEP = (Phase.DATA, Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER)
"""Phases of step ``state.step + 1``; the others follow step ``state.step``."""


def install(job: Job) -> None:
    """Inject the faults of ``init`` and prepare the others; does nothing without ``chaos``. A collective.

    Raises UserError for a fault that cannot be injected here.
    """
    if job.config.chaos is None:
        return
    try:
        planned = job.config.chaos.planned(total_steps=job.length.total_steps, ranks=dist.get_world_size())
    except NotAllowed as error:  # another launcher has started other ranks than the config has
        raise UserError(str(error), allowed=error.allowed, hint=error.hint) from None
    world = env.world()
    one_machine = world.local_world_size == world.world_size
    require_possible(job.config, by_agent=env.attempt_is_open(), one_machine=one_machine)
    several = any(fault.kind == "deadlock" for fault in planned)
    group = dist.new_group(backend="gloo", timeout=WRITE_TIMEOUT) if several else None
    chaos = Chaos(job, [fault for fault in planned if fault.rank == dist.get_rank()], group)
    job.hooks = (*job.hooks, chaos)
    chaos.entered(Phase.INIT)


class Chaos(Hook):
    """The faults of this rank that have not happened yet."""

    def __init__(self, job: Job, planned: list[FaultConfig], group: dist.ProcessGroup | None) -> None:
        self._job, self._group = job, group
        self._events = EventLog(job.folder.path, job.folder.attempt or 0)
        done = [event for event in job.folder.events() if event["event"] == "fault_injected"]
        listed, labels = job.config.chaos.faults if job.config.chaos else (), {event.get("label") for event in done}
        drawn = {(event["fault"], event["step"]) for event in done}  # perhaps on another number of ranks
        self._left = [
            fault
            for fault in planned
            if fault.attempt in (None, job.folder.attempt)
            and (fault.label not in labels if fault in listed else (fault.kind, fault.step) not in drawn)
        ]
        self._slow: FaultConfig | None = None
        self._slow_until_s = 0.0
        self._forward_began_s = 0.0
        if not self._left:
            return
        job.state.progress = cast(ProgressWriter, _Watched(job.state.progress, self._slow_down, self.entered))
        self._wrap_batches({fault.step: fault for fault in self._left if fault.kind == "stuck_data"})

    def entered(self, phase: Phase) -> None:
        """Inject the faults that are due at the start of this phase."""
        for fault in [fault for fault in self._left if fault.kind != "corrupt_shard" and self._is_due(fault, phase)]:
            self._record(fault)
            if fault.kind == "slow_rank":
                self._slow, seconds = fault, faults.seconds_of(fault)
                self._slow_until_s = float("inf") if seconds is None else time.monotonic() + seconds
                self._forward_began_s = time.monotonic()
            elif fault.kind != "stuck_data":  # its reader waits already
                faults.inject(fault, self._job.folder.checkpoints, self._group)

    def on_checkpoint(self, job: Job, path: str) -> None:
        """Corrupt this rank's shard of a checkpoint, if that is due."""
        for fault in [fault for fault in self._left if fault.kind == "corrupt_shard"]:
            if fault.step is not None and step_of(path) >= fault.step:
                self._record(fault)
                _flip_bit(Path(path) / "shards" / shards.file_name(fault.rank))

    def close(self, job: Job) -> None:
        """Close the events."""
        self._events.close()

    def _is_due(self, fault: FaultConfig, phase: Phase) -> bool:
        if fault.at_phase != phase.name.lower():
            return False
        step = self._job.state.step
        if fault.step is None:
            return True
        return step + 1 == fault.step if phase in _OF_STEP else step >= fault.step

    def _record(self, fault: FaultConfig) -> None:
        self._left.remove(fault)
        place: dict[str, Any] = {"rank": fault.rank, "step": fault.step or self._job.state.step}
        self._events.write(
            "fault_injected",
            fault=fault.kind,
            label=fault.label,
            phase=fault.at_phase,
            mono_ns=time.monotonic_ns(),
            **place,
        )

    def _slow_down(self, phase: Phase) -> None:
        """Compute for nothing at the end of a forward pass of a slow rank: processor time, not sleep."""
        now_s = time.monotonic()
        if self._slow is None or now_s > self._slow_until_s:
            return
        if phase == Phase.FORWARD:
            self._forward_began_s = now_s
        elif phase == Phase.BACKWARD:
            end_s = now_s + (now_s - self._forward_began_s) * ((self._slow.slowdown or 2.0) - 1)
            while time.monotonic() < end_s:
                pass

    def _wrap_batches(self, stuck: dict[int | None, FaultConfig]) -> None:
        """Let the reader of the batches of these steps wait."""
        batches = self._job.batches
        name = "read" if isinstance(batches, TokenBatches) else "batch"
        if stuck:
            setattr(batches, name, _stuck_reader(getattr(batches, name), stuck))


class _Watched:
    """A slot that reports each phase before and after it was entered."""

    def __init__(self, slot: Any, enters: Callable[[Phase], None], entered: Callable[[Phase], None]) -> None:
        self._slot, self._enters, self._entered = slot, enters, entered

    def __getattr__(self, name: str) -> Any:
        return getattr(self._slot, name)

    def enter(self, phase: Phase, **changes: int | None) -> None:
        """Enter the phase."""
        self._enters(phase)
        self._slot.enter(phase, **changes)
        self._entered(phase)

    @contextmanager
    def within(self, phase: Phase) -> Iterator[None]:
        """Context manager: this phase and no other inside."""
        with self._slot.within(phase):
            self._entered(phase)
            yield


def _stuck_reader(read: Callable[[int], Any], stuck: dict[int | None, FaultConfig]) -> Callable[[int], Any]:
    def stuck_read(step: int) -> Any:
        if step + 1 in stuck:
            time.sleep(faults.seconds_of(stuck.pop(step + 1)) or 10 * 86_400)
        return read(step)

    return stuck_read


def _flip_bit(path: Path) -> None:
    """Change one bit in the middle of a file, without changing its length."""
    with open(path, "r+b") as file:
        file.seek(path.stat().st_size // 2)
        byte = file.read(1)
        file.seek(-1, 1)
        file.write(bytes([byte[0] ^ 1]))
