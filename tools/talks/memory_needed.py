"""Memory and disk space of DBRX."""

from functools import cache, partial

from smalti.config.hardware import hardware
from smalti.plan.serving.devices import usable_memory_bytes
from smalti.plan.serving.memory import DeviceMemory, Load, Served, device_memory
from talks import arithmetic as plan
from talks.rows import Figure, Section


@cache
def _served(weights: str) -> DeviceMemory:
    """DBRX on one device, with a request of 4,096 tokens."""
    return device_memory(Served(plan.model("dbrx-132b"), weights), Load(4096))


def _room(gpu: str) -> float:
    return usable_memory_bytes(hardware(gpu))


# fmt: off
_denny = partial(Figure, "roundtable", "Denny Lee, 00:39:24 and 00:40:19")
_ALONE = (
    Figure("dbrx", "Scaling Up", "bf16-weights", 894, "DBRX is too big to fit on one GPU", "one GPU",
           lambda: _served("bf16").weights_bytes, "131.6B x 2 bytes", "theirs",
           "weights alone; an H100 holds 80 GB", "263 GB"),
    _denny("4.5-bits", 133, "a 96 gigabyte MacBook Pro ... run inference directly on the laptop", "96 GB",
           lambda: plan.weights_bytes("dbrx-132b", 4.5), "131.6B x 4.5 bits", "theirs",
           "weights alone; `q4_k_s` has 4.55 bits and 74.9 GB, `q4_k_m` 79.9 GB", "74 GB"),
    _denny("96-gb-laptop", 133, "a 96 gigabyte MacBook Pro ... run inference directly on the laptop", "96 GB",
           lambda: _served("int4").total_bytes / _room("apple-m2-max-96gb"),
           "66.7 GiB in 4 bits with a request of 4,096 tokens / 72 GiB that macOS leaves", "theirs", "it fits", "0.93"),
    _denny("32-gb-laptop", 139, "I only have 32 gigs of this one", "32 GB",
           lambda: plan.per(32e9 * 8, plan.params("dbrx-132b").total), "32 GB / 131.6B parameters", "theirs",
           "bits for a parameter: too few for any usual format", "1.9"),
    Figure("roundtable", "Bandish Shah, 00:40:12", "gaming-rig", 138, "run on your gaming rig at home", "gaming rig",
           lambda: _served("int4").total_bytes / _room("rtx4090"), "66.7 GiB / what an RTX 4090 leaves",
           "theirs", "more than three cards, or most of it in main memory", "3.1"),
    Figure("blog", "Distributed checkpointing", "checkpoint", 45, "checkpoints that are several terabytes in size",
           "several terabytes", lambda: 3 * _served("fp32").weights_bytes, "131.6B x 12 bytes", "about",
           "weights and two moments in fp32: one and a half terabytes, not several", "1.58 TB"),
    Figure("blog", "Distributed checkpointing", "checkpoint-rate", 45, "blocking time to under 30 seconds", "30 s",
           lambda: 3 * _served("fp32").weights_bytes / 30 / 1e9, "1.58 TB / 30 s", "theirs",
           "GB/s of all writing ranks together, if nothing is written in the background", "52.6"),
)
# fmt: on

SECTIONS = (
    Section(
        "Memory and storage",
        "Bytes = parameters x bytes of one. `smalti plan memory` and `smalti plan serving` count the rest too "
        "([serving](../concepts/plan/serving-memory.md)).",
        alone=_ALONE,
    ),
)
