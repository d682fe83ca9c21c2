"""Figures of one rank in ``smalti train --dry-run``: a step rehearsed in this process, next to the planner's.

Rehearsed figures are counted (``train/rehearsal.py``), planned ones computed (``cost/``), and labelled so. For one rank
the text has only planned figures and imports no torch; ``--json`` always rehearses. Step time and memory need a device.
"""

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from smalti.base.units import format_bytes, format_count, format_seconds

if TYPE_CHECKING:
    from smalti.config.hardware import Hardware
    from smalti.config.run import RunConfig
    from smalti.cost.axes import Layout
    from smalti.cost.layout.collectives import Collective
    from smalti.cost.memory.per_rank import Memory
    from smalti.train.rehearsal import Rehearsal

_PLANNED = {
    "parameters": "params_bytes", "gradients": "grads_bytes", "optimizer": "moments_bytes",
    "activations": "activations_bytes", "logits": "logits_bytes", "buffers": "gathered_bytes",
}  # fmt: skip
"""Part of a rank's bytes -> the planner's name for it; its buffers are gathered weights alone."""


@dataclass(frozen=True)
class _Setting:
    """The step that is rehearsed and planned."""

    config: "RunConfig"
    layout: "Layout"
    microbatch_tokens: int
    device: "Hardware | None"
    memory_bytes: float | None
    """Memory of a rank's device for tensors; None if the device is unknown."""

    @property
    def kind(self) -> str:
        return "cuda" if self.config.train.parallel.device == "cuda" or self._has_gpu else "cpu"

    @property
    def _has_gpu(self) -> bool:
        return self.device is not None and self.device.kind != "cpu"


def rehearsal_json(config: "RunConfig", *, gpu: str | None = None) -> dict[str, Any]:
    """Return what a rank holds and sends in a step, rehearsed and planned, as a JSON object."""
    from smalti.cost.params import count

    setting = _setting(config, gpu)
    rehearsal, planned, time_s = _rehearsal(setting), _memory(setting), _step_time_s(setting)
    return {
        "name": config.name,
        "params": rehearsal.params,
        "active_params": count(config.model).active,
        "world_size": setting.layout.world_size,
        "axes": asdict(setting.layout),
        "rank": rehearsal.rank,
        "microbatch_tokens": setting.microbatch_tokens,
        "bytes_per_rank": {name: rehearsal.bytes_per_rank[name] for name in _PLANNED},
        "peak_bytes_per_rank": rehearsal.peak_bytes,
        "peak_parts": rehearsal.peak_parts,
        "collectives": [asdict(each) for each in rehearsal.collectives],
        "step_time_s": time_s,
        "checkpoint_bytes_per_rank": rehearsal.checkpoint_bytes,
        "device": setting.device.name if setting.device else None,
        "device_memory_bytes": None if setting.memory_bytes is None else round(setting.memory_bytes),
        "needed_bytes": _needed(setting, rehearsal.peak_bytes, planned),
        "fits": _fits(setting, rehearsal.peak_bytes, planned),
        "planned": {
            "bytes_per_rank": _planned_bytes(planned),
            "peak_bytes_per_rank": planned.tensors_bytes,
            "collectives": [
                {"op": each.op, "axis": each.axis, "count": each.count, "bytes": each.bytes}
                for each in _collectives(setting)
            ],
        },
    }


def rehearsal_lines(config: "RunConfig", *, gpu: str | None = None) -> list[str]:
    """Return the figures of ``rehearsal_json`` as tables, in lines of the dry run."""
    setting = _setting(config, gpu)
    planned = _memory(setting)
    rehearsal = None
    if setting.layout.world_size > 1:
        rehearsal = _rehearsal(setting)
    peak = rehearsal.peak_bytes if rehearsal else planned.tensors_bytes
    rank = f"rank {rehearsal.rank}, rehearsed: " if rehearsal else "planned: "
    lines = [
        f"a rank     {rank}microbatches of {setting.microbatch_tokens:,} tokens, at most {format_bytes(peak)} at a time"
    ]
    lines += [
        f"           {line}".rstrip()
        for line in [*_bytes_table(rehearsal, planned), *_traffic_table(setting, rehearsal)]
    ]
    if rehearsal is not None:
        lines.append(f"checkpoint {format_bytes(rehearsal.checkpoint_bytes)} from each rank")
    time_s, fits = _step_time_s(setting), _fits(setting, peak, planned)
    if time_s is not None and setting.device is not None:
        lines.append(f"step       {format_seconds(time_s)} on {setting.device.title}, planned")
    if fits is not None and setting.memory_bytes is not None and setting.device is not None:
        does = "fits" if fits else "does not fit"
        needs, has = format_bytes(_needed(setting, peak, planned)), format_bytes(setting.memory_bytes)
        lines.append(f"memory     {does}: {needs} of {has} ({setting.device.title})")
    return lines


