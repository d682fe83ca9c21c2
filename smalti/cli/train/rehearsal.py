"""What ``smalti train --dry-run`` says of a rank: a step rehearsed in this process, the planner's figures beside it.

Promises: rehearsed figures are counted (``train/rehearsal.py``), planned ones are formulas (``plan/``), and each says
which it is. For one rank the text shows the planner's alone and imports no torch; ``--json`` always rehearses. Time and
the memory of a device are known where the device is: given, or seen from here.
"""

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from smalti.base.units import format_bytes, format_count, format_seconds

if TYPE_CHECKING:
    from smalti.config.hardware import Hardware
    from smalti.config.run import RunConfig
    from smalti.cost.axes import Layout
    from smalti.cost.layout.collectives import Collective
    from smalti.cost.memory.rank import Memory
    from smalti.train.rehearsal import Rehearsal

_PLANNED = {
    "parameters": "params_bytes", "gradients": "grads_bytes", "optimizer": "moments_bytes",
    "activations": "activations_bytes", "logits": "logits_bytes", "buffers": "gathered_bytes",
}  # fmt: skip
"""Part of a rank's bytes -> the planner's name for it; its buffers are gathered weights alone."""


@dataclass(frozen=True)
class _Setting:
    """What is rehearsed and planned."""

    config: "RunConfig"
    layout: "Layout"
    microbatch_tokens: int
    device: "Hardware | None"
    memory_bytes: float | None
    """Of a rank's device, for its tensors; None where the device is not known."""

    @property
    def kind(self) -> str:
        return "cuda" if self.config.train.parallel.device == "cuda" or self._has_gpu else "cpu"

    @property
    def _has_gpu(self) -> bool:
        return self.device is not None and self.device.kind != "cpu"


def rehearsal_json(config: "RunConfig", *, gpu: str | None = None) -> dict[str, Any]:
    """A JSON object: what a rank holds and sends in a step, and what the planner said of it."""
    from smalti.cost.params import count

    here = _setting(config, gpu)
    found, planned, time_s = _rehearsal(here), _memory(here), _step_time_s(here)
    return {
        "name": config.name,
        "params": found.params,
        "active_params": count(config.model).active,
        "world_size": here.layout.world_size,
        "axes": asdict(here.layout),
        "rank": found.rank,
        "microbatch_tokens": here.microbatch_tokens,
        "bytes_per_rank": {name: found.bytes_per_rank[name] for name in _PLANNED},
        "peak_bytes_per_rank": found.peak_bytes,
        "peak_parts": found.peak_parts,
        "collectives": [asdict(one) for one in found.collectives],
        "step_time_s": time_s,
        "checkpoint_bytes_per_rank": found.checkpoint_bytes,
        "device": here.device.name if here.device else None,
        "device_memory_bytes": None if here.memory_bytes is None else round(here.memory_bytes),
        "needed_bytes": _needed(here, found.peak_bytes, planned),
        "fits": _fits(here, found.peak_bytes, planned),
        "planned": {
            "bytes_per_rank": _planned_bytes(planned),
            "peak_bytes_per_rank": planned.tensors_bytes,
            "collectives": [
                {"op": one.op, "axis": one.axis, "count": one.count, "bytes": one.bytes} for one in _collectives(here)
            ],
        },
    }


def rehearsal_lines(config: "RunConfig", *, gpu: str | None = None) -> list[str]:
    """The same as tables for people, in lines of the dry run."""
    here = _setting(config, gpu)
    planned, found = _memory(here), None
    if here.layout.world_size > 1:
        found = _rehearsal(here)
    peak = found.peak_bytes if found else planned.tensors_bytes
    rank = f"rank {found.rank}, rehearsed: " if found else "planned: "
    lines = [
        f"a rank     {rank}microbatches of {here.microbatch_tokens:,} tokens, at most {format_bytes(peak)} at a time"
    ]
    lines += [f"           {line}".rstrip() for line in [*_bytes_table(found, planned), *_traffic_table(here, found)]]
    if found is not None:
        lines.append(f"checkpoint {format_bytes(found.checkpoint_bytes)} from each rank")
    time_s, fits = _step_time_s(here), _fits(here, peak, planned)
    if time_s is not None and here.device is not None:
        lines.append(f"step       {format_seconds(time_s)} on {here.device.title}, planned")
    if fits is not None and here.memory_bytes is not None and here.device is not None:
        does = "fits" if fits else "does not fit"
        needs, has = format_bytes(_needed(here, peak, planned)), format_bytes(here.memory_bytes)
        lines.append(f"memory     {does}: {needs} of {has} ({here.device.title})")
    return lines


# ---- tables ---------------------------------------------------------------------------------------------------------


