"""A hook of rank 0 that looks for slow ranks (``track/stragglers.py``) in the slots of all ranks, without a collective.

The slots of other nodes are read from the run folder, which the nodes share. Of a pipeline each stage is compared by
itself, because stages differ in their work. A rank is reported that was slow in most of the last windows, once until
it was slow in none of them.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import asdict

from smalti.base import clock, log
from smalti.base.env import World
from smalti.track.progress import Progress, read_slots
from smalti.track.stragglers import LEAST_FACTOR, LEAST_RANKS, Straggler, Work, by_node, slow_ranks, words, work_between
from smalti.train.batches import TokenBatches
from smalti.train.hooks import Hook
from smalti.train.loop import Job
from smalti.train.step import StepResult

_WINDOW_STEPS = 20
_WINDOW_S = 10.0
"""A window has at least so many steps and takes at least so long."""
_WINDOWS, _SLOW_WINDOWS = 4, 3
"""A rank is reported that was slow in so many of the last windows."""


def compare_ranks(world: World) -> Sequence[Hook]:
    """Return the hook; none where there are too few ranks to compare, and on other ranks than the first."""
    return [Stragglers()] if world.is_first and world.world_size >= LEAST_RANKS else []


class Stragglers(Hook):
    """Compares the ranks window by window."""

    def __init__(self) -> None:
        self._slots: list[Progress] = []
        self._step, self._since_s = 0, float("-inf")
        self._windows: deque[set[int]] = deque(maxlen=_WINDOWS)
        """The slow ranks of the last windows."""
        self._reported: set[int] = set()

    def on_start(self, job: Job) -> None:
        """Begin with the step of this attempt."""
        self._step = job.state.step

    def on_step(self, job: Job, result: StepResult) -> None:
        """Compare the ranks at the end of a window."""
        now_s, step = clock.now_s(), job.state.step
        if step - self._step < _WINDOW_STEPS or now_s - self._since_s < _WINDOW_S:
            return
        files = sorted(job.folder.log_folder().glob("progress-*.bin"))
        slots = [slot for file in files for slot in read_slots(file)]
        work = work_between(self._slots, slots)
        self._slots, self._step, self._since_s = slots, step, now_s
        stages = _stages(work, len(job.hosts) // job.mesh.layout.pipeline)
        slow = [slow_ranks(stage, LEAST_FACTOR * _most_share(job)) for stage in stages]
        self._windows.append({rank for of_stage in slow for rank in of_stage})
        self._reported &= set().union(*self._windows)
        for of_stage, stage in zip(slow, stages, strict=True):
            new = {rank: factor for rank, factor in of_stage.items() if self._is_new(rank)}
            self._reported |= new.keys()
            for straggler in by_node(new, stage, job.hosts):
                self._report(job, straggler)

    def _is_new(self, rank: int) -> bool:
        return rank not in self._reported and sum(rank in window for window in self._windows) >= _SLOW_WINDOWS

    def _report(self, job: Job, straggler: Straggler) -> None:
        fields = {"step": job.state.step, **asdict(straggler), "phase": straggler.phase.name.lower()}
        fields = {name: round(value, 6) if isinstance(value, float) else value for name, value in fields.items()}
        job.events.write("straggler", **fields)
        log.get("train").warning("%s", words(fields))


def _stages(work: dict[int, Work], ranks_of_stage: int) -> list[dict[int, Work]]:
    """Return the work of the ranks of each pipeline stage; the pipeline is the outermost axis."""
    stages: dict[int, dict[int, Work]] = {}
    for rank, of_rank in work.items():
        stages.setdefault(rank // ranks_of_stage, {})[rank] = of_rank
    return list(stages.values())


def _most_share(job: Job) -> float:
    """Return the rows of the rank with most in this step / those of the rank with least: these may differ by one."""
    if not isinstance(job.batches, TokenBatches):
        return 1.0
    step, ranks = job.state.step - 1, job.mesh.layout.data_ranks
    rows = job.length.batch_tokens(step) // job.batches.seq_len(step)
    return -(-rows // ranks) / max(1, rows // ranks)
