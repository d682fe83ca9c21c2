"""Chooses the microbatch size before step 1, the same on every rank, and tries it.

The choice is ``cost.microbatch.choose``. A trial runs forward and backward with the data of maximal memory, and changes
no bit of weights, moments, buffers and random state. If it runs out of memory, the attempt ends as in any step, and the
next one has half the microbatch (``train/oom.py``): the other ranks wait in a collective.
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from smalti.base import log
from smalti.base.cgroup import main_memory_bytes
from smalti.base.env import World
from smalti.config.run import RunConfig
from smalti.cost import microbatch
from smalti.cost.axes import Layout
from smalti.cost.memory.fit import tensor_bytes_on_cpu
from smalti.model.blocks.moe.choices import replaced_choices
from smalti.track.progress import Phase
from smalti.train.batches import TokenBatches
from smalti.train.oom import Reporter, is_out_of_memory
from smalti.train.step import Loss, TrainState


def choose(
    config: RunConfig, layout: Layout, device: torch.device, world: World, *, limit_tokens: int | None = None
) -> microbatch.Chosen:
    """Choose the first microbatch size, the same on every rank. A collective.

    limit_tokens: upper bound from earlier attempts that ran out of memory. Raises UserError where a pipeline cannot run
    it.
    """
    memory_bytes = memory_of(device, world)
    chosen = microbatch.choose(config, layout, device.type, memory_bytes, limit_tokens=limit_tokens)
    if not chosen.fits:
        log.get("train").warning("by the plan even one row does not fit the memory of a rank; trying one row")
    microbatch.check_pipeline(config, layout, chosen.tokens)
    return chosen


def memory_of(device: torch.device, world: World) -> float:
    """Return the memory of a rank in bytes, the minimum over all ranks. A collective."""
    if device.type == "cuda":
        memory_bytes = float(torch.cuda.get_device_properties(device).total_memory)
    else:
        memory_bytes = tensor_bytes_on_cpu(main_memory_bytes(), world.local_world_size)
    min_bytes = torch.tensor(memory_bytes, dtype=torch.float64)
    dist.all_reduce(min_bytes, op=dist.ReduceOp.MIN)
    return float(min_bytes)


# ---- the trial ------------------------------------------------------------------------------------------------------


def wants_trial(config: RunConfig, device: torch.device) -> bool:
    """Return whether the microbatch is tried: on CUDA, or as the config says."""
    wanted = config.train.microbatch_trial
    if wanted == "auto":
        return device.type == "cuda" and config.train.microbatch_tokens == "auto"
    return wanted


@dataclass
class Trial:
    """Tries microbatch sizes on a job before its first step."""

    config: RunConfig
    layout: Layout
    state: TrainState
    loss: Loss
    batches: TokenBatches
    reporter: Reporter
    had_room: Callable[[], bool] | None = None
    """Returns, after a trial, whether this rank had spare memory; None: whether the allocator has not retried."""

    def settle(self, tokens: int) -> int:
        """Try ``tokens`` and halves of it; use the first that fits for the batches, and return it. A collective."""
        tokens = self.largest(tokens)
        self.batches.use_microbatch(tokens)
        return tokens

    def largest(self, tokens: int) -> int:
        """Return ``tokens`` or the first of its halves, in whole rows, that fits on every rank. A collective.

        Raises OutOfMemory or OneRowTooLarge where a rank ran out of memory in a trial.
        """
        while True:
            rows, seq_len, microbatches = self._fullest(tokens)
            retries = _retries()
            self._try(rows, seq_len, min(microbatches, 2 if self.layout.pipeline == 1 else 2 * self.layout.pipeline))
            vote = torch.tensor(int(self.had_room() if self.had_room else _retries() == retries))
            dist.all_reduce(vote, op=dist.ReduceOp.MIN)
            if int(vote) or rows == 1:
                if not int(vote):
                    log.get("train").warning("one row takes nearly all memory of a rank; steps may be slow")
                return tokens
            tokens = microbatch.for_pipeline(self.config, self.layout, max(1, rows // 2) * seq_len)
            log.get("train").info("a rank had no room to spare in the trial: microbatches of %s tokens", f"{tokens:,}")

    def _fullest(self, tokens: int) -> tuple[int, int, int]:
        """Return (rows, seq_len, microbatches in a step) of the step with the most tokens in a microbatch."""
        shapes = []
        for batch, seq_len in self.config.batches_and_lengths:
            share = -(-batch // seq_len // self.layout.data_ranks)
            rows = min(share, max(1, tokens // seq_len))
            shapes.append((rows, seq_len, -(-share // rows)))
        return max(shapes, key=lambda shape: (shape[0] * shape[1], shape[1]))

    def _try(self, rows: int, seq_len: int, microbatches: int) -> None:
        fullest = self.batches.fullest(rows, seq_len, vocab_size=self.config.model.vocab_size)
        try:
            # the phases of the trial are not those of a step
            with _restored(self.state), self._worst_routing(), self.state.progress.within(Phase.INIT):
                self.state.forward_backward(self.state, [fullest] * microbatches, self.loss)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            raise self.reporter.report_rows(error, rows, seq_len, step=self.state.step, phase="trial") from error

    @contextlib.contextmanager
    def _worst_routing(self) -> Iterator[None]:
        """Context manager: route all tokens of all ranks to the experts of one rank if dispatch is exact. Otherwise the
        work of a rank does not depend on the routing."""
        if self.layout.expert == 1 or self.config.train.parallel.dispatch == "static":
            yield
            return
        with all_to_first(self.state.model):
            yield
        if any(getattr(module, "_compiled_call_impl", None) for module in self.state.model.modules()):
            torch._dynamo.reset()  # blocks were compiled with the forced choice


@contextlib.contextmanager
def all_to_first(model: nn.Module) -> Iterator[None]:
    """Context manager: every router chooses the first experts, which are on one rank or on the first few."""
    with replaced_choices(model, lambda router: _first(router.config.num_experts_per_tok)):
        yield


def _first(count: int) -> Callable[[Tensor], Tensor]:
    def choose(score_BTE: Tensor) -> Tensor:
        return torch.arange(count, device=score_BTE.device).expand(*score_BTE.shape[:-1], count).contiguous()

    return choose


@contextlib.contextmanager
def _restored(state: TrainState) -> Iterator[None]:
    """Context manager: restore buffers and random state, and drop gradients; nothing else changes in both passes."""
    model = state.model
    before = [buffer.clone() for buffer in model.buffers()]
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() and torch.cuda.is_initialized() else []
    state.optimizer.zero_grad(set_to_none=True)
    with torch.random.fork_rng(devices):
        yield
    state.optimizer.zero_grad(set_to_none=True)
    with torch.no_grad():
        for buffer, value in zip(model.buffers(), before, strict=True):
            buffer.copy_(value)
    if devices:
        torch.cuda.reset_peak_memory_stats()


def _retries() -> int:
    """Return how often the allocator had to free its cached blocks and retry."""
    return int(torch.cuda.memory_stats().get("num_alloc_retries", 0)) if torch.cuda.is_initialized() else 0
