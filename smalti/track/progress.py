"""Progress slots: a rank writes what it does to memory that other processes of its node can read at any time.

The file of a node has a slot for each of its ranks. Writing is a copy to mapped memory: no system call, collective or
thread. A slot stays readable when its rank is stopped, holds the GIL or was killed. No thread writes it, so a slot that
changes means that the main thread has made progress.

Times of a phase are of CLOCK_MONOTONIC, which all processes of a node share.
"""

import mmap
import os
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

from smalti.base import log
from smalti.base.env import World

SLOT_BYTES = 256
_TRIES = 1000
_HEAD = struct.Struct("<Q")
"""A counter that is odd while the slot is written."""
_BODY = struct.Struct("<IIIIQQQqqqq16qQQqqq")


class Phase(IntEnum):
    """What a rank does. Numbers are part of the file's format: append only, at most 16."""

    INIT = 0
    """From the start of the process to the first batch: imports, rendezvous, building the model, loading."""
    DATA = 1
    """Waiting for the next batch."""
    FORWARD = 2
    BACKWARD = 3
    OPTIMIZER = 4
    """Reduction, clipping and update."""
    COMPILE = 5
    """The first step of an attempt that compiles its model."""
    CHECKPOINT = 6
    """Training is blocked by a save."""
    EVAL = 7
    OTHER = 8
    """Logging, hooks and votes between steps."""
    END = 9
    """After the last step: the last hooks, and leaving the process group."""


TRAINING = (Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER)
"""The phases of a step."""
WORK = (Phase.DATA, *TRAINING)
"""The phases whose own work is recorded."""
STEP = (*WORK, Phase.OTHER)
"""The phases that are repeated when a step is lost."""


@dataclass(frozen=True)
class Progress:
    """A slot that was read."""

    rank: int
    pid: int
    phase: Phase
    step: int
    """Finished steps of the run."""
    phase_count: int
    """Phases entered so far; of two ranks in the same loop the one with the lower number is behind."""
    collectives: int
    """Collectives that the rank had started when it entered the phase."""
    began_ns: int
    """CLOCK_MONOTONIC at the start of the phase."""
    opened_ns: int
    """CLOCK_MONOTONIC at the start of the process's slot."""
    opened_wall_ns: int
    """Time of day then, in ns since 1970."""
    work_ns: tuple[int, ...]
    """The rank's own work in each of ``WORK``, without waiting for other ranks: processor time of the main thread, and
    in ``DATA`` the time until its own batch was there. On a GPU: the work of starting kernels, not theirs."""
    spent_ns: tuple[int, ...]
    """Time in each finished phase so far, by ``Phase``."""
    lacks_batch: bool = False
    """In phase ``DATA``: this rank itself does not have its next batch."""
    beats: int = 0
    """Signs of life within phases that may be long."""
    row_tokens: int = 0
    """Tokens in a row of the step's batch; 0: not known."""

    def in_phase_s(self, now_ns: int) -> float:
        """Return the seconds in the present phase at ``now_ns`` of CLOCK_MONOTONIC."""
        return max(0, now_ns - self.began_ns) / 1e9

    def work_s(self, phase: Phase) -> float:
        """Return the seconds of own work in the phases of that kind, one of ``WORK``."""
        return self.work_ns[WORK.index(phase)] / 1e9

    def spent_s(self, phase: Phase) -> float:
        """Return the seconds in the finished phases of that kind."""
        return self.spent_ns[phase] / 1e9


def slot_file(log_folder: Path, node: int) -> Path:
    """Return the file of a node's slots in the log folder of an attempt."""
    return log_folder / f"progress-{node:03d}.bin"


