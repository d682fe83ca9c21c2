"""A rank that runs out of memory: said by name and phase, on record at once, and left by that rank alone.

Promises: the event lies in the run folder before the error is raised, whichever rank it is, so that whoever starts the
next attempt halves the microbatch; nothing is waited for, as the other ranks wait for this one in a collective, and
hear nothing from it before its process ends. What the kernel kills for memory (SIGKILL) is not seen here.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import torch

from smalti.base.errors import RetryableError, SmaltiError, UserError
from smalti.config.run import JobConfig, RunConfig
from smalti.cost.axes import Layout
from smalti.cost.layout.oom_hints import oom_hints
from smalti.track.out_of_memory import words
from smalti.track.run import RunFolder
from smalti.train.batches import Microbatch, TokenBatches

_SAID = re.compile(
    r"can't allocate memory|not enough memory: you tried|(CUDA|HIP)( error)?: out of memory|STATUS_ALLOC_FAILED"
)
"""What torch's allocators and its libraries say; CUDA's own has a class, the CPU's comes as a RuntimeError."""


class OutOfMemory(RetryableError):
    """The next attempt takes half the microbatch."""


class OneRowTooLarge(UserError):
    """Not one row fits: no smaller microbatch is left."""


ALONE = (OutOfMemory, OneRowTooLarge)
"""Raised by one rank while the others wait for it: nothing may be done together any more."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a device's or the CPU's allocator had no more."""
    said = isinstance(error, RuntimeError) and _SAID.search(str(error)) is not None
    return said or isinstance(error, (torch.OutOfMemoryError, MemoryError))


def phase_of(error: BaseException) -> str:
    """``forward``, ``backward`` or ``optimizer``: where in ``train_step`` it was raised. Blocks that are computed again
    in the backward pass belong to it."""
    frames = _frames(error.__traceback__)
    inside = frames[1 + max((i for i, (_, name) in enumerate(frames) if name == "train_step"), default=-1) :]
    if any("torch/autograd/" in file and name in ("backward", "_engine_run_backward") for file, name in inside):
        return "backward"
    ahead = inside and any(
        part in inside[0][0] for part in ("/smalti/train/", "/smalti/distributed/parallel/tensor.py")
    )
    return "forward" if ahead else "optimizer"


def placement(config: JobConfig, layout: Layout, device: torch.device) -> dict[str, Any]:
    """What memory depends on and a person may change between attempts: elsewhere what ran out may fit."""
    train = config.train
    return {
        "layout": str(layout),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "microbatch_tokens": train.microbatch_tokens,
        "activation_checkpointing": train.parallel.activation_checkpointing,
        "compile": train.parallel.compile,
        "chunk_bytes": train.loss.chunk_bytes,
    }


def _frames(at: TracebackType | None) -> list[tuple[str, str]]:
    found = []
    while at is not None:
        code = at.tb_frame.f_code
        found.append((code.co_filename.replace("\\", "/"), code.co_name))
        at = at.tb_next
    return found


@dataclass(frozen=True)
class Reporter:
    """Puts it on record for one rank, and says what can be done."""

    config: JobConfig
    folder: RunFolder
    rank: int
    layout: Layout
    of: dict[str, Any] = field(default_factory=dict)
    """The placement: what must be the same for a later attempt to run out as well."""

    def tell(self, error: BaseException, batches: Any, microbatches: Sequence[Any], step: int) -> SmaltiError | None:
        """The error to raise in place of ``error``; None where memory is not what was short."""
        if not is_out_of_memory(error):
            return None
        if not (isinstance(batches, TokenBatches) and isinstance(microbatches[0], Microbatch)):
            return self.tell_rows(error, None, 0, step=step, phase=phase_of(error))
        rows = max(len(one.inputs) for one in microbatches)
        return self.tell_rows(error, rows, batches.seq_len(step), step=step, phase=phase_of(error))

    def tell_rows(
        self, error: BaseException, rows: int | None, seq_len: int, *, step: int, phase: str
    ) -> OutOfMemory | OneRowTooLarge:
        """Write the event. ``rows`` of ``seq_len`` tokens: the microbatch; None: not ours to cut."""
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
            return OutOfMemory(words(event), hint=f"the same command goes on with microbatches of {smaller:,} tokens")
        what = "one row" if rows is not None else "a microbatch of the batches that were given"
        return OneRowTooLarge(f"{words(event)}: {what} does not fit", hint=self._helps(rows, seq_len))

    def _helps(self, rows: int | None, seq_len: int) -> str:
        """What the planner says would help this layout; of a model and batches that no config describes it knows
        nothing."""
        if rows is None or not isinstance(self.config, RunConfig):
            return "smaller microbatches"
        has_gpu = self.of.get("device", "cpu") != "cpu"
        memory_bytes = torch.cuda.get_device_properties().total_memory if has_gpu else math.inf
        device = "cuda" if has_gpu else "cpu"
        found = oom_hints(self.config, self.layout, rows * seq_len, device=device, memory_bytes=memory_bytes)
        return " or ".join(found or ["a device with more memory, or a smaller model or seq_len"])
