"""``smalti plan verify``: what was predicted against what was measured, in print."""

from typing import Annotated, Any, Literal

import typer

from smalti.cli.plan_recipe import Json, matmul_frac_of


def verify(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run folder, or its name in runs/.")],
    within: Annotated[
        float | None, typer.Option(help="Exit 3 unless measured step time is within this factor of the predicted.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Print what the plan predicted against what the run measured: step time, tokens/s, MFU, time.

    Predicted with the peak that the run itself recorded, so it says how good the formulas are, not the probe.
    """
    from smalti.base.errors import Refusal, UserError
    from smalti.cli.tables import print_json
    from smalti.config.run import RunConfig
    from smalti.plan.verify import verify as compare
    from smalti.track.report.read import read_run
    from smalti.track.run import RunFolder

    if within is not None and within < 1:
        raise UserError(f"--within {within} is a factor of less than 1", allowed="1 or more, as in 1.5")
    folder = RunFolder.read(run)
    config, record = folder.config(RunConfig), read_run(folder.path)
    device: Literal["cpu", "cuda"] = "cuda" if str(record.of_events("device")).startswith("cuda") else "cpu"
    found = compare(
        config,
        peak_flops_per_s=record.of_events("peak_flops_per_s"),
        matmul_frac=matmul_frac_of(record, config.train.precision.compute),
        device=device,
        tokens_per_s=[value for value in record.series("throughput/tokens_per_sec")[1] if value == value],
        tokens_learned=record.last("time/token"),
    )
    if as_json:
        print_json({"name": config.name, "comparisons": [one.to_json() for one in found]})
    else:
        print(_verify_text(found, record.of_events("peak_flops_per_s")))
    ratio = next(one.ratio for one in found if one.name == "step_s")
    if within is not None and (ratio is None or not 1 / within <= ratio <= within):
        text = (
            "was not predicted (the run recorded no peak)" if ratio is None else f"is {ratio:.2f} times the predicted"
        )
        raise Refusal(f"the measured step time {text}", allowed=f"{1 / within:.2f} to {within:.2f} times")


def _verify_text(found: list[Any], peak: float | None) -> str:
    from smalti.base.units import format_flops
    from smalti.cli.tables import table
    from smalti.plan.flops import FORMULA

    def text(value: float | None) -> str:
        return "-" if value is None else f"{value:.4g}" if value < 1e5 else f"{value:.0f}"

    rows = [(one.name, text(one.predicted), text(one.measured), text(one.ratio)) for one in found]
    note = (
        f"peak {format_flops(peak)}/s" if peak is not None else "the run recorded no peak: nothing is predicted in time"
    )
    return f"{table(('', 'predicted', 'measured', 'ratio'), rows)}\n\n{note}; MFU by {FORMULA}"
