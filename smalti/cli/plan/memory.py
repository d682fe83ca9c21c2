"""``smalti plan memory``: the bytes on one rank at the fullest moment of a step, in print."""

from typing import TYPE_CHECKING, Any

from smalti.cli.plan.recipe import Gpu, Json, Overrides, Recipe, load_recipe

if TYPE_CHECKING:
    from smalti.config.hardware import Hardware
    from smalti.config.run import RunConfig
    from smalti.cost.memory.rank import Memory


def memory(recipe: Recipe, overrides: Overrides = None, gpu: Gpu = None, as_json: Json = False) -> None:
    """Print the bytes on one rank at the fullest moment of a step, and with --gpu what fits and what would help."""
    from smalti.cli.tables import print_json
    from smalti.config.hardware import hardware
    from smalti.cost.memory.rank import memory_per_rank

    config = load_recipe(recipe, overrides)
    on = hardware(gpu) if gpu is not None else None
    found = memory_per_rank(config, device=_kind(on))
    if as_json:
        print_json({"name": config.name, **found.to_json(), **(_fit_json(config, on) if on else {})})
        return
    print("\n".join([*_head(config, found), "", *_parts(found), "", *_sums(config, found, on)]))


def _kind(on: "Hardware | None") -> str | None:
    """What the ranks are planned for: the device's kind, or what the recipe says."""
    from smalti.base.errors import UserError

    if on is not None and on.kind == "mps":
        raise UserError(
            f"smalti train does not run on {on.title}",
            allowed="CUDA, ROCm, a CPU",
            hint="--gpu h100-sxm, or leave it out",
        )
    return None if on is None else "cpu" if on.kind == "cpu" else "cuda"


def _head(config: "RunConfig", found: "Memory") -> list[str]:
    from smalti.cost.axes import layout_of

    parallel, train = config.train.parallel, config.train
    ranks = f"{parallel.ranks} {'rank' if parallel.ranks == 1 else 'ranks'}: {layout_of(config)}"
    recompute = "blocks run again" if parallel.activation_checkpointing == "full" else "no recomputation"
    return [
        f"{config.name}: {ranks}, {train.precision.compute}, microbatches of {found.microbatch_tokens:,} tokens, "
        f"{recompute}"
    ]


def _parts(found: "Memory") -> list[str]:
    from dataclasses import asdict

    from smalti.base.units import format_bytes, format_frac
    from smalti.cli.tables import table

    total = found.peak.parts.total
    rows = [
        (name, format_bytes(size), format_frac(size / total)) for name, size in asdict(found.peak.parts).items() if size
    ]
    return table(("at the peak", "bytes", "share"), rows).splitlines()


def _sums(config: "RunConfig", found: "Memory", on: "Hardware | None") -> list[str]:
    from smalti.base.units import format_bytes, format_frac
    from smalti.cli.tables import pairs

    phases = ", ".join(f"{phase} {format_bytes(size)}" for phase, size in found.phases.items())
    lines = [("tensors", f"{format_bytes(found.tensors_bytes)}, in phase {found.peak.phase}"), ("phases", phases)]
    if found.reserved_bytes:
        lines += [
            ("driver, NCCL", f"{format_bytes(found.reserved_bytes)} (assumed)"),
            ("fragments", f"{format_bytes(found.fragmentation_bytes)} (assumed)"),
        ]
    lines.append(("total", format_bytes(found.total_bytes)))
    if on is not None:
        from smalti.cost.memory.fit import largest_microbatch, memory_fixes

        capacity = on.available_memory_bytes
        fits = "it fits" if found.total_bytes <= capacity else "it does not fit"
        share = format_frac(found.total_bytes / capacity)
        lines.append(("device", f"{share} of {format_bytes(capacity)} ({on.title}): {fits}"))
        most = largest_microbatch(config, capacity, device=_kind(on))
        lines.append(("largest", f"microbatch of {most:,} tokens" if most else "not one sequence fits"))
        lines += [
            ("would help", f"{one.change}: {format_bytes(one.total_bytes)}; costs {one.costs}")
            for one in memory_fixes(config, capacity, device=_kind(on))
        ]
    return pairs(lines).splitlines()


def _fit_json(config: "RunConfig", on: "Hardware") -> dict[str, Any]:
    from dataclasses import asdict

    from smalti.cost.memory.fit import largest_microbatch, memory_fixes

    capacity, device = on.available_memory_bytes, _kind(on)
    return {
        "device": on.name,
        "device_memory_bytes": capacity,
        "largest_microbatch_tokens": largest_microbatch(config, capacity, device=device),
        "would_help": [asdict(one) for one in memory_fixes(config, capacity, device=device)],
    }
