"""``smalti plan verify``: what was predicted against what was measured, in print."""

from typing import Annotated, Any

import typer

from smalti.cli.plan.recipe import Gpu, Json, Measure, device_of, measured_here


def verify(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run folder, or its name in runs/.")],
    within: Annotated[
        float | None, typer.Option(help="Exit 3 unless measured step time is within this factor of the predicted.")
    ] = None,
    gpu: Gpu = None,
    measure: Measure = False,
    as_json: Json = False,
) -> None:
    """Print what the plan predicts against what the run measured: step time, tokens/s, MFU, time.

    Predicted for the GPU that the run recorded, unless another device is given. For a run on a CPU give a file of
    'smalti plan hardware this-machine --save', or --measure on that machine. MFU is of the run's own peak.
    """
    from smalti.base.errors import CheckFailed, UserError
    from smalti.cli.tables import print_json
    from smalti.config.hardware import hardware
    from smalti.config.run import RunConfig
    from smalti.plan.verify import verify as compare
    from smalti.track.report.read import read_run
    from smalti.track.run import RunFolder

    if within is not None and within < 1:
        raise UserError(f"--within {within} is a factor of less than 1", allowed="1 or more, as in 1.5")
    folder = RunFolder.read(run)
    config, record = folder.config(RunConfig), read_run(folder.path)
    if gpu is not None and measure:
        raise UserError("--gpu and --measure both say how fast the ranks are", allowed="one of them")
    machine = hardware(gpu) if gpu is not None else measured_here(config) if measure else device_of(record)
    found = compare(
        config,
        machine=machine,
        peak_flops_per_s=record.of_events("peak_flops_per_s"),
        tokens_per_s=[value for value in record.series("throughput/tokens_per_sec")[1] if value == value],
        tokens_learned=record.last("time/token"),
    )
    if as_json:
        print_json({"name": config.name, "comparisons": [one.to_json() for one in found]})
    else:
        print(_verify_text(found, machine, record.of_events("peak_flops_per_s")))
    ratio = next(one.ratio for one in found if one.name == "step_s")
    if within is not None and (ratio is None or not 1 / within <= ratio <= within):
        text = "was not predicted: its device is not known" if ratio is None else f"is {ratio:.2f} times the predicted"
        raise CheckFailed(
            f"the measured step time {text}",
            allowed=f"{1 / within:.2f} to {within:.2f} times",
            hint=None if machine else "--measure, or --gpu with a device or a file of one",
        )


def _verify_text(found: list[Any], machine: Any, peak: float | None) -> str:
    from smalti.base.units import format_flops
    from smalti.cli.tables import table
    from smalti.cost.flops import FORMULA

    def text(value: float | None) -> str:
        return "-" if value is None else f"{value:.4g}" if value < 1e5 else f"{value:.0f}"

    rows = [(one.name, text(one.predicted), text(one.measured), text(one.ratio)) for one in found]
    by = f"predicted for {machine.title}" if machine else "nothing is predicted in time: give --gpu or --measure"
    of = f"MFU of {format_flops(peak)}/s by {FORMULA}" if peak is not None else "the run recorded no peak: no MFU"
    return f"{table(('', 'predicted', 'measured', 'ratio'), rows)}\n\n{by}; {of}"
