"""Profiles a window of steps: operators, memory and collectives of this rank, in the run's folder ``profile/``.

Steps outside the window have no overhead. Inside, PyTorch's profiler and the log of collectives slow them down, so the
seconds compare parts of a step, not steps. On a CPU the time of an operator excludes operators that it calls; on a GPU
it is that of its kernels. A file that cannot be written is named in a warning.
"""

import json
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from smalti.base import clock, log
from smalti.base.disk import reason
from smalti.base.errors import RetryableError, UserError
from smalti.config.profile import ProfileConfig
from smalti.config.run import RunConfig
from smalti.cost.layout.collectives import collectives
from smalti.distributed.trace.traffic import Call, totals
from smalti.distributed.trace.traffic import Traffic as TrafficLog
from smalti.track.profiles import (
    COUNTING,
    HOST,
    NETWORK,
    Interval,
    Operator,
    Part,
    Summary,
    Traffic,
    folder_of,
    split,
    write,
)
from smalti.train.hooks import Hook
from smalti.train.loop import Job
from smalti.train.step import StepResult

_KINDS = (
    ("collectives", ("c10d::", "_c10d_functional::", "gloo:", "nccl", "record_param_comms")),
    ("attention", ("attention", "_overspans", "flash", "fmha", "flex")),
    ("matrix products", ("mm", "matmul", "linear", "gemm", "cutlass", "cublas")),
    ("optimizer", ("adam", "lerp", "lion", "foreach")),
    ("copies and casts", ("copy", "cat", "to_copy", "memcpy", "memset", "fill", "zero_", "contiguous", "clone")),
    ("norms", ("norm",)),
    ("loss", ("crossentropy", "log_softmax", "logsumexp")),
    (COUNTING, ("pythondispatchmode", "pythonsubclass")),
)
"""Kind of work -> parts of operators' and kernels' names, in lower case; the first match counts."""
_OTHERS, _SLOWEST = "other kernels", 15
_OPTIMIZER_RANGE = "Optimizer.step#"
"""torch gives the step of every optimizer a range of this name, so its work needs no names of kernels."""


def of_config(config: ProfileConfig, world_size: int) -> "list[Hook]":
    """Return the hook of a rank that writes a profile, none for others. Raises UserError for a rank that is missing."""
    absent = [] if config.ranks == "all" else [rank for rank in config.ranks if rank >= world_size]
    if absent:
        raise UserError(
            f"profile.ranks names rank {absent[0]} of {world_size}",
            allowed=f"0 to {world_size - 1}, or all",
            hint="profile.ranks=all",
        )
    return [Profile(config)] if config.of_rank(dist.get_rank()) else []


class Profile(Hook):
    """Profiles the steps of the window; after a resume inside it, only the remaining steps."""

    def __init__(self, config: ProfileConfig) -> None:
        assert config.steps is not None
        self._first, self._last = config.steps
        self._profiler: Any = None
        self._traffic: TrafficLog | None = None
        self._begun = 0.0
        self._on_gpu = False

    def on_start(self, job: Job) -> None:
        """Begin if the first step of the attempt is in the window."""
        self._begin_if_due(job)

    def on_step(self, job: Job, result: StepResult) -> None:
        """Begin before the first step of the window, end after its last."""
        if self._profiler is not None and job.state.step >= min(self._last, job.total_steps):
            self._end(job)
        self._begin_if_due(job)

    def on_stop(self, job: Job) -> None:
        """Write the profile of a window that is interrupted by a stop."""
        if self._profiler is not None:
            self._end(job)

    def _begin_if_due(self, job: Job) -> None:
        if self._profiler is not None or not self._first <= job.state.step + 1 <= self._last:
            return
        self._first = job.state.step + 1
        self._on_gpu = next(job.state.model.parameters()).device.type == "cuda"
        activities = [ProfilerActivity.CPU]
        if self._on_gpu:
            activities.append(ProfilerActivity.CUDA)
            torch.cuda.reset_peak_memory_stats()
            torch.cuda.memory._record_memory_history(max_entries=200_000)
        self._profiler = profile(activities=activities, record_shapes=True)
        self._profiler.start()
        self._traffic = TrafficLog(job.mesh, timed=True)
        self._traffic.__enter__()
        self._begun = clock.now_s()

    def _end(self, job: Job) -> None:
        assert self._traffic is not None
        if self._on_gpu:
            torch.cuda.synchronize()
        window_s = clock.now_s() - self._begun
        self._traffic.__exit__(None, None, None)
        self._profiler.stop()
        rank = dist.get_rank()
        profiler = self._profiler
        calls = self._traffic.calls
        folder = folder_of(job.folder.path, self._first, job.state.step, rank)
        traffic = _by_axis(calls, planned_traffic(job), job.state.step - self._first + 1)
        summary = _summary(profiler, calls, self._begun, window_s, traffic, on_gpu=self._on_gpu)
        summary = replace(summary, first_step=self._first, last_step=job.state.step, rank=rank)
        files: dict[str, Callable[[Path], None]] = {
            "summary.json": lambda _: write(folder, summary),
            "collectives.jsonl": lambda path: _write_calls(path, calls, self._begun),
            "trace.json.gz": lambda path: profiler.export_chrome_trace(str(path)),
        }
        if self._on_gpu:
            files["memory.pickle"] = lambda path: torch.cuda.memory._dump_snapshot(str(path))
        missing = _write_all(folder, files)
        if self._on_gpu:
            torch.cuda.memory._record_memory_history(enabled=None)
        self._profiler = self._traffic = None
        self._first = self._last + 1
        _report(job, summary, folder, missing)


