"""Predicts the time of a step on many devices: the work of a rank and the communication that it does not hide.

    step = works + bubble + waits + sum over forward, backward of max(slowed, overlapping - works)
    slowed = sum over overlapping collectives of more hops + CONTENTION_FRAC x more transfer than in a node

The factors of ``cost/step_time/step.py`` include collectives within a node. docs/concepts/plan/network.md compares with
published steps. Not included: stragglers, failures, data.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from smalti.config.hardware import Hardware
from smalti.config.parallel import Context, DispatchMode
from smalti.config.run import RunConfig
from smalti.cost.axes import Layout
from smalti.cost.flops import train_flops_per_token
from smalti.cost.layout.collectives import Collective, Cut, collectives, cut, group
from smalti.cost.layout.network import cost, links
from smalti.cost.step_time.step import StepTime, step_time

CONTENTION_FRAC = 0.2
"""Share of a rank's work that a second of transfer costs: NCCL's kernels use 24 to 32 of an H100's 132
multiprocessors."""

NETWORK_INTERVAL = (0.5, 2.0)
"""Factors on the network's seconds. With the number of devices the published steps of one model grew 1.0 (H100) and 1.5
(A100) times as fast as predicted with all of the slower transfer showing, and up to 3 times for the largest."""


@dataclass(frozen=True)
class Prediction:
    """A step on a layout. Seconds add up to ``step_s``."""

    gpus: int
    layout: Layout
    microbatch_tokens: int
    """Tokens of whole rows; the ranks of a sequence axis share them."""
    microbatches: int
    """Microbatches per rank and step."""
    compute_s: float
    """Products and attention, and host time."""
    memory_s: float
    """Work bound by memory bandwidth."""
    bubble_s: float
    """Waiting of pipeline ranks at the first and last microbatches."""
    network_s: float
    """Collectives that are not hidden behind work."""
    tokens: int
    """Tokens per step, all ranks together."""
    mfu: float | None
    """MFU under ``cost.flops.FORMULA``; None if the peak is not known."""
    step_interval_s: tuple[float, float]
    """Fraction of ``step_s``."""
    mfu_interval: tuple[float, float] | None
    """Lower and upper end of ``mfu``."""

    @property
    def step_s(self) -> float:
        """Seconds of a step."""
        return self.compute_s + self.memory_s + self.bubble_s + self.network_s

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second of all ranks together."""
        return self.tokens / self.step_s

    @property
    def shares(self) -> dict[str, float]:
        """Shares of the step's time, which add up to 1."""
        parts = {"compute": self.compute_s, "memory": self.memory_s, "bubble": self.bubble_s, "network": self.network_s}
        return {name: seconds / self.step_s for name, seconds in parts.items()}

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object with units in the names."""
        return {
            **asdict(self),
            "layout": asdict(self.layout),
            "step_s": self.step_s,
            "tokens_per_s": self.tokens_per_s,
            "shares": self.shares,
        }


def predict(
    config: RunConfig,
    hardware: Hardware,
    layout: Layout,
    microbatch_tokens: int | None = None,
    *,
    dispatch: DispatchMode = "exact",
    context: Context = "ulysses",
    step_of_rank: StepTime | None = None,
) -> Prediction:
    """Predict the step of the last batch of ``config`` on ``layout``. ``step_of_rank``: its work, if already known."""
    whole = cut(config, layout, microbatch_tokens)
    step = step_of_rank or step_time(config, hardware, layout, microbatch_tokens)
    calls = collectives(config, layout, microbatch_tokens, dispatch=dispatch, context=context, device=hardware.kind)
    memory_s = sum(part.s for part in step.parts if part.bound == "memory")
    compute_s = sum(part.s for part in step.parts if part.bound in ("compute", "overhead"))
    bubble_s = _bubble_s(step, layout, whole)
    recomputes = config.train.parallel.activation_checkpointing == "full"
    network_s = network_shown_s(calls, hardware, layout, compute_s + memory_s, recomputes=recomputes)
    batch, seq_len = config.batches_and_lengths[-1]
    low, high = step.low_frac, step.high_frac
    busy_s = compute_s + memory_s + bubble_s
    interval = (busy_s * low + network_s * NETWORK_INTERVAL[0], busy_s * high + network_s * NETWORK_INTERVAL[1])
    step_s, peak = busy_s + network_s, hardware.peak(config.train.precision.compute)
    ideal_s = train_flops_per_token(config.model, seq_len) * batch / (peak * layout.world_size) if peak else None
    return Prediction(
        gpus=layout.world_size,
        layout=layout,
        microbatch_tokens=whole.rows * whole.seq_len,
        microbatches=whole.microbatches,
        compute_s=compute_s,
        memory_s=memory_s,
        bubble_s=bubble_s,
        network_s=network_s,
        tokens=batch,
        mfu=ideal_s / step_s if ideal_s else None,
        step_interval_s=interval,
        mfu_interval=(ideal_s / interval[1], ideal_s / interval[0]) if ideal_s else None,
    )


def network_shown_s(
    calls: Sequence[Collective], hardware: Hardware, layout: Layout, works_s: float, *, recomputes: bool
) -> float:
    """Return the seconds that collectives add to a rank's work, of which forward is a third; with recomputation a
    quarter.

    Between nodes a ring has more hops, which are not hidden, and slower links, whose transfer is hidden behind work. On
    42 published steps of MPT (8 to 512 devices) the measured step was 0.93 to 1.11 of the predicted
    (``tests/cost/test_scaling.py``); no constant was fitted on them. Other layouts follow the same rule, unverified.
    """
    total, forward = 0.0, 1 / 4 if recomputes else 1 / 3
    for phase, share in (("forward", forward), ("backward", 1 - forward), ("step", 0.0)):
        slowed = overlapping = 0.0
        for call in calls:
            if call.when != phase or (call.axis == "world" and call.overlaps):
                continue
            through = links(group(layout, call.axis), hardware)
            call_cost = cost(call.op, call.bytes, through)
            if not call.overlaps:
                total += call.count * call_cost.total_s
                continue
            size = min(through.size, hardware.devices_per_node)
            node = cost(call.op, call.bytes, replace(through, size=size, per_node=size))
            overlapping += call.count * call_cost.total_s
            slowed += call.count * max(0.0, call_cost.latency_s - node.latency_s)
            slowed += call.count * max(0.0, call_cost.transfer_s - node.transfer_s) * CONTENTION_FRAC
        total += max(slowed, overlapping - share * works_s)
    return total


def _bubble_s(step: StepTime, layout: Layout, whole: Cut) -> float:
    """Return (p - 1) / m of the work on microbatches: 1F1B (Narayanan et al. 2021, arXiv 2104.04473, section 2.2)."""
    if layout.pipeline == 1:
        return 0.0
    passes_s = sum(part.s for part in step.parts if part.name not in ("clip", "optimizer"))
    return passes_s * (layout.pipeline - 1) / whole.microbatches
