"""The time of one optimizer step on one rank, part by part: a roofline with measured or published constants.

    step = sum over parts of factor x sum over works of seconds(work) + units x seconds of a unit

``docs/concepts/plan/step-time.md`` has the sources of the constants and the errors of the predictions. Not included:
reading data, evals, checkpoints, and the network, which ``cost/layout/single_machine.py`` (ranks on one CPU) and
``cost/layout/predict.py`` (GPUs) add.
"""

from dataclasses import asdict, dataclass
from typing import Any

from smalti.config.hardware import Hardware
from smalti.config.measured import Format
from smalti.config.run import RunConfig
from smalti.cost.axes import Layout, layout_of
from smalti.cost.batch import rows_per_rank, usual_microbatch
from smalti.cost.flops import train_flops_per_token
from smalti.cost.step_time import factors, rates
from smalti.cost.step_time.work import Share, Work, update, works


@dataclass(frozen=True)
class PartTime:
    """A part of a step on one rank."""

    name: str
    flops: float
    """FLOPs, recomputation included; a multiply-add is two."""
    bytes: float
    """Bytes read and written at least."""
    kernels: float
    """Number of launches."""
    s: float
    bound: str
    """``compute``, ``memory``, ``overhead`` or ``network``: what limits most of its time."""


@dataclass(frozen=True)
class StepTime:
    """The predicted time of one step."""

    parts: tuple[PartTime, ...]
    """The parts in the order of a step; they add up to the total."""
    tokens: int
    """Tokens per step, all ranks together."""
    model_flops: float
    """FLOPs per step, all ranks together, under ``cost.flops.FORMULA``: without recomputation."""
    ranks: int
    low_frac: float
    """The interval's lower end, as a share of ``total_s``."""
    high_frac: float
    """The interval's upper end, as a share of ``total_s``."""

    @property
    def total_s(self) -> float:
        """Seconds of a step."""
        return sum(part.s for part in self.parts)

    @property
    def interval_s(self) -> tuple[float, float]:
        """Lower and upper end of the interval."""
        return self.total_s * self.low_frac, self.total_s * self.high_frac

    @property
    def bound(self) -> str:
        """The limit of most of the step's time."""
        times: dict[str, float] = {}
        for part in self.parts:
            times[part.bound] = times.get(part.bound, 0.0) + part.s
        return max(times, key=lambda name: times[name])

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object."""
        return {
            "total_s": self.total_s,
            "interval_s": list(self.interval_s),
            "bound": self.bound,
            "tokens": self.tokens,
            "model_flops": self.model_flops,
            "parts": [asdict(part) for part in self.parts],
        }


def step_time(
    config: RunConfig,
    machine: Hardware,
    layout: Layout | None = None,
    microbatch_tokens: int | None = None,
    *,
    batch_tokens: int | None = None,
    seq_len: int | None = None,
) -> StepTime:
    """Return the time of one step of ``config``; more tokens or layers never take less.

    On a device with ``measured`` the seconds of each unit of work come from its micro-benchmarks
    (``cost/step_time/rates.py``). With published figures they are the longer of FLOPs / (peak x share of a large
    product) and bytes / bandwidth, and the step takes at least as long as its launches. Both are multiplied by the
    factors of ``cost/step_time/factors.py``.

    layout: by default that of the config's ranks. batch_tokens, seq_len: of the step, by default the last of the run.
    """
    config = config.on(machine.kind)
    last_batch, last_seq_len = config.batches_and_lengths[-1]
    batch, seq_len = batch_tokens or last_batch, seq_len or last_seq_len
    layout = layout or layout_of(config)
    shares = passes_of(config, layout, batch, seq_len, microbatch_tokens)
    parts: dict[str, list[tuple[Work, float]]] = {}
    threads = threads_of(config, machine)
    compute, fused = config.train.precision.compute, _fuses(config, machine)
    done = [work for share in shares for work in works(config, share)]
    for work in [*done, *update(config, layout, sum(share.passes for share in shares))]:
        took_s = _seconds(work, machine, compute, threads, fused)
        parts.setdefault(work.part, []).append((work, took_s))
    times = [_part(name, timed, machine, compute) for name, timed in parts.items()]
    times += _host(config, machine, times, shares)
    low, high = factors.interval(machine, compute, experts=config.model.moe is not None)
    return StepTime(
        parts=tuple(times),
        tokens=batch,
        model_flops=float(train_flops_per_token(config.model, seq_len)) * batch,
        ranks=layout.world_size,
        low_frac=low,
        high_frac=high,
    )


def peak_of_ranks(config: RunConfig, machine: Hardware) -> float | None:
    """Return the peak FLOP/s for MFU: of each rank's device, or of the CPU that all ranks share; None if unknown."""
    peak = machine.peak(config.train.precision.compute)
    if peak is None or machine.kind == "cpu":
        return peak
    return peak * config.train.parallel.ranks


