"""Reports that this rank ran out of memory: writes the event, and builds the error that ends this rank alone.

Any rank writes the event before the error is raised, so that the next attempt uses half the microbatch. There is no
collective here, as the other ranks wait in one. A process that the kernel kills for memory (SIGKILL) is not covered.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from smalti.base.errors import RetryableError, SmaltiError, UserError
from smalti.config.run import JobConfig, RunConfig
from smalti.cost.axes import Layout
from smalti.cost.layout.oom_hints import oom_hints
from smalti.track.out_of_memory import describe
from smalti.track.run import RunFolder
from smalti.train.batches import Microbatch, TokenBatches

_MESSAGES = re.compile(
    r"can't allocate memory|not enough memory: you tried|(CUDA|HIP)( error)?: out of memory|STATUS_ALLOC_FAILED"
)
"""Messages of torch's allocators and libraries. CUDA's allocator has an error class, the CPU's raises RuntimeError."""


class OutOfMemory(RetryableError):
    """A microbatch does not fit; the next attempt takes half of it."""


class OneRowTooLarge(UserError):
    """One row does not fit: no smaller microbatch is left."""


ALONE = (OutOfMemory, OneRowTooLarge)
"""Errors of one rank while the others wait for it: no collective may follow."""


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an allocator of a device or of the CPU had no more memory."""
    by_message = isinstance(error, RuntimeError) and _MESSAGES.search(str(error)) is not None
    return by_message or isinstance(error, (torch.OutOfMemoryError, MemoryError))


def placement(config: JobConfig, layout: Layout, device: torch.device) -> dict[str, Any]:
    """Return the settings that determine the memory of a rank and may change between attempts."""
    train = config.train
    return {
        "layout": str(layout),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "microbatch_tokens": train.microbatch_tokens,
        "activation_checkpointing": train.parallel.activation_checkpointing,
        "compile": train.parallel.compile,
        "chunk_bytes": train.loss.chunk_bytes,
    }


@dataclass(frozen=True)
class Reporter:
    """Writes the events of one rank that ran out of memory, and builds the errors."""

    config: JobConfig
    folder: RunFolder
    rank: int
    layout: Layout
    of: dict[str, Any] = field(default_factory=dict)
    """The ``placement`` of the attempt: a later attempt with the same one would run out of memory too."""

    def report(
        self, error: BaseException, batches: Any, microbatches: Sequence[Any], *, step: int, phase: str
    ) -> SmaltiError | None:
        """Report an error of ``train_step``; returns the error to raise instead, None if it is not about memory."""
        if not is_out_of_memory(error):
            return None
        if not (isinstance(batches, TokenBatches) and isinstance(microbatches[0], Microbatch)):
            return self.report_rows(error, None, 0, step=step, phase=phase)
        rows = max(len(microbatch.inputs) for microbatch in microbatches)
        return self.report_rows(error, rows, batches.seq_len(step), step=step, phase=phase)

    def report_rows(
        self, error: BaseException, rows: int | None, seq_len: int, *, step: int, phase: str
    ) -> OutOfMemory | OneRowTooLarge:
        """Write the event for a microbatch of ``rows`` of ``seq_len`` tokens; ``rows`` None: of batches of the caller,
        which cannot be split here."""
        smaller = None if rows is None or rows == 1 else rows // 2 * seq_len
        event = {
            "rank": self.rank,
            "phase": phase,
            "step": step,
            "microbatch_tokens": None if rows is None else rows * seq_len,
            "next_microbatch_tokens": smaller,
            "of": self.of,
            "error": str(error).split("\n")[0][:300],
        }
        log = self.folder.event_log()
        log.write("oom", **event)
        log.close()
        if smaller is not None:
            return OutOfMemory(
                describe(event), hint=f"the same command continues with microbatches of {smaller:,} tokens"
            )
        what = "one row" if rows is not None else "a microbatch of the caller's batches"
        return OneRowTooLarge(f"{describe(event)}: {what} does not fit", hint=self._hint(rows, seq_len))

    def _hint(self, rows: int | None, seq_len: int) -> str:
        """Return the changes that lower the memory of this layout by the plan, for a model of a config."""
        if rows is None or not isinstance(self.config, RunConfig):
            return "smaller microbatches"
        has_gpu = self.of.get("device", "cpu") != "cpu"
        memory_bytes = torch.cuda.get_device_properties().total_memory if has_gpu else math.inf
        device = "cuda" if has_gpu else "cpu"
        changes = oom_hints(self.config, self.layout, rows * seq_len, device=device, memory_bytes=memory_bytes)
        return " or ".join(changes or ["a device with more memory, or a smaller model or seq_len"])