# ---- tables ---------------------------------------------------------------------------------------------------------


def _bytes_table(rehearsal: "Rehearsal | None", planned: "Memory") -> list[str]:
    from smalti.cli.tables import table

    by_plan = {**_planned_bytes(planned), "at most": planned.tensors_bytes}
    if rehearsal is None:
        return table(("bytes", "planned"), [(name, format_bytes(size)) for name, size in by_plan.items()]).splitlines()
    counted = {**rehearsal.bytes_per_rank, "at most": rehearsal.peak_bytes}
    rows = [(name, format_bytes(counted[name]), format_bytes(size)) for name, size in by_plan.items()]
    return table(("bytes", "rehearsed", "planned"), rows).splitlines()


def _traffic_table(setting: _Setting, rehearsal: "Rehearsal | None") -> list[str]:
    from smalti.cli.tables import table

    if rehearsal is None:
        return []
    counted, planned = _by_axis(rehearsal.collectives), _by_axis(_collectives(setting))
    rows = [
        (op, axis, *_cells(counted.get((op, axis))), *_cells(planned.get((op, axis))))
        for op, axis in sorted({*counted, *planned}, key=lambda key: -counted.get(key, (0, 0))[1])
    ]
    head = ("collective", "axis", "calls", "bytes", "planned calls", "planned bytes")
    return ["", *table(head, rows).splitlines()]


def _by_axis(calls: Any) -> dict[tuple[str, str], tuple[int, int]]:
    """Return (op, axis) -> calls and bytes of a step."""
    totals: dict[tuple[str, str], tuple[int, int]] = {}
    for call in calls:
        number, size = totals.get((call.op, call.axis), (0, 0))
        totals[call.op, call.axis] = number + call.count, size + call.count * call.bytes
    return totals


def _cells(calls_and_bytes: tuple[int, int] | None) -> tuple[str, str]:
    return (
        ("-", "-") if calls_and_bytes is None else (format_count(calls_and_bytes[0]), format_bytes(calls_and_bytes[1]))
    )


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


def _rehearsal(setting: _Setting) -> "Rehearsal":
    from smalti.train.rehearsal import rehearse

    return rehearse(setting.config, setting.layout, setting.microbatch_tokens, cuda=setting.kind == "cuda")


def _memory(setting: _Setting) -> "Memory":
    from smalti.cost.memory.per_rank import memory_per_rank

    return memory_per_rank(
        setting.config, layout=setting.layout, microbatch_tokens=setting.microbatch_tokens, device=setting.kind
    )


def _planned_bytes(planned: "Memory") -> dict[str, int]:
    return {name: getattr(planned, field) for name, field in _PLANNED.items()}


def _collectives(setting: _Setting) -> "list[Collective]":
    from smalti.cost.layout.collectives import collectives

    parallel = setting.config.train.parallel
    return collectives(
        setting.config, setting.layout, setting.microbatch_tokens, dispatch=parallel.dispatch, context=parallel.context,
        device=setting.kind,
    )  # fmt: skip


def _step_time_s(setting: _Setting) -> float | None:
    from smalti.cost.layout.predict import predict

    if setting.device is None:
        return None
    parallel = setting.config.train.parallel
    return predict(
        setting.config, setting.device, setting.layout, setting.microbatch_tokens, dispatch=parallel.dispatch,
        context=parallel.context,
    ).step_s  # fmt: skip


def _needed(setting: _Setting, peak_bytes: int, planned: "Memory") -> int:
    """Return the peak plus the other memory of a GPU. Compiled experts save more tensors than the rehearsed operators,
    and only the planner counts them: for these the larger of both peaks is used."""
    from smalti.cost.memory.per_rank import Assumed

    assumed = Assumed()
    parallel = setting.config.train.parallel
    if setting.kind != "cuda":
        return peak_bytes
    if setting.config.model.moe is not None and parallel.compile is not False and setting.layout.expert == 1:
        peak_bytes = max(peak_bytes, planned.tensors_bytes)
    reserved = assumed.context_bytes + assumed.communicator_bytes * setting.layout.axes_in_use
    return round(peak_bytes * (1 + assumed.fragmentation_frac) + reserved)


def _fits(setting: _Setting, peak_bytes: int, planned: "Memory") -> bool | None:
    return None if setting.memory_bytes is None else _needed(setting, peak_bytes, planned) <= setting.memory_bytes