def _write_all(folder: Path, files: dict[str, Callable[[Path], None]]) -> dict[str, str]:
    """Write the files; returns the reason for each that could not be written, whose partial file is removed."""
    missing = {}
    for name, make in files.items():
        try:
            folder.mkdir(parents=True, exist_ok=True)
            make(folder / name)
        except OSError as error:
            missing[name] = reason(error, folder / name)
            with suppress(OSError):
                (folder / name).unlink(missing_ok=True)
    return missing


def _report(job: Job, summary: Summary, folder: Path, missing: dict[str, str]) -> None:
    named = summary.bottleneck
    steps = f"profile of steps {summary.first_step} to {summary.last_step}"
    log.get("train").info(
        "%s: %s took %.0f %%, without it %.2f times as fast; %s",
        *(steps, named.name, 100 * named.s / summary.window_s, summary.gain(named), folder),
    )
    lacks = ", ".join(f"{name} ({why})" for name, why in missing.items())
    if missing:
        log.get("train").warning("%s in %s lacks %s; training continues", steps, folder, lacks)
    with suppress(RetryableError):
        job.events.write(
            "profile_saved", step=summary.last_step, path=str(folder), bottleneck=named.name, missing=[*missing]
        )


def planned_traffic(job: Job) -> dict[tuple[str, str], tuple[int, int]]:
    """Return the planned calls and bytes of one step by (op, axis); empty for a model that no config describes."""
    if not isinstance(job.config, RunConfig):
        return {}
    config = job.config
    planned: dict[tuple[str, str], tuple[int, int]] = {}
    parallel = config.train.parallel
    for collective in collectives(
        config, job.mesh.layout, job.microbatch_tokens, dispatch=parallel.dispatch, context=parallel.context,
        device=next(job.state.model.parameters()).device.type,
    ):  # fmt: skip
        key = (collective.op, collective.axis)
        calls, nbytes = planned.get(key, (0, 0))
        planned[key] = calls + collective.count, nbytes + collective.total_bytes
    return planned