def _bytes_table(found: "Rehearsal | None", planned: "Memory") -> list[str]:
    from smalti.cli.tables import table

    by_plan = {**_planned_bytes(planned), "at most": planned.tensors_bytes}
    if found is None:
        return table(("bytes", "planned"), [(name, format_bytes(size)) for name, size in by_plan.items()]).splitlines()
    made = {**found.bytes_per_rank, "at most": found.peak_bytes}
    rows = [(name, format_bytes(made[name]), format_bytes(size)) for name, size in by_plan.items()]
    return table(("bytes", "rehearsed", "planned"), rows).splitlines()


def _traffic_table(here: _Setting, found: "Rehearsal | None") -> list[str]:
    from smalti.cli.tables import table

    if found is None:
        return []
    made, planned = _by_axis(found.collectives), _by_axis(_collectives(here))
    rows = [
        (op, axis, *_cells(made.get((op, axis))), *_cells(planned.get((op, axis))))
        for op, axis in sorted({*made, *planned}, key=lambda key: -made.get(key, (0, 0))[1])
    ]
    head = ("collective", "axis", "calls", "bytes", "planned calls", "planned bytes")
    return ["", *table(head, rows).splitlines()]


def _by_axis(calls: Any) -> dict[tuple[str, str], tuple[int, int]]:
    """(op, axis) -> calls and bytes of a step."""
    found: dict[tuple[str, str], tuple[int, int]] = {}
    for one in calls:
        number, size = found.get((one.op, one.axis), (0, 0))
        found[one.op, one.axis] = number + one.count, size + one.count * one.bytes
    return found


def _cells(found: tuple[int, int] | None) -> tuple[str, str]:
    return ("-", "-") if found is None else (format_count(found[0]), format_bytes(found[1]))


# ---- figures --------------------------------------------------------------------------------------------------------


def _setting(config: "RunConfig", gpu: str | None) -> _Setting:
    from smalti.cli.train.local_layout import local_layout
    from smalti.config.hardware import hardware
    from smalti.cost.layout.auto import resolve
    from smalti.cost.microbatch import choose

    device = None if gpu is None else hardware(gpu)
    ranks = config.train.parallel.ranks
    layout = (local_layout(config, ranks) if device is None else resolve(config, ranks, hardware=device)).layout
    memory_bytes = None if device is None else float(device.available_memory_bytes)
    is_gpu = device is not None and device.kind != "cpu"
    tokens = choose(config, layout, "cuda" if is_gpu else "cpu", memory_bytes if is_gpu else None).tokens
    return _Setting(config, layout, tokens, device, memory_bytes)


def _rehearsal(here: _Setting) -> "Rehearsal":
    from smalti.train.rehearsal import rehearse

    return rehearse(here.config, here.layout, here.microbatch_tokens, cuda=here.kind == "cuda")


def _memory(here: _Setting) -> "Memory":
    from smalti.cost.memory.rank import memory_per_rank

    return memory_per_rank(here.config, layout=here.layout, microbatch_tokens=here.microbatch_tokens, device=here.kind)


def _planned_bytes(planned: "Memory") -> dict[str, int]:
    return {name: getattr(planned, field) for name, field in _PLANNED.items()}


def _collectives(here: _Setting) -> "list[Collective]":
    from smalti.cost.layout.collectives import collectives

    parallel = here.config.train.parallel
    return collectives(
        here.config, here.layout, here.microbatch_tokens, dispatch=parallel.dispatch, context=parallel.context,
        device=here.kind,
    )  # fmt: skip


def _step_time_s(here: _Setting) -> float | None:
    from smalti.cost.layout.predict import predict

    if here.device is None:
        return None
    parallel = here.config.train.parallel
    return predict(
        here.config, here.device, here.layout, here.microbatch_tokens, dispatch=parallel.dispatch,
        context=parallel.context,
    ).step_s  # fmt: skip


def _needed(here: _Setting, peak_bytes: int, planned: "Memory") -> int:
    """With what a GPU holds beside tensors. Compiled experts keep more than the operators that are rehearsed, which
    the planner alone knows: there the larger of both peaks counts."""
    from smalti.cost.memory.rank import Assumed

    beside, parallel = Assumed(), here.config.train.parallel
    if here.kind != "cuda":
        return peak_bytes
    if here.config.model.moe is not None and parallel.compile is not False and here.layout.expert == 1:
        peak_bytes = max(peak_bytes, planned.tensors_bytes)
    reserved = beside.context_bytes + beside.communicator_bytes * here.layout.axes_in_use
    return round(peak_bytes * (1 + beside.fragmentation_frac) + reserved)


def _fits(here: _Setting, peak_bytes: int, planned: "Memory") -> bool | None:
    return None if here.memory_bytes is None else _needed(here, peak_bytes, planned) <= here.memory_bytes
