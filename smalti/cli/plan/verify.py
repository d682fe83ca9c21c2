"""``smalti plan verify``: compares the prediction of a run with what it measured."""

from typing import Annotated, Any

import typer

from smalti.cli.options import Json, Run
from smalti.cli.plan.devices import Gpu, device_of_run
from smalti.cli.plan.measure import Measure, measure_for


def verify(
    run: Run,
    within: Annotated[
        float | None,
        typer.Option(help="Exit 3 if the measured step time is not within this factor of the predicted one."),
    ] = None,
    gpu: Gpu = None,
    measure: Measure = False,
    as_json: Json = False,
) -> None:
    """Compare the plan with what the run measured: step time, tokens/s, MFU, time, checkpoints.

    Predicts for the GPU that the run recorded, unless another device is given. For a run on a CPU give a file of
    'smalti plan hardware this-machine --save', or --measure on that machine. MFU uses the peak that the run recorded.
    """
    from smalti.base.errors import CheckFailed, UserError
    from smalti.cli.tables import print_json
    from smalti.config.hardware import hardware
    from smalti.config.run import RunConfig
    from smalti.plan.verify import verify as compare
    from smalti.track.report.read import read_run
    from smalti.track.run import RunFolder

    if within is not None and within < 1:
        raise UserError(f"--within {within} is less than 1", allowed="1 or more, such as 1.5")
    folder = RunFolder.read(run)
    config, record = folder.config(RunConfig), read_run(folder.path)
    if gpu is not None and measure:
        raise UserError("--gpu and --measure exclude each other", allowed="one of them")
    machine = hardware(gpu) if gpu is not None else measure_for(config) if measure else device_of_run(record)
    comparisons = compare(
        config,
        machine=machine,
        peak_flops_per_s=record.of_events("peak_flops_per_s"),
        tokens_per_s=[value for value in record.series("throughput/tokens_per_sec")[1] if value == value],
        tokens_learned=record.last("time/token"),
        checkpoint_bytes=record.last("ckpt/bytes"),
        checkpoint_blocked_s=record.last("ckpt/block_s"),
        checkpoint_staging_bytes=record.last("ckpt/staging_bytes"),
    )
    if as_json:
        print_json({"name": config.name, "comparisons": [comparison.to_json() for comparison in comparisons]})
    else:
        print(_verify_text(comparisons, machine, record.of_events("peak_flops_per_s")))
    ratio = next(comparison.ratio for comparison in comparisons if comparison.name == "step_s")
    if within is not None and (ratio is None or not 1 / within <= ratio <= within):
        text = "was not predicted: its device is not known" if ratio is None else f"is {ratio:.2f} times the predicted"
        raise CheckFailed(
            f"the measured step time {text}",
            allowed=f"{1 / within:.2f} to {within:.2f} times",
            hint=None if machine else "--measure, or --gpu with a device or a file of one",
        )


def _verify_text(comparisons: list[Any], machine: Any, peak: float | None) -> str:
    from smalti.base.units import format_flops
    from smalti.cli.tables import table
    from smalti.cost.flops import FORMULA

    def text(value: float | None) -> str:
        return "-" if value is None else f"{value:.4g}" if value < 1e5 else f"{value:.0f}"

    rows = [
        (comparison.name, text(comparison.predicted), text(comparison.measured), text(comparison.ratio))
        for comparison in comparisons
    ]
    by = f"predicted for {machine.title}" if machine else "no time is predicted: give --gpu or --measure"
    of = f"MFU of {format_flops(peak)}/s by {FORMULA}" if peak is not None else "the run recorded no peak: no MFU"
    return f"{table(('', 'predicted', 'measured', 'ratio'), rows)}\n\n{by}; {of}"