def _summary(
    profiler: Any, calls: list[Call], begun_s: float, window_s: float, traffic: tuple[Traffic, ...], *, on_gpu: bool
) -> Summary:
    """Return the summary of the window; the caller fills in its steps and rank."""
    events = list(profiler.events())
    zero_s = min((event.time_range.start for event in events), default=0.0) / 1e6
    events = [event for event in events if (event.device_type == DeviceType.CUDA) == on_gpu]
    updates = [event.time_range for event in events if event.name.startswith(_OPTIMIZER_RANGE)]
    by_name: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    by_kind: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    busy, network = list[Interval](), list[Interval]()
    for event in events:
        time = event.time_range
        span = (time.start / 1e6 - zero_s, time.end / 1e6 - zero_s)
        if kind_of(event.name) == "collectives":
            network.append(span)
            continue
        if event.is_user_annotation:  # a label around other operators and waits, as FSDP sets them
            continue
        in_update = any(update.start <= time.start and time.end <= update.end for update in updates)
        for total in (by_name[event.name], by_kind["optimizer" if in_update else kind_of(event.name)]):
            # torch gives a negative time where children on another thread outlast the operator
            total[0] += span[1] - span[0] if on_gpu else max(0.0, event.self_cpu_time_total / 1e6)
            total[1] += 1
        busy.append(span)
    network += [(call.start_s - begun_s, call.end_s - begun_s)
                for call in calls if call.start_s is not None and call.end_s is not None]  # fmt: skip
    network_s, host_s = split((0.0, window_s), busy, network)
    slowest = sorted(by_name.items(), key=lambda item: -item[1][0])[:_SLOWEST]
    return Summary(
        first_step=0, last_step=0, rank=0, device="cuda" if on_gpu else "cpu", window_s=window_s,
        parts=_parts(by_kind, window_s, network_s, host_s),
        operators=tuple(Operator(name, seconds, int(count)) for name, (seconds, count) in slowest),
        traffic=traffic,
        peak_bytes=torch.cuda.max_memory_allocated() if on_gpu else None,
    )  # fmt: skip


def _parts(by_kind: dict[str, list[float]], window_s: float, network_s: float, host_s: float) -> tuple[Part, ...]:
    """Return the parts of the window, largest first: work by kind, network, host.

    Work is scaled to the time in which anything ran, because streams and threads overlap.
    """
    done_s = sum(seconds for seconds, _ in by_kind.values())
    scale = max(0.0, window_s - network_s - host_s) / done_s if done_s else 0.0
    parts = [Part(kind, seconds * scale, int(calls)) for kind, (seconds, calls) in by_kind.items()]
    parts += [Part(NETWORK, network_s, 0), Part(HOST, host_s, 0)]
    return tuple(sorted((part for part in parts if part.s > 0), key=lambda part: -part.s))


def kind_of(name: str) -> str:
    """Return the kind of work of an operator or kernel, by its name."""
    low = name.lower()
    return next((kind for kind, parts in _KINDS if any(part in low for part in parts)), _OTHERS)


def _by_axis(calls: list[Call], planned: dict[tuple[str, str], tuple[int, int]], steps: int) -> tuple[Traffic, ...]:
    """Return counted and planned traffic, by op and axis."""
    counted: dict[tuple[str, str], list[int]] = defaultdict(lambda: [0, 0])
    for total in totals(calls):
        counted[total.op, total.axis][0] += total.count
        counted[total.op, total.axis][1] += total.count * total.bytes
    seconds: dict[tuple[str, str], float] = defaultdict(float)
    untimed = set[tuple[str, str]]()
    for call in calls:
        kind = ("send_recv" if call.op in ("send", "recv") else call.op, call.axis)
        if call.start_s is None or call.end_s is None:
            untimed.add(kind)
        else:
            seconds[kind] += call.end_s - call.start_s
    rows = []
    for kind in sorted(counted.keys() | planned.keys()):
        count, nbytes = counted[kind]
        plan_count, plan_bytes = planned.get(kind, (None, None))
        took_s = None if kind in untimed or not count else seconds[kind]
        rows.append(Traffic(*kind, count, nbytes, took_s, _times(plan_count, steps), _times(plan_bytes, steps)))
    return tuple(rows)


def _times(value: int | None, steps: int) -> int | None:
    return None if value is None else value * steps


def _write_calls(path: Path, calls: list[Call], begun_s: float) -> None:
    """Write a line for each call: op, axis, bytes, and seconds since the start of the window."""
    with path.open("w") as file:
        for call in calls:
            times = {name: None if at_s is None else round(at_s - begun_s, 7)
                     for name, at_s in (("start_s", call.start_s), ("end_s", call.end_s))}  # fmt: skip
            file.write(json.dumps({"op": call.op, "axis": call.axis, "bytes": call.bytes, **times}) + "\n")
