"""``smalti plan scaling``: the predicted step on a growing number of devices; printed, and plotted."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from smalti.cli.options import Json, Overrides, Recipe
from smalti.cli.plan.devices import ASSUMED, ASSUMED_GPU, GpuOrAssumed, require_layouts
from smalti.cli.plan.load import load_recipe

if TYPE_CHECKING:
    from smalti.config.hardware import Hardware
    from smalti.config.run import RunConfig
    from smalti.cost.axes import Layout
    from smalti.cost.layout.scaling import Curve, Point

_TITLES = {
    "strong": "The recipe's batch on each number of devices (strong scaling)",
    "weak": "A batch that grows with the devices, up to the recipe's (weak scaling)",
    "dense": "A dense model with as many active parameters; its batch grows too",
}


def scaling(
    recipe: Recipe,
    overrides: Overrides = None,
    gpu: GpuOrAssumed = None,
    gpus: Annotated[str, typer.Option(help="Numbers of devices, separated by commas.")] = "8,64,512,3072",
    any_axis: Annotated[
        bool, typer.Option("--any-axis", help="Also try layouts with more axes than replicate and shard.")
    ] = False,
    plot: Annotated[str | None, typer.Option(metavar="FILE.svg", help="Draw speed and MFU over devices.")] = None,
    as_json: Json = False,
) -> None:
    """Print the predicted step, speed and MFU on each number of devices, for a fixed batch and for one that grows.

    The layout is the fastest of those with replicate and shard alone; where none of them fits, of all. An MoE is
    compared with a dense model that has as many active parameters.
    """
    from smalti.cli.plan.plot_file import require_svg
    from smalti.config.hardware import hardware

    require_svg(plot)
    config = load_recipe(recipe, overrides)
    numbers = _numbers(gpus)
    device = hardware(gpu if gpu is not None else ASSUMED_GPU)
    require_layouts(device, max(numbers))
    curves = _curves(config, device, numbers, any_axis=any_axis)
    if plot is not None:
        from smalti.base import store
        from smalti.cli.plan.scaling_plot import plot_scaling

        store.write_text(plot, plot_scaling(config.name, device.title, curves))
    if as_json:
        from smalti.cli.tables import print_json

        assumed = {"gpu": ASSUMED_GPU} if gpu is None else {}
        points = {name: _json(curve) for name, curve in curves.items()}
        print_json({"name": config.name, "gpu": device.name, "assumed": assumed, **points})
        return
    print(_text(config, device, curves) + (f"\n\n{ASSUMED}" if gpu is None else ""))
    if plot is not None:
        print(f"\nplot: {plot}")


def _numbers(text: str) -> list[int]:
    from smalti.base.errors import UserError

    try:
        return [int(number) for number in text.split(",")]
    except ValueError as error:
        raise UserError(
            f"--gpus {text} is not a list of numbers",
            allowed="whole numbers separated by commas",
            hint="--gpus 8,64,512",
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
    curves = {
        "strong": curve(config, device, numbers, chosen, weak=False),
        "weak": curve(config, device, numbers, chosen, weak=True),
    }
    if config.model.moe is not None:
        twin = config.model_copy(update={"model": dense_twin(config.model)})
        curves["dense"] = curve(twin, device, numbers, chosen, weak=True)
    if not curves["strong"].points and not curves["weak"].points:
        number, why = next(iter(curves["weak"].missing.items()))
        raise UserError(
            why, allowed="more devices", hint=f"smalti plan layout RECIPE --gpu {device.name} --gpus {number}"
        )
    return curves


def _json(curve: "Curve") -> dict[str, Any]:
    return {
        "points": [
            {
                **point.prediction.to_json(),
                "speed_up": point.speed_up,
                "ideal": point.ideal,
                "efficiency_frac": point.efficiency_frac,
            }
            for point in curve.points
        ],
        "missing": {str(number): why for number, why in curve.missing.items()},
    }


def _text(config: "RunConfig", device: "Hardware", curves: dict[str, "Curve"]) -> str:
    from smalti.cli.tables import table

    names = ("devices", "layout", "batch", "step", "tokens/s", "MFU", "interval", "speed-up", "of ideal", "compute",
             "memory", "bubble", "network")  # fmt: skip
    lines = [f"{config.name} on {device.title}"]
    for kind, curve in curves.items():
        ratios = _relative_to_dense(curve, curves["dense"]) if kind == "weak" and "dense" in curves else ""
        lines += ["", f"{_TITLES[kind]}:", ""]
        lines.append(table(names, [_row(point) for point in curve.points]) if curve.points else "none")
        lines += [f"{number:,}: {why}" for number, why in curve.missing.items()]
        lines += [ratios] if ratios else []
    return "\n".join(lines)


def _row(point: "Point") -> tuple[str, ...]:
    from smalti.base.units import format_count, format_frac, format_seconds

    prediction = point.prediction
    low, high = prediction.mfu_interval or (0.0, 0.0)
    return (
        f"{prediction.gpus:,}",
        str(prediction.layout),
        format_count(prediction.tokens),
        format_seconds(prediction.step_s),
        format_count(prediction.tokens_per_s),
        format_frac(prediction.mfu) if prediction.mfu else "-",
        f"{format_frac(low)} to {format_frac(high)}" if prediction.mfu else "-",
        f"{point.speed_up:.4g}",
        format_frac(point.efficiency_frac),
        *(format_frac(prediction.shares[name]) for name in ("compute", "memory", "bubble", "network")),
    )


def _relative_to_dense(curve: "Curve", dense: "Curve") -> str:
    from smalti.base.units import format_frac

    others = {point.prediction.gpus: point.prediction.tokens_per_s for point in dense.points}
    ratios = [
        f"{format_frac(point.prediction.tokens_per_s / others[point.prediction.gpus])} on {point.prediction.gpus:,}"
        for point in curve.points
        if point.prediction.gpus in others
    ]
    return f"Speed relative to a dense model with as many active parameters: {', '.join(ratios)}" if ratios else ""