class ProgressWriter:
    """Writes the slot of one rank, in phase ``INIT`` at first."""

    def __init__(self, path: Path, *, local_rank: int, local_ranks: int, rank: int) -> None:
        """Map the slot; the file is created where it is absent. Raises OSError where it cannot be written."""
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            # not a sparse file: writing to mapped memory without space on the disk kills the process
            os.posix_fallocate(descriptor, 0, local_ranks * SLOT_BYTES)
            self._map = mmap.mmap(descriptor, local_ranks * SLOT_BYTES)
        finally:
            os.close(descriptor)
        self._offset = local_rank * SLOT_BYTES
        self._rank, self._pid = rank, os.getpid()
        self._sequence = 0
        self.phase = Phase.INIT
        self.collectives: Callable[[], int] = lambda: 0
        """Returns the number of collectives that this rank has started."""
        self._step, self._count, self._held = 0, 0, False
        self._lacks_batch, self._beats = False, 0
        self._row_tokens = 0
        self._opened_ns, self._opened_wall_ns = time.monotonic_ns(), time.time_ns()
        self._began_ns, self._work_began_ns = self._opened_ns, 0
        self._work_ns = dict.fromkeys(WORK, 0)
        self._spent_ns = [0] * 16
        self._write(0)

    def enter(self, phase: Phase, *, step: int | None = None, row_tokens: int | None = None) -> None:
        """Begin a phase; the time since the last call is added to the phase that ends. Inside ``within`` it is only
        a sign of life.

        step: finished steps. row_tokens: tokens in a row of the step's batch. None: as before.
        """
        if self._held:
            self.beat()
            return
        now_ns = time.monotonic_ns()
        self._spent_ns[self.phase] += now_ns - self._began_ns
        work_ns = time.thread_time_ns()
        if self.phase in TRAINING:
            self._work_ns[self.phase] += work_ns - self._work_began_ns
        self._work_began_ns = work_ns
        self.phase, self._began_ns = phase, now_ns
        self._lacks_batch = False
        self._count += 1
        if step is not None:
            self._step = step
        if row_tokens is not None:
            self._row_tokens = row_tokens
        self._write(self.collectives())

    def trained_s(self) -> float | None:
        """Return the seconds of finished phases of steps so far, with waits for data; None: not recorded."""
        return sum(self._spent_ns[phase] for phase in STEP) / 1e9

    def wait_for_batch(self, lacks: bool, waited_s: float = 0.0) -> None:
        """Record whether this rank itself lacks its next batch, until the next phase, and how long it waited for it."""
        self._work_ns[Phase.DATA] += round(waited_s * 1e9)
        if lacks != self._lacks_batch:
            self._lacks_batch = lacks
            self._write(self.collectives())

    def beat(self) -> None:
        """Report that the main thread makes progress within its phase."""
        self._beats += 1
        self._write(self.collectives())

    @contextmanager
    def within(self, phase: Phase) -> Iterator[None]:
        """Context manager: this phase and no other inside, the one before afterwards; after an error it remains."""
        before = self.phase
        self.enter(phase)
        was_held, self._held = self._held, True
        try:
            yield
        finally:
            self._held = was_held
        self.enter(before)

    def close(self) -> None:
        """Release the mapping; the slot keeps its last phase."""
        self._map.close()

    def _write(self, collectives: int) -> None:
        body = self._offset + _HEAD.size
        _HEAD.pack_into(self._map, self._offset, self._sequence + 1)
        data, forward, backward, optimizer = self._work_ns.values()
        _BODY.pack_into(
            self._map, body, self._rank, self._pid, self.phase, self._lacks_batch, self._step, self._count, collectives,
            self._began_ns, self._opened_ns, self._opened_wall_ns, forward, *self._spent_ns, self._beats,
            self._row_tokens, data, backward, optimizer,
        )  # fmt: skip
        self._sequence += 2
        _HEAD.pack_into(self._map, self._offset, self._sequence)


def open_slot(log_folder: Path, world: World) -> "ProgressWriter | NoProgress":
    """Return the writer of this rank's slot; where the file cannot be written, one that writes nothing."""
    node = world.rank // world.local_world_size
    try:
        log_folder.mkdir(parents=True, exist_ok=True)
        return ProgressWriter(
            slot_file(log_folder, node),
            local_rank=world.local_rank,
            local_ranks=world.local_world_size,
            rank=world.rank,
        )
    except OSError as error:
        log.get("track").warning("the progress of rank %d is not recorded: %s", world.rank, error)
        return NoProgress()


class NoProgress:
    """Keeps the phase only: for training without a run folder."""

    def __init__(self) -> None:
        self.phase = Phase.INIT
        self.collectives: Callable[[], int] = lambda: 0

    def enter(self, phase: Phase, *, step: int | None = None, row_tokens: int | None = None) -> None:
        """Keep the phase."""
        self.phase = phase

    def wait_for_batch(self, lacks: bool, waited_s: float = 0.0) -> None:
        """Do nothing."""

    def beat(self) -> None:
        """Do nothing."""

    def trained_s(self) -> float | None:
        """Return None: no time is kept."""
        return None

    @contextmanager
    def within(self, phase: Phase) -> Iterator[None]:
        """Context manager without effect."""
        yield

    def close(self) -> None:
        """Do nothing."""


def unopened(rank: int, pid: int) -> Progress:
    """Return what is known of a rank that has not opened its slot: it is behind every other."""
    return Progress(rank, pid, Phase.INIT, 0, -1, 0, 0, 0, 0, (0,) * len(WORK), (0,) * 16)


def read_slots(path: Path) -> list[Progress]:
    """Return the slots of a node's file that a rank has opened, by local rank; [] where there is no file."""
    try:
        size = path.stat().st_size
        if not size:
            return []
        with path.open("rb") as file, mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ) as mapped:
            return slots_in(mapped)
    except FileNotFoundError:
        return []


def slots_in(mapped: mmap.mmap | bytes) -> list[Progress]:
    """Return the slots that a rank has opened, of the file of a node or a copy of its bytes."""
    slots = (_read(mapped, offset) for offset in range(0, len(mapped) - SLOT_BYTES + 1, SLOT_BYTES))
    return [slot for slot in slots if slot is not None]


def _read(mapped: mmap.mmap | bytes, offset: int) -> Progress | None:
    """Return a slot; None where none was opened, or where its rank was killed while it wrote the first time."""
    values: tuple[int, ...] = ()
    for _ in range(_TRIES):
        before = _HEAD.unpack_from(mapped, offset)[0]
        values = _BODY.unpack_from(mapped, offset + _HEAD.size)
        if before % 2 == 0 and before == _HEAD.unpack_from(mapped, offset)[0]:
            break
    # A slot that stays odd is of a rank that was killed or stopped while it wrote; what it holds is still about right.
    rank, pid, phase, lacks_batch, step, count, collectives, began, opened, wall, forward, *rest = values
    *spent, beats, row_tokens, data, backward, optimizer = rest
    if opened == 0:
        return None
    work = (data, forward, backward, optimizer)
    return Progress(rank, pid, Phase(phase), step, count, collectives, began, opened, wall, work, tuple(spent),
                    bool(lacks_batch), beats, row_tokens)  # fmt: skip
