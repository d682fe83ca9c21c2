"""``smalti plan memory``: the peak bytes of one rank in a step."""

from typing import TYPE_CHECKING, Any

from smalti.cli.options import Json, Overrides, Recipe
from smalti.cli.plan.devices import Gpu, require_trainable
from smalti.cli.plan.load import load_recipe

if TYPE_CHECKING:
    from smalti.config.hardware import Hardware
    from smalti.config.run import RunConfig
    from smalti.cost.memory.per_rank import Memory


def memory(recipe: Recipe, overrides: Overrides = None, gpu: Gpu = None, as_json: Json = False) -> None:
    """Print the peak bytes of one rank in a step; with --gpu, also what fits and which changes would help."""
    from smalti.cli.tables import print_json
    from smalti.config.hardware import hardware
    from smalti.cost.memory.per_rank import memory_per_rank

    config = load_recipe(recipe, overrides)
    device = hardware(gpu) if gpu is not None else None
    plan = memory_per_rank(config, device=_kind(device))
    if as_json:
        print_json({"name": config.name, **plan.to_json(), **(_fit_json(config, device) if device else {})})
        return
    print("\n".join([*_head(config, plan), "", *_parts(plan), "", *_sums(config, plan, device)]))


def _kind(device: "Hardware | None") -> str | None:
    """Return the kind of device to plan for, None for that of the recipe."""
    if device is None:
        return None
    require_trainable(device)
    return "cpu" if device.kind == "cpu" else "cuda"


def _head(config: "RunConfig", memory: "Memory") -> list[str]:
    from smalti.cost.axes import layout_of

    parallel, train = config.train.parallel, config.train
    ranks = f"{parallel.ranks} {'rank' if parallel.ranks == 1 else 'ranks'}: {layout_of(config)}"
    recompute = "blocks recomputed" if parallel.activation_checkpointing == "full" else "no recomputation"
    return [
        f"{config.name}: {ranks}, {train.precision.compute}, microbatches of {memory.microbatch_tokens:,} tokens, "
        f"{recompute}"
    ]


def _parts(memory: "Memory") -> list[str]:
    from dataclasses import asdict

    from smalti.base.units import format_bytes, format_frac
    from smalti.cli.tables import table

    total = memory.peak.parts.total
    rows = [
        (name, format_bytes(size), format_frac(size / total))
        for name, size in asdict(memory.peak.parts).items()
        if size
    ]
    return table(("at the peak", "bytes", "share"), rows).splitlines()


def _sums(config: "RunConfig", memory: "Memory", device: "Hardware | None") -> list[str]:
    from smalti.base.units import format_bytes, format_frac
    from smalti.cli.tables import pairs
    from smalti.cost.memory.per_rank import peer_copies

    phases = ", ".join(f"{phase} {format_bytes(size)}" for phase, size in memory.phases.items())
    lines = [("tensors", f"{format_bytes(memory.tensors_bytes)}, in phase {memory.peak.phase}"), ("phases", phases)]
    where = "" if memory.is_staged_on_device else ", in the host's memory"
    lines.append(("checkpoint", f"{format_bytes(memory.staging_bytes)}, the copy that is written{where}"))
    if memory.peer_copies_bytes:
        copies = f"{peer_copies(config)} copies of its part in shared memory"
        lines.append(("peer copies", f"{format_bytes(memory.peer_copies_bytes)}, {copies}"))
    if memory.reserved_bytes:
        lines += [
            ("driver, NCCL", f"{format_bytes(memory.reserved_bytes)} (assumed)"),
            ("fragments", f"{format_bytes(memory.fragmentation_bytes)} (assumed)"),
        ]
    lines.append(("total", format_bytes(memory.total_bytes)))
    if device is not None:
        from smalti.cost.memory.fit import largest_microbatch, memory_fixes

        capacity = device.available_memory_bytes
        fits = "it fits" if memory.total_bytes <= capacity else "it does not fit"
        share = format_frac(memory.total_bytes / capacity)
        lines.append(("device", f"{share} of {format_bytes(capacity)} ({device.title}): {fits}"))
        largest = largest_microbatch(config, capacity, device=_kind(device))
        lines.append(("largest", f"microbatch of {largest:,} tokens" if largest else "not one sequence fits"))
        lines += [
            ("would help", f"{fix.change}: {format_bytes(fix.total_bytes)}; costs {fix.costs}")
            for fix in memory_fixes(config, capacity, device=_kind(device))
        ]
    return pairs(lines).splitlines()


def _fit_json(config: "RunConfig", device: "Hardware") -> dict[str, Any]:
    from dataclasses import asdict

    from smalti.cost.memory.fit import largest_microbatch, memory_fixes

    capacity = device.available_memory_bytes
    kind = _kind(device)
    return {
        "device": device.name,
        "device_memory_bytes": capacity,
        "largest_microbatch_tokens": largest_microbatch(config, capacity, device=kind),
        "would_help": [asdict(fix) for fix in memory_fixes(config, capacity, device=kind)],
    }
