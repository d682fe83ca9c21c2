"""Devices for serving a model: the smallest number of each, the split over them, and the decoding speed.

A split fits by ``plan/serving/memory.py`` into the usable memory of a device. Speed is a bound by memory and matmul
rates, not a measurement; network, sampling and gaps between kernels are part of its interval, not modelled.
"""

from dataclasses import asdict, dataclass
from typing import Any

from smalti.config.hardware import Hardware
from smalti.config.model import ModelConfig
from smalti.cost.params import count
from smalti.plan.serving.formats import kv_bytes_per_token
from smalti.plan.serving.memory import (
    DeviceMemory,
    Load,
    Served,
    Split,
    device_memory,
    kv_heads_per_device,
    tensor_sizes,
)

RESERVED_FRAC = 0.1
"""Assumption: share of a device's memory for its runtime, kernels, graphs and fragments (vLLM's default
``gpu_memory_utilization`` was 0.9 up to 2025). Not subtracted where the system itself sets a limit."""

ALONE_FRAC = (0.4, 0.8)
"""Assumption: share of the bound that one device reaches. Published: 0.42 to 0.69 on an A100 (gpt-fast's README,
bf16, int8 and int4, 7B to 70B and Mixtral), 0.44 to 0.58 on an M1 Max (llama.cpp, issue 27525)."""

JOINED_FRAC = (0.25, 0.75)
"""The same of several devices: 0.27 to 0.73 on 2 to 8 A100 (gpt-fast's README); small models on many devices less."""

MAX_STAGES = 64


@dataclass(frozen=True)
class Speed:
    """Speed of decoding with the load's batch at its full context."""

    bytes_touched: float
    """Bytes read in sequence for one step: tensor parts in parallel, stages one after the other."""
    experts_touched: float | None
    """Distinct experts of a layer that one step is expected to use; None for a dense model."""
    bound: str
    """``memory`` or ``compute``, whichever takes longer."""
    most_tokens_per_s: float
    """Upper bound for the whole batch, at the full bandwidth and peak."""
    low_tokens_per_s: float
    high_tokens_per_s: float
    """``low`` to ``high``: the speed that current engines reach."""

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object."""
        return asdict(self)


def usable_memory_bytes(
    hardware: Hardware, usable_frac: float | None = None, *, reserved_frac: float = RESERVED_FRAC
) -> float:
    """Return the bytes of a device that a model may use: ``usable_frac`` of its memory; if None, what the system lets
    programs use, or all but ``reserved_frac``."""
    if usable_frac is not None:
        return hardware.memory_bytes * usable_frac
    if hardware.usable_memory_bytes is not None:
        return hardware.usable_memory_bytes
    return hardware.memory_bytes * (1 - reserved_frac)


def max_devices(hardware: Hardware) -> int | None:
    """Return the most devices that can serve one model: a node for devices without a network; None: unlimited."""
    return hardware.devices_per_node if hardware.network_bytes_per_s is None else None


def splits(model: ModelConfig, hardware: Hardware) -> list[Split]:
    """Return the possible splits of a model, by number of devices; for equal numbers the most tensor parts first.

    Matrices are split within a node; stages may be on other nodes if the device has a network.
    """
    largest = max_devices(hardware)
    candidates = [
        Split(tensor, stages)
        for tensor in tensor_sizes(model, hardware.devices_per_node)
        for stages in range(1, min(MAX_STAGES, model.num_hidden_layers) + 1)
        if largest is None or tensor * stages <= largest
    ]
    return sorted(candidates, key=lambda split: (split.devices, -split.tensor))


def smallest_split(served: Served, load: Load, hardware: Hardware, room: float) -> tuple[Split, DeviceMemory] | None:
    """Return the split over the fewest devices, and the memory of the fullest device; None if nothing fits."""
    for split in splits(served.model, hardware):
        memory = device_memory(served, load, split)
        if memory.total_bytes <= room:
            return split, memory
    return None


def distinct_experts(model: ModelConfig, tokens: int) -> float | None:
    """Return the expected distinct experts of a layer for ``tokens``: E (1 - (1 - k/E)^B), for a uniform router."""
    if model.moe is None:
        return None
    experts, chosen = model.moe.num_experts, model.moe.num_experts_per_tok
    return experts * (1 - (1 - chosen / experts) ** tokens)


def touched_bytes(served: Served, load: Load, split: Split) -> float:
    """Return the bytes read in sequence for a decode step: tensor parts in parallel, stages one after the other.

    These are all weights but the embedding (a lookup; a tied one is the head), of the experts the expected number, and
    the cache.
    """
    share = served.share(split.tensor)
    experts = distinct_experts(served.model, load.batch) or 0.0
    per_token = kv_bytes_per_token(served.model, load.kv) / served.model.kv_heads
    cache = load.batch * served.keys(load) * per_token * kv_heads_per_device(served.model, split.tensor)
    return share.read + experts * share.expert + cache


def speed(served: Served, load: Load, split: Split, hardware: Hardware) -> Speed:
    """Return the speed of decoding: batch / max(bytes touched / bandwidth, FLOPs / peak).

    Source: Databricks, LLM Inference Performance Engineering, 2023-10 (MBU). FLOPs: 2 for each parameter in a matmul of
    the token, and 4 for each element of the heads and each cached token. The peak is that of bf16; if it is unknown,
    only memory counts.
    """
    model = served.model
    bytes_touched = touched_bytes(served, load, split)
    memory_s = bytes_touched / hardware.memory_bytes_per_s
    width = model.num_attention_heads * model.width_per_head
    flops = 2 * count(model).matmul_active + 4 * width * served.keys(load)
    peak = hardware.peak_flops_per_s.get("bf16")
    compute_s = load.batch * flops / split.tensor / peak if peak else 0.0
    most = load.batch / max(memory_s, compute_s)
    low, high = ALONE_FRAC if split.devices == 1 else JOINED_FRAC
    return Speed(
        bytes_touched=bytes_touched,
        experts_touched=distinct_experts(model, load.batch),
        bound="memory" if memory_s >= compute_s else "compute",
        most_tokens_per_s=most,
        low_tokens_per_s=low * most,
        high_tokens_per_s=high * most,
    )
