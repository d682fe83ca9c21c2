"""``smalti plan scaling``: the time of a step on more and more devices, in print and as a picture."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from smalti.cli.plan.layout import ASSUMED, ASSUMED_GPU, Device, check_kind
from smalti.cli.plan.recipe import Json, Overrides, Recipe, load_recipe

if TYPE_CHECKING:
    from smalti.config.hardware import Hardware
    from smalti.config.run import RunConfig
    from smalti.cost.axes import Layout
    from smalti.cost.layout.scaling import Curve, Point

_TITLES = {
    "strong": "The recipe's batch on all of them (strong scaling)",
    "weak": "A batch that grows with the devices, to the recipe's (weak scaling)",
    "dense": "A dense model of as many active parameters, its batch growing likewise",
}


def scaling(
    recipe: Recipe,
    overrides: Overrides = None,
    gpu: Device = None,
    gpus: Annotated[str, typer.Option(help="Numbers of devices, with commas between them.")] = "8,64,512,3072",
    any_axis: Annotated[
        bool, typer.Option("--any-axis", help="Also layouts with more axes than replicate and shard.")
    ] = False,
    plot: Annotated[str | None, typer.Option(metavar="FILE.svg", help="Draw speed and MFU over devices.")] = None,
    as_json: Json = False,
) -> None:
    """Print the predicted step, speed and MFU on each number of devices, for the recipe's batch and for one that grows.

    The layout is the fastest of those with replicate and shard alone; where none of them fits, of all. A mixture of
    experts stands beside a dense model of as many active parameters.
    """
    from smalti.base.errors import UserError
    from smalti.config.hardware import hardware

    if plot is not None and not plot.endswith(".svg"):
        raise UserError(f"--plot {plot} is no picture", allowed="a file whose name ends with .svg")
    config, numbers = load_recipe(recipe, overrides), _numbers(gpus)
    device = hardware(gpu if gpu is not None else ASSUMED_GPU)
    check_kind(device, max(numbers))
    curves = _curves(config, device, numbers, any_axis=any_axis)
    if plot is not None:
        from smalti.base import store
        from smalti.cli.plan.scaling_plot import picture

        store.write_text(plot, picture(config.name, device.title, curves))
    if as_json:
        from smalti.cli.tables import print_json

        assumed = {"gpu": ASSUMED_GPU} if gpu is None else {}
        found = {name: _json(one) for name, one in curves.items()}
        print_json({"name": config.name, "gpu": device.name, "assumed": assumed, **found})
        return
    print(_text(config, device, curves) + (f"\n\n{ASSUMED}" if gpu is None else ""))
    if plot is not None:
        print(f"\npicture: {plot}")


def _numbers(given: str) -> list[int]:
    from smalti.base.errors import UserError

    try:
        return [int(number) for number in given.split(",")]
    except ValueError as error:
        raise UserError(
            f"--gpus {given}", allowed="whole numbers with commas between them", hint="--gpus 8,64,512"
        ) from error


def _curves(config: "RunConfig", device: "Hardware", numbers: list[int], *, any_axis: bool) -> dict[str, "Curve"]:
    from smalti.base.errors import UserError
    from smalti.cost.layout.rules import check_gpus
    from smalti.cost.layout.scaling import curve, dense_twin
    from smalti.cost.layout.search import fastest_layout

    def chosen(run: "RunConfig", number: int) -> tuple["Layout", int]:
        if not any_axis:
            try:
                return fastest_layout(run, device, number, data_alone=True)
            except UserError:  # none of them fits: any axis
                pass
        return fastest_layout(run, device, number)

    for number in numbers:
        check_gpus(number, device)
    found = {
        "strong": curve(config, device, numbers, chosen, weak=False),
        "weak": curve(config, device, numbers, chosen, weak=True),
    }
    if config.model.moe is not None:
        twin = config.model_copy(update={"model": dense_twin(config.model)})
        found["dense"] = curve(twin, device, numbers, chosen, weak=True)
    if not found["strong"].points and not found["weak"].points:
        number, why = next(iter(found["weak"].missing.items()))
        raise UserError(
            why, allowed="more devices", hint=f"smalti plan layout RECIPE --gpu {device.name} --gpus {number}"
        )
    return found


def _json(found: "Curve") -> dict[str, Any]:
    return {
        "points": [
            {
                **point.prediction.to_json(),
                "speed_up": point.speed_up,
                "ideal": point.ideal,
                "efficiency_frac": point.efficiency_frac,
            }
            for point in found.points
        ],
        "missing": {str(number): why for number, why in found.missing.items()},
    }


def _text(config: "RunConfig", device: "Hardware", curves: dict[str, "Curve"]) -> str:
    from smalti.cli.tables import table

    names = ("devices", "layout", "batch", "step", "tokens/s", "MFU", "interval", "speed-up", "of ideal", "compute",
             "memory", "bubble", "network")  # fmt: skip
    lines = [f"{config.name} on {device.title}"]
    for kind, found in curves.items():
        ratios = _beside_dense(found, curves["dense"]) if kind == "weak" and "dense" in curves else ""
        lines += ["", f"{_TITLES[kind]}:", ""]
        lines.append(table(names, [_row(point) for point in found.points]) if found.points else "none")
        lines += [f"{number:,}: {why}" for number, why in found.missing.items()]
        lines += [ratios] if ratios else []
    return "\n".join(lines)


def _row(point: "Point") -> tuple[str, ...]:
    from smalti.base.units import format_count, format_frac, format_seconds

    found = point.prediction
    low, high = found.mfu_interval or (0.0, 0.0)
    return (
        f"{found.gpus:,}",
        str(found.layout),
        format_count(found.tokens),
        format_seconds(found.step_s),
        format_count(found.tokens_per_s),
        format_frac(found.mfu) if found.mfu else "-",
        f"{format_frac(low)} to {format_frac(high)}" if found.mfu else "-",
        f"{point.speed_up:.4g}",
        format_frac(point.efficiency_frac),
        *(format_frac(found.shares[name]) for name in ("compute", "memory", "bubble", "network")),
    )


def _beside_dense(found: "Curve", dense: "Curve") -> str:
    from smalti.base.units import format_frac

    others = {point.prediction.gpus: point.prediction.tokens_per_s for point in dense.points}
    ratios = [
        f"{format_frac(point.prediction.tokens_per_s / others[point.prediction.gpus])} on {point.prediction.gpus:,}"
        for point in found.points
        if point.prediction.gpus in others
    ]
    return f"Speed beside a dense model of as many active parameters: {', '.join(ratios)}" if ratios else ""
