"""What a checkpoint costs: its bytes, and the time for which it blocks training.

A save copies what a rank writes to host memory while the next forward and backward passes run; the optimizer waits for
the rest of the copy. Planning the first save and starting threads are not included.
"""

from smalti.config.hardware import Hardware
from smalti.config.run import RunConfig
from smalti.cost.axes import Layout
from smalti.cost.memory.per_rank import memory_per_rank
from smalti.cost.step_time.step import StepTime

_AFTER_THE_PASSES = ("clip", "optimizer")


def checkpoint_bytes(config: RunConfig) -> int:
    """Return the bytes of the tensors of a checkpoint: what is trained, and the optimizer's moments, once."""
    return memory_per_rank(config, layout=Layout(), device="cpu").staging_bytes


def staging_bytes(config: RunConfig) -> int:
    """Return the host memory of a rank's copy, from which a checkpoint is written."""
    return memory_per_rank(config, device="cpu").staging_bytes


def blocked_s(config: RunConfig, machine: Hardware, step: StepTime, *, on_gpu: bool) -> float | None:
    """Return the seconds that a save blocks training; None where the bandwidth of the copy is not known.

    The copy runs at the host's bandwidth from a GPU, on a CPU at half of the memory's, which is read and written.
    """
    rate = machine.host_bytes_per_s if on_gpu else machine.memory_bytes_per_s / 2
    if not rate:
        return None
    copy_s = memory_per_rank(config, device="cuda" if on_gpu else "cpu").staging_bytes / rate
    passes_s = sum(part.s for part in step.parts if part.name not in _AFTER_THE_PASSES)
    return max(0.0, copy_s - passes_s)
