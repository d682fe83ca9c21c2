"""Metrics from step results: reads the device only when a line is due, and raises on a number that is not finite."""

import math
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Protocol, Self

import torch
from torch import Tensor

from smalti.base import clock
from smalti.base.errors import CheckFailed, Interrupted, RetryableError
from smalti.config.durations import RunLength
from smalti.cost.flops import mfu
from smalti.track import trackers
from smalti.track.sinks.feed import Feed
from smalti.track.system import System
from smalti.train.step import StepResult

_SECONDS_PER_HOUR = 3600.0


class Sink(Protocol):
    """Receiver of metrics."""

    def update(self, step: int, metrics: Mapping[str, float]) -> None:
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
    """Keeps results on the device until ``flush``; every rank runs one, only those with sinks write.

    Throughput is over the wall clock between two flushes, less what was spent outside steps (``outside``); steps of
    unequal batches share it by their tokens. As a context manager it closes the sinks and reports to the
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
    ) -> None:
        """``feeds`` copy to trackers what the sinks write; the readings of ``system`` go with the line at hand.
        ``flops_per_token`` and ``seq_len`` are those of an update, numbered from 1. The rate is logged under the name
        of the class ``optimizer``."""
        self._sinks, self._length, self._optimizer = sinks, length, optimizer
        self._feeds, self._system = feeds, system
        self._flops_per_token, self._peak, self._world_size = flops_per_token, peak_flops_per_s, world_size
        self._seq_len, self.samples = seq_len, samples_before
        self.tokens, self.train_s, self.val_s = tokens_before, train_s_before, val_s_before
        self._waiting: list[tuple[int, float, StepResult]] = []
        self._window_s = clock.now_s()
        self._wait_s = self._non_step_s = 0.0
        self.latest: dict[str, float] = {}
        """The last value of each metric; of the losses and rates on every rank, the rest where it was measured."""

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
        self._waiting, self._window_s, self._wait_s, self._non_step_s = [], now_s, 0.0, 0.0
        for step, lr, result, loss, grad_norm in rows:
            if not (math.isfinite(loss) and math.isfinite(grad_norm)):
                raise NotFinite(step, loss, grad_norm)
            self.tokens += float(result.weight)
            metrics = self._of_step(step, lr, result, loss, grad_norm, planned_per_s=window_tokens / window_s)
            metrics["data/wait_frac"] = wait_frac
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

    def _of_step(
        self, step: int, lr: float, result: StepResult, loss: float, grad_norm: float, *, planned_per_s: float
    ) -> dict[str, float]:
        step_s = self._length.batch_tokens(step - 1) / planned_per_s
        tokens_per_s = float(result.weight) / step_s
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

    def _rates(self, name: str, per_s: float) -> dict[str, float]:
        """Return a rate of all ranks together, and per rank."""
        return {f"throughput/{name}": per_s, f"throughput/device/{name}": per_s / self._world_size}


def _device_memory() -> dict[str, float]:
    """Return memory of this rank's GPU in GB (Composer's unit) from the allocator's counts, which wait for nothing."""
    if not torch.cuda.is_initialized():
        return {}
    stats = torch.cuda.memory_stats()
    return {
        "memory/peak_allocated_mem": stats["allocated_bytes.all.peak"] / 1e9,
        "memory/peak_reserved_mem": stats["reserved_bytes.all.peak"] / 1e9,
        "memory/current_active_mem": stats["active_bytes.all.current"] / 1e9,
    }


def _state(error: BaseException | None) -> str:
    """The state of a run that was left by ``error``."""
    if error is None:
        return "done"
    return (
        "interrupted"
        if isinstance(error, Interrupted)
        else "stopped"
        if isinstance(error, RetryableError)
        else "failed"
    )


def _scalars(sums: Mapping[str, Tensor]) -> dict[str, float]:
    """The loss's metrics as numbers, those of experts for each layer and for all."""
    metrics = {name: float(value) for name, value in sums.items() if value.ndim == 0}
    if (loss := metrics.get("loss/train/cross_entropy")) is not None:
        metrics["metrics/train/LanguageCrossEntropy"] = loss
        metrics["metrics/train/LanguagePerplexity"] = math.exp(min(loss, 700.0))  # exp(710) is no float
    if "moe/load" in sums:
        metrics.update(_of_experts(sums["moe/load"].cpu(), sums["moe/router_entropy"].cpu()))
    return metrics


def _of_experts(load_LE: Tensor, entropy_L: Tensor) -> dict[str, float]:
    imbalance_L = load_LE.amax(-1) / load_LE.mean(-1).clamp(min=1e-30)
    dead_L = (load_LE == 0).double().mean(-1)
    share_LE = load_LE / load_LE.sum(-1, keepdim=True).clamp(min=1e-30)
    load_entropy_L = torch.special.entr(share_LE).sum(-1) / math.log(load_LE.shape[-1])
    metrics = {
        "moe/load_imbalance": imbalance_L.amax(),
        "moe/load_entropy": load_entropy_L.mean(),
        "moe/router_entropy": entropy_L.mean(),
        "moe/dead_experts_frac": dead_L.mean(),
    }
    for layer, (imbalance, entropy, dead) in enumerate(zip(imbalance_L, entropy_L, dead_L, strict=True)):
        metrics[f"moe/load_imbalance/layer{layer}"] = imbalance
        metrics[f"moe/router_entropy/layer{layer}"] = entropy
        metrics[f"moe/dead_experts_frac/layer{layer}"] = dead
    return {name: float(value) for name, value in metrics.items()}
