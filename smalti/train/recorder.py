"""The recorder of a run: computes metrics from step results and writes them to sinks and trackers.

It reads the device only when a line is due, and raises NotFinite on a loss or gradient norm that is not finite.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Protocol, Self

import torch
from torch import Tensor

from smalti.base import clock
from smalti.base.env import World
from smalti.base.errors import CheckFailed, Interrupted, RetryableError
from smalti.config.durations import RunLength
from smalti.config.run import JobConfig, RunConfig
from smalti.cost.flops import mfu, train_flops_per_token
from smalti.track import trackers
from smalti.track.run import RunFolder
from smalti.track.sinks.console import ConsoleSink
from smalti.track.sinks.feed import Feed
from smalti.track.system import System
from smalti.train.expert_load import CollapseWatch, expert_loads, expert_metrics, loads_due
from smalti.train.step import StepResult, TrainState

_SECONDS_PER_HOUR = 3600.0


class Sink(Protocol):
    """Receiver of metrics."""

    def update(self, step: int, metrics: Mapping[str, float | list[float]]) -> None:
        """Take the metrics of one step."""

    def close(self) -> None:
        """Write what is left, and release files."""


class NotFinite(CheckFailed):
    """The loss or the gradient norm of a step is not finite: the update was skipped, and all after it."""

    def __init__(self, step: int, loss: float, grad_norm: float) -> None:
        self.step = step
        self.cause, self.value = ("gradient norm", grad_norm) if math.isfinite(loss) else ("loss", loss)
        super().__init__(
            f"the {self.cause} is {self.value} at step {step}; the model is still that of step {step - 1}",
            hint="lower train.optimizer.lr or lengthen train.schedule.warmup, with init_from=CHECKPOINT",
        )


class Recorder:
    """Keeps results on the device until ``flush``. Every rank has one; only rank 0's has sinks.

    Throughput is over the wall clock between two flushes, less the time outside steps (``add_non_step_time``), divided
    among steps of unequal batches by their tokens. As a context manager it closes the sinks and reports to the
    trackers how the attempt ended.
    """

    def __init__(
        self,
        sinks: list[Sink],
        *,
        length: RunLength,
        optimizer: str,
        tokens_before: float,
        train_s_before: float,
        val_s_before: float = 0.0,
        flops_per_token: Callable[[int], float] | None,
        peak_flops_per_s: float | None,
        world_size: int,
        feeds: Sequence[Feed] = (),
        system: System | None = None,
        seq_len: Callable[[int], int] | None = None,
        samples_before: int = 0,
        watch: CollapseWatch | None = None,
        counts_rows: bool = False,
    ) -> None:
        """Start the clock of the first window.

        ``feeds`` copy the output of the sinks to trackers; ``flush`` adds the readings of ``system`` to its last line.
        ``flops_per_token`` and ``seq_len`` map the number of an update, from 1, to its value. The learning rate is
        logged under ``optimizer``, the name of a class. ``counts_rows``: the tokens of a step are those of its rows,
        not the targets in the loss alone: prompts and padding are computed too.
        """
        self._sinks = sinks
        self._length = length
        self._optimizer = optimizer
        self._feeds = feeds
        self._system = system
        self._flops_per_token = flops_per_token
        self._peak = peak_flops_per_s
        self._world_size = world_size
        self._seq_len = seq_len
        self.samples = samples_before
        self.watch = watch
        self._counts_rows = counts_rows
        self.tokens = tokens_before
        self.train_s = train_s_before
        self.val_s = val_s_before
        self._waiting: list[tuple[int, float, StepResult]] = []
        self._window_s = clock.now_s()
        self._wait_s = self._non_step_s = 0.0
        self.latest: dict[str, float] = {}
        """The last value of each metric. Losses and rates are here on every rank, others only where measured."""

    def add(self, step: int, lr: float, result: StepResult, *, wait_s: float) -> None:
        """Take the result of update number ``step``; ``wait_s`` is the time spent waiting for its batch."""
        self._waiting.append((step, lr, result))
        self._wait_s += wait_s

    def add_non_step_time(self, seconds: float, *, is_eval: bool = False) -> None:
        """Add time since the last flush that was not spent on steps: a save, or with ``is_eval`` an evaluation."""
        self._non_step_s += seconds
        self.val_s += seconds if is_eval else 0.0

    def flush(self, extra: Mapping[str, float] | None = None) -> None:
        """Write all waiting steps; raises NotFinite on every rank at the first that is not finite."""
        rows = [(step, lr, result, float(result.loss), float(result.grad_norm)) for step, lr, result in self._waiting]
        now_s = clock.now_s()
        window_s = max(now_s - self._window_s - self._non_step_s, 1e-9)
        if rows:
            self.train_s += window_s
        window_tokens = sum(self._length.batch_tokens(row[0] - 1) for row in rows)
        wait_frac = min(self._wait_s / window_s, 1.0)
        self._waiting = []
        self._window_s = now_s
        self._wait_s = 0.0
        self._non_step_s = 0.0
        for step, lr, result, loss, grad_norm in rows:
            if not (math.isfinite(loss) and math.isfinite(grad_norm)):
                raise NotFinite(step, loss, grad_norm)
            self.tokens += self._tokens_of(step, result)
            metrics = self._step_metrics(step, lr, result, loss, grad_norm, planned_per_s=window_tokens / window_s)
            metrics["data/wait_frac"] = wait_frac
            if "moe/load" in result.metrics:
                metrics |= self._expert_metrics(step, result.metrics)
            if step == rows[-1][0]:
                metrics.update(extra or {})
                metrics.update(self._system.take() if self._system else {})
                metrics.update(_device_memory())
            self.write(step, metrics)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write metrics of ``step`` that are known already (held-out loss, saving)."""
        self.latest.update(metrics)
        for sink in self._sinks:
            sink.update(step, metrics)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._system is not None:
            self._system.close()
        for sink in self._sinks:  # a live line restores the terminal
            sink.close()
        trackers.close(self._feeds, _state(error))

    def _tokens_of(self, step: int, result: StepResult) -> float:
        """Return the tokens of update number ``step``: its targets, which are the weight of the loss, or its rows."""
        return self._length.batch_tokens(step - 1) if self._counts_rows else float(result.weight)

    def _step_metrics(
        self, step: int, lr: float, result: StepResult, loss: float, grad_norm: float, *, planned_per_s: float
    ) -> dict[str, float]:
        step_s = self._length.batch_tokens(step - 1) / planned_per_s
        tokens_per_s = self._tokens_of(step, result) / step_s
        tokens_left = self._length.total_tokens - self._length.tokens(step)
        hours = _SECONDS_PER_HOUR
        metrics = {
            "loss/train/total": loss,
            "l2_norm/grad/global": grad_norm,
            f"lr-{self._optimizer}/group0": lr,
            "time/batch": float(step),
            "time/token": self.tokens,
            "time/train": self.train_s / hours,
            "time/val": self.val_s / hours,
            "time/total": (self.train_s + self.val_s) / hours,
            "time/remaining_estimate": tokens_left / planned_per_s / hours * (1 + self.val_s / self.train_s),
            "time/step_s": step_s,
            **self._rates("batches_per_sec", 1 / step_s),
            **self._rates("tokens_per_sec", tokens_per_s),
        }
        metrics.update(_scalars(result.metrics))
        if self._seq_len is not None:
            samples = self._length.batch_tokens(step - 1) // self._seq_len(step)
            self.samples += samples
            metrics |= {"time/sample": float(self.samples), **self._rates("samples_per_sec", samples / step_s)}
        if self._flops_per_token is not None:
            flops_per_token = self._flops_per_token(step)
            metrics |= self._rates("flops_per_sec", tokens_per_s * flops_per_token)
            if self._peak is not None:
                metrics["throughput/device/mfu"] = mfu(tokens_per_s, flops_per_token, self._peak)
        return metrics

    def _expert_metrics(self, step: int, sums: Mapping[str, Tensor]) -> dict[str, float]:
        load_LE = sums["moe/load"].cpu()
        if loads_due(step, self._length.total_steps):
            for sink in self._sinks:  # a line of its own: the end of the file has the last values of the others
                sink.update(step, expert_loads(load_LE))
        if self.watch is not None:
            self.watch.add(step, load_LE)
        return expert_metrics(load_LE, sums["moe/router_entropy"].cpu())

    def _rates(self, name: str, per_s: float) -> dict[str, float]:
        """Return a rate of all ranks together, and per rank."""
        return {f"throughput/{name}": per_s, f"throughput/device/{name}": per_s / self._world_size}


