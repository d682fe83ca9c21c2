"""``smalti plan layout``: which layouts fit so many devices, the fastest first, in print."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from smalti.cli.plan.recipe import Json, Overrides, Recipe, load_recipe

if TYPE_CHECKING:
    from smalti.config.hardware import Hardware
    from smalti.config.run import RunConfig
    from smalti.cost.layout.search import Candidate, SearchResult

Device = Annotated[
    str | None,
    typer.Option("--gpu", help="A name of 'smalti plan hardware', or a .yaml file of a device; absent: h100-sxm."),
]
ASSUMED_GPU = "h100-sxm"
ASSUMED = f"assumed: --gpu {ASSUMED_GPU}, because none is given"


def layout(
    recipe: Recipe,
    overrides: Overrides = None,
    gpu: Device = None,
    gpus: Annotated[int | None, typer.Option(help="Devices; absent: train.parallel.ranks.")] = None,
    keep: Annotated[int, typer.Option(min=1, max=50, help="How many layouts to print.")] = 5,
    as_json: Json = False,
) -> None:
    """Print the fastest layouts that fit so many devices, with their largest microbatch, and why others are not there.

    The first line's axes as they are given to a run: train.parallel.replicate=16 and so on; train.parallel.AXIS=auto
    takes it by itself.
    """
    from smalti.config.hardware import hardware
    from smalti.cost.layout.search import find_layouts, smallest_gpus

    config, device = load_recipe(recipe, overrides), hardware(gpu if gpu is not None else ASSUMED_GPU)
    number = gpus if gpus is not None else config.train.parallel.ranks
    check_kind(device, number)
    found = find_layouts(config, device, number, keep=keep)
    smallest = smallest_gpus(config, device, number)
    if as_json:
        from smalti.cli.tables import print_json

        assumed = {"gpu": ASSUMED_GPU} if gpu is None else {}
        print_json({**_json(config, device, number, found, smallest), "assumed": assumed})
    else:
        print(_text(config, device, number, found, smallest) + (f"\n\n{ASSUMED}" if gpu is None else ""))


def check_kind(device: "Hardware", number: int) -> None:
    """UserError for several ranks on a CPU: they share its threads and memory, which no layout here reckons with; and
    for a device that the trainer does not run on."""
    from smalti.base.errors import UserError

    if device.kind == "mps":
        raise UserError(f"smalti train does not run on {device.title}", allowed="CUDA, ROCm", hint="--gpu h100-sxm")
    if device.kind == "cpu" and number != 1:
        raise UserError(
            f"{number:,} x {device.title}: ranks on a CPU share its threads and memory, and layouts are of devices of "
            "their own",
            allowed="--gpus 1 of a CPU, or a GPU",
            hint=f"smalti plan time RECIPE train.parallel.ranks={number} --gpu {device.name}.yaml, or --gpu h100-sxm",
        )


def _json(
    config: "RunConfig", device: "Hardware", gpus: int, found: "SearchResult", smallest: int | None
) -> dict[str, Any]:
    return {
        "name": config.name,
        "gpu": device.name,
        "gpus": gpus,
        "smallest_gpus": smallest,
        "possible": found.tried,
        "layouts": [
            {
                **one.prediction.to_json(),
                "largest_microbatch_tokens": one.largest_microbatch_tokens,
                "memory_bytes": one.memory.total_bytes,
                "device_memory_bytes": device.available_memory_bytes,
            }
            for one in found.best
        ],
        "others": found.others,
    }


def _text(config: "RunConfig", device: "Hardware", gpus: int, found: "SearchResult", smallest: int | None) -> str:
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
    )
    rows = [_row(config, one) for one in found.best]
    lines = [head, "", table(names, rows)]
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
    )


def _told(others: dict[str, str]) -> list[tuple[str, str]]:
    """One axis at a time, sizes of one axis with one reason together; those of several axes are in the JSON."""
    told: dict[tuple[str, str], list[str]] = {}
    for kind, why in others.items():
        if " x " not in kind:
            axis, _, size = kind.rpartition(" ")
            told.setdefault((axis, why), []).append(size)
    return [(f"{axis} {', '.join(sizes)}".strip(), why) for (axis, why), sizes in told.items()]
