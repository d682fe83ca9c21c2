"""``smalti plan layout``: the layouts that fit a number of devices, the fastest first."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from smalti.cli.options import Json, Overrides, Recipe
from smalti.cli.plan.devices import ASSUMED, ASSUMED_GPU, GpuOrAssumed, require_layouts
from smalti.cli.plan.load import load_recipe

if TYPE_CHECKING:
    from smalti.config.hardware import Hardware
    from smalti.config.run import RunConfig
    from smalti.cost.layout.search import Candidate, SearchResult


def layout(
    recipe: Recipe,
    overrides: Overrides = None,
    gpu: GpuOrAssumed = None,
    gpus: Annotated[int | None, typer.Option(help="Devices; absent: train.parallel.ranks.")] = None,
    keep: Annotated[int, typer.Option(min=1, max=50, help="How many layouts to print.")] = 5,
    as_json: Json = False,
) -> None:
    """Print the fastest layouts that fit a number of devices, their largest microbatch, and why others are not listed.

    Give a run the axes of a line as train.parallel.replicate=16 and so on; train.parallel.AXIS=auto takes the fastest.
    """
    from smalti.config.hardware import hardware
    from smalti.cost.layout.search import find_layouts, smallest_gpus

    config, device = load_recipe(recipe, overrides), hardware(gpu if gpu is not None else ASSUMED_GPU)
    number = gpus if gpus is not None else config.train.parallel.ranks
    require_layouts(device, number)
    result = find_layouts(config, device, number, keep=keep)
    smallest = smallest_gpus(config, device, number)
    if as_json:
        from smalti.cli.tables import print_json

        assumed = {"gpu": ASSUMED_GPU} if gpu is None else {}
        print_json({**_json(config, device, number, result, smallest), "assumed": assumed})
    else:
        print(_text(config, device, number, result, smallest) + (f"\n\n{ASSUMED}" if gpu is None else ""))


def _json(
    config: "RunConfig", device: "Hardware", gpus: int, result: "SearchResult", smallest: int | None
) -> dict[str, Any]:
    return {
        "name": config.name,
        "gpu": device.name,
        "gpus": gpus,
        "smallest_gpus": smallest,
        "possible": result.tried,
        "layouts": [
            {
                **candidate.prediction.to_json(),
                "largest_microbatch_tokens": candidate.largest_microbatch_tokens,
                "memory_bytes": candidate.memory.total_bytes,
                "device_memory_bytes": device.available_memory_bytes,
            }
            for candidate in result.best
        ],
        "others": result.others,
    }


def _text(config: "RunConfig", device: "Hardware", gpus: int, result: "SearchResult", smallest: int | None) -> str:
    from smalti.base.units import format_bytes
    from smalti.cli.tables import pairs, table

    head = (
        f"{config.name} on {gpus:,} x {device.title} ({format_bytes(device.available_memory_bytes)}): "
        f"{result.tried:,} {'layout is' if result.tried == 1 else 'layouts are'} possible"
    )
    names = (
        "layout",
        "rows",
        "max rows",
        "microbatches",
        "memory",
        "step",
        "tokens/s",
        "MFU",
        "interval",
        "network",
        "bubble",
    )
    rows = [_row(config, candidate) for candidate in result.best]
    lines = [head, "", table(names, rows)]
    reasons = _grouped(result.others)
    if reasons:
        lines += ["", "Why not:", pairs(reasons)]
    if smallest is not None:
        lines += ["", f"The fewest devices that hold one row on a rank: {smallest:,} x {device.title}"]
    return "\n".join(lines)


def _row(config: "RunConfig", candidate: "Candidate") -> tuple[str, ...]:
    from smalti.base.units import format_bytes, format_count, format_frac, format_seconds

    prediction = candidate.prediction
    seq_len = config.batches_and_lengths[-1][1]
    low, high = prediction.mfu_interval or (0.0, 0.0)
    return (
        str(prediction.layout),
        str(prediction.microbatch_tokens // seq_len),
        str(candidate.largest_microbatch_tokens // seq_len),
        str(prediction.microbatches),
        format_bytes(candidate.memory.total_bytes),
        format_seconds(prediction.step_s),
        format_count(prediction.tokens_per_s),
        format_frac(prediction.mfu) if prediction.mfu else "-",
        f"{format_frac(low)} to {format_frac(high)}" if prediction.mfu else "-",
        format_frac(prediction.shares["network"]),
        format_frac(prediction.shares["bubble"]),
    )


def _grouped(others: dict[str, str]) -> list[tuple[str, str]]:
    """Return the reasons by axis, with the sizes that share one; layouts of several axes are in the JSON alone."""
    sizes_by_reason: dict[tuple[str, str], list[str]] = {}
    for kind, why in others.items():
        if " x " not in kind:
            axis, _, size = kind.rpartition(" ")
            sizes_by_reason.setdefault((axis, why), []).append(size)
    return [(f"{axis} {', '.join(sizes)}".strip(), why) for (axis, why), sizes in sizes_by_reason.items()]