# ---- the recorder of a job ------------------------------------------------------------------------------------------


def build_recorder(
    config: JobConfig,
    folder: RunFolder,
    world: World,
    events: Any,
    saved: Mapping[str, Any],
    *,
    state: TrainState,
    peak_flops_per_s: float | None,
) -> Recorder:
    """Build the recorder of a rank; rank 0's has the sinks and trackers of the config.

    saved: the ``train_state`` of the checkpoint that the attempt resumed from, empty without one.
    """
    return Recorder(
        _sinks(config, folder, state.step) if world.is_first else [],
        length=config.length,
        optimizer=type(state.optimizer).__name__,
        tokens_before=float(saved.get("tokens", 0)),
        train_s_before=float(saved.get("train_s", 0)),
        val_s_before=float(saved.get("val_s", 0)),
        **_by_seq_len(config, state.step),
        peak_flops_per_s=peak_flops_per_s,
        world_size=world.world_size,
        feeds=trackers.follow(config.track, folder.path, events) if world.is_first else [],
        system=_system(config, folder) if world.is_first else None,
        watch=_watch(config, events, saved, warns=world.is_first),
        counts_rows=isinstance(config, RunConfig) and config.tune is not None,
    )


def _sinks(config: JobConfig, folder: RunFolder, step: int) -> list[Sink]:
    sinks: list[Sink] = [folder.metrics_log(resumed_step=step if step else -1)]
    if config.track.console:
        sinks.append(ConsoleSink(config.length.total_steps, every_s=config.track.console_every_s))
    return sinks


