"""``smalti plan layout``: which layouts fit so many devices, the fastest first, in print."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from smalti.cli.plan_recipe import Json, Overrides, Recipe, load_recipe

if TYPE_CHECKING:
    from smalti.config.hardware import Hardware
    from smalti.config.run import RunConfig
    from smalti.plan.parallel.layouts import Candidate, Layouts

Device = Annotated[str, typer.Option("--gpu", help="A name of 'smalti plan hardware', or a .yaml file of a device.")]

PLANNED = "planned: the trainer has replicate and shard alone"


def layout(
    recipe: Recipe,
    overrides: Overrides = None,
    gpu: Device = "h100-sxm",
    gpus: Annotated[int | None, typer.Option(help="Devices; absent: train.parallel.ranks.")] = None,
    keep: Annotated[int, typer.Option(min=1, max=50, help="How many layouts to print.")] = 5,
    as_json: Json = False,
) -> None:
    """Print the fastest layouts that fit so many devices, with their largest microbatch, and why others are not there.

    Axes tensor, pipeline, sequence and expert go by their published formulas; the trainer has none of them yet.
    """
    from smalti.config.hardware import hardware
    from smalti.plan.parallel.layouts import find, smallest_gpus

    config, device = load_recipe(recipe, overrides), hardware(gpu)
    number = gpus if gpus is not None else config.train.parallel.ranks
    found = find(config, device, number, keep=keep)
    smallest = smallest_gpus(config, device, number)
    if as_json:
        from smalti.cli.tables import print_json

        print_json(_json(config, device, number, found, smallest))
    else:
        print(_text(config, device, number, found, smallest))


def _json(config: "RunConfig", device: "Hardware", gpus: int, found: "Layouts", smallest: int | None) -> dict[str, Any]:
    return {
        "name": config.name,
        "gpu": device.name,
        "gpus": gpus,
        "smallest_gpus": smallest,
        "possible": found.tried,
        "layouts": [
            {
                **one.prediction.to_json(),
                "in_trainer": one.in_trainer,
                "largest_microbatch_tokens": one.largest_microbatch_tokens,
                "memory_bytes": one.memory.total_bytes,
                "device_memory_bytes": device.available_memory_bytes,
            }
            for one in found.best
        ],
        "others": found.others,
    }


def _text(config: "RunConfig", device: "Hardware", gpus: int, found: "Layouts", smallest: int | None) -> str:
    from smalti.base.units import format_bytes
    from smalti.cli.tables import pairs, table

    head = (
        f"{config.name} on {gpus:,} x {device.title} ({format_bytes(device.available_memory_bytes)}): "
        f"{found.tried:,} {'layout is' if found.tried == 1 else 'layouts are'} possible"
    )
    names = (
        "layout",
        "rows",
        "at most",
        "passes",
        "memory",
        "step",
        "tokens/s",
        "MFU",
        "interval",
        "network",
        "bubble",
        "",
    )
    rows = [_row(config, one) for one in found.best]
    lines = [head, "", table(names, rows)]
    if any(not one.in_trainer for one in found.best):
        lines += ["", f"*  {PLANNED}"]
    losers = _told(found.others)
    if losers:
        lines += ["", "Why not:", pairs(losers)]
    if smallest is not None:
        lines += ["", f"The least that holds it with one row on a rank: {smallest:,} x {device.title}"]
    return "\n".join(lines)


def _row(config: "RunConfig", one: "Candidate") -> tuple[str, ...]:
    from smalti.base.units import format_bytes, format_count, format_frac, format_seconds

    found = one.prediction
    seq_len = config.batches_and_lengths[-1][1]
    low, high = found.mfu_interval or (0.0, 0.0)
    return (
        str(found.layout),
        str(found.microbatch_tokens // seq_len),
        str(one.largest_microbatch_tokens // seq_len),
        str(found.microbatches),
        format_bytes(one.memory.total_bytes),
        format_seconds(found.step_s),
        format_count(found.tokens_per_s),
        format_frac(found.mfu) if found.mfu else "-",
        f"{format_frac(low)} to {format_frac(high)}" if found.mfu else "-",
        format_frac(found.shares["network"]),
        format_frac(found.shares["bubble"]),
        "" if one.in_trainer else "*",
    )


def _told(others: dict[str, str]) -> list[tuple[str, str]]:
    """One axis at a time, sizes of one axis with one reason together; those of several axes are in the JSON."""
    told: dict[tuple[str, str], list[str]] = {}
    for kind, why in others.items():
        if " x " not in kind:
            axis, _, size = kind.rpartition(" ")
            told.setdefault((axis, why), []).append(size)
    return [(f"{axis} {', '.join(sizes)}".strip(), why) for (axis, why), sizes in told.items()]