def threads_of(config: RunConfig, machine: Hardware) -> int | None:
    """Return the CPU threads of a rank; None if they have no effect."""
    if machine.measured is None or machine.kind != "cpu":
        return None
    parallel = config.train.parallel
    if parallel.threads != "auto":
        return parallel.threads
    return max(1, machine.measured.threads // parallel.ranks)


def passes_of(
    config: RunConfig,
    layout: Layout,
    batch_tokens: int | None = None,
    seq_len: int | None = None,
    microbatch_tokens: int | None = None,
) -> list[Share]:
    """Return the passes of one step on a rank: those of a whole microbatch, and the rest. Defaults as in
    ``step_time``."""
    last_batch, last_seq_len = config.batches_and_lengths[-1]
    batch, seq_len = batch_tokens or last_batch, seq_len or last_seq_len
    microbatch_tokens = microbatch_tokens or usual_microbatch(config, layout.data_ranks)
    rows = rows_per_rank(batch, seq_len, layout.data_ranks, microbatch_tokens)
    recomputes = config.train.parallel.activation_checkpointing == "full"
    shares = []
    for rows_of_pass, passes in (
        (rows.per_microbatch, rows.per_rank // rows.per_microbatch),
        (rows.per_rank % rows.per_microbatch, 1),
    ):
        if rows_of_pass and passes:
            shares.append(Share(-(-rows_of_pass * seq_len // layout.sequence), seq_len, passes, layout, recomputes))
    return shares


def _fuses(config: RunConfig, machine: Hardware) -> bool:
    wanted = config.train.parallel.compile
    return machine.kind != "cpu" if wanted == "auto" else bool(wanted)


def _seconds(work: Work, machine: Hardware, compute: Format, threads: int | None, fused: bool) -> float:
    """Return the seconds of all calls of a unit of work in the step."""
    if machine.measured is not None:
        alone_s = rates.measured_s(work, machine.measured, compute, threads=threads)
        return alone_s * work.count * factors.of_cpu(machine.measured.factors)[factors.class_of(work)]
    inside, compute_s = factors.of_gpu(machine, compute), rates.compute_s(work, machine, compute)
    memory_s = rates.memory_s(work, machine, compute, fused=fused)
    if work.kind.startswith("attention"):
        return max(compute_s, memory_s) * inside.attention * work.count
    return max(compute_s * inside.product, memory_s * inside.memory) * work.count


def _part(name: str, done: list[tuple[Work, float]], machine: Hardware, compute: Format) -> PartTime:
    bounds: dict[str, float] = {}
    for work, took_s in done:
        bound = rates.bound_of(work, machine, compute)
        bounds[bound] = bounds.get(bound, 0.0) + took_s
    return PartTime(
        name,
        flops=sum((work.flops + work.again_flops) * work.count for work, _ in done),
        bytes=sum(rates.bytes_of(work, compute) * work.count for work, _ in done),
        kernels=sum(rates.kernels_of(work) * work.count for work, _ in done),
        s=sum(took_s for _, took_s in done),
        bound=max(bounds, key=lambda bound: bounds[bound]),
    )


def _host(config: RunConfig, machine: Hardware, parts: list[PartTime], shares: list[Share]) -> list[PartTime]:
    """Return the host's time: on a CPU of each sharded unit, on a GPU of launches that take longer than the work."""
    passes, stages = sum(share.passes for share in shares), shares[0].layout.pipeline
    if machine.measured is not None:
        unit_s = factors.of_cpu(machine.measured.factors)["unit_s"]
        units = units_of(config) / stages * passes
        return [PartTime("host", 0, 0, units, units * unit_s, "overhead")] if unit_s else []
    launches, device_s = sum(part.kernels for part in parts), sum(part.s for part in parts)
    waits_s = max(0.0, launches * rates.LAUNCH_S - device_s)
    return [PartTime("host", 0, 0, launches, waits_s, "overhead")] if waits_s else []


def units_of(config: RunConfig) -> int:
    """Return the number of modules that FSDP gathers one by one: blocks, the root, and routers, which have another
    dtype."""
    model = config.model
    routers = sum(model.has_experts(layer) for layer in range(model.num_hidden_layers))
    return model.num_hidden_layers + 1 + routers