def _system(config: JobConfig, folder: RunFolder) -> System | None:
    every_s = config.track.system_every_s
    return System(folder.path, every_s=every_s) if every_s else None


def _watch(config: JobConfig, events: Any, saved: Mapping[str, Any], *, warns: bool) -> CollapseWatch | None:
    if not isinstance(config, RunConfig) or config.model.moe is None:
        return None
    return CollapseWatch(config, events, warns=warns, collapsed=saved.get("collapsed_layers", ()))


def _by_seq_len(config: JobConfig, step: int) -> dict[str, Any]:
    """Return the arguments of ``Recorder`` that depend on the sequence length; ``step`` updates are done."""
    if not isinstance(config, RunConfig):
        return {"flops_per_token": None}
    parts = config.seq_len_parts
    frozen = config.adapter is not None
    flops = {seq_len: float(train_flops_per_token(config.model, seq_len, frozen=frozen)) for _, seq_len in parts}

    def seq_len_of(number: int) -> int:
        return next(seq_len for start, seq_len in reversed(parts) if start < number)

    return {
        "seq_len": seq_len_of,
        "flops_per_token": lambda number: flops[seq_len_of(number)],
        "samples_before": sum(tokens // seq_len for seq_len, tokens in config.tokens_by_seq_len(step).items()),
    }


# ---- metrics --------------------------------------------------------------------------------------------------------


def _device_memory() -> dict[str, float]:
    """Return memory of this rank's GPU in GB (Composer's unit). The allocator's counts need no synchronization."""
    if not torch.cuda.is_initialized():
        return {}
    stats = torch.cuda.memory_stats()
    return {
        "memory/peak_allocated_mem": stats["allocated_bytes.all.peak"] / 1e9,
        "memory/peak_reserved_mem": stats["reserved_bytes.all.peak"] / 1e9,
        "memory/current_active_mem": stats["active_bytes.all.current"] / 1e9,
    }


def _state(error: BaseException | None) -> str:
    """Return the state of a run that ended with ``error``."""
    if error is None:
        return "done"
    if isinstance(error, Interrupted):
        return "interrupted"
    return "stopped" if isinstance(error, RetryableError) else "failed"


def _scalars(sums: Mapping[str, Tensor]) -> dict[str, float]:
    """Return the metrics of the loss that are numbers."""
    metrics = {name: float(value) for name, value in sums.items() if value.ndim == 0}
    if (loss := metrics.get("loss/train/cross_entropy")) is not None:
        metrics["metrics/train/LanguageCrossEntropy"] = loss
        metrics["metrics/train/LanguagePerplexity"] = math.exp(min(loss, 700.0))  # exp(710) is no float
    return metrics
