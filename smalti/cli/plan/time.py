"""``smalti plan time``: how long a run takes, part by part."""

from typing import TYPE_CHECKING, Annotated

import typer

from smalti.cli.options import Json, Overrides, Recipe
from smalti.cli.plan.devices import Gpu
from smalti.cli.plan.load import load_recipe
from smalti.cli.plan.measure import Measure, measure_for

if TYPE_CHECKING:
    from smalti.config.hardware import Hardware
    from smalti.config.run import RunConfig
    from smalti.cost.step_time.step import StepTime
    from smalti.plan.run_plan import RunPlan


def time(
    recipe: Recipe,
    overrides: Overrides = None,
    gpu: Gpu = None,
    measure: Measure = False,
    rate: Annotated[
        float | None, typer.Option(help="FLOP/s of training on all ranks together, instead of a device.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Print parameters, tokens, FLOPs, and the predicted time of a run: the parts of a step, what bounds it, MFU.

    The device is given (--gpu, a name or a file of 'smalti plan hardware this-machine --save') or measured here
    (--measure). The time leaves out reading data, evals in the loop and checkpoints. Epochs are printed for token
    files on this machine; 'smalti plan data' has those in other stores.
    """
    from smalti.base.errors import UserError
    from smalti.config.hardware import hardware
    from smalti.data.order.schedule import tokens_by_source
    from smalti.plan.run_plan import plan_run

    config = load_recipe(recipe, overrides)
    options = {"--gpu": gpu, "--measure": measure or None, "--rate": rate}
    used = [option for option, value in options.items() if value is not None]
    if len(used) > 1:
        raise UserError(f"{' and '.join(used)} exclude each other", allowed="one of them")
    machine = hardware(gpu) if gpu is not None else measure_for(config) if measure else None
    plan = plan_run(config, machine=machine, rate_flops_per_s=rate)
    taken = tokens_by_source(config.data, config.length)
    epochs = {name: taken[name] / size for name, size in _source_tokens(config).items()}
    if as_json:
        from smalti.cli.tables import print_json

        device = {"device": machine.name if machine else None, "step": plan.step.to_json() if plan.step else None}
        print_json({"name": config.name, **plan.to_json(), **device, "epochs": epochs})
        return
    print(_time_text(config, plan, machine, epochs))


def _source_tokens(config: "RunConfig") -> dict[str, int]:
    """Return the tokens of each source with token files on this machine; other stores are not read."""
    from smalti.base import store

    tokens = {}
    for name, source in config.data.sources.items():
        path = store.join(source.path, "manifest.json")
        if store.is_local(path) and store.exists(path):
            tokens[name] = int(store.read_json(path)["n_tokens"])
    return tokens


def _time_text(config: "RunConfig", plan: "RunPlan", machine: "Hardware | None", epochs: dict[str, float]) -> str:
    from smalti.base.units import format_count, format_flops
    from smalti.cli.tables import pairs
    from smalti.cost.flops import CAUSAL_FORMULA, FORMULA, FORMULA_TEXT
    from smalti.plan.run_plan import CHINCHILLA_TOKENS_PER_PARAM, length_text

    params = plan.params
    per_param = f"{plan.tokens_per_param:.3g} of all, {plan.tokens_per_active_param:.3g} of the active"
    lines = [
        ("run", config.name),
        ("parameters", f"{format_count(params.total)} total, {format_count(params.active)} active"),
        ("", f"{format_count(params.embedding)} embedding, {format_count(params.head)} output head, "
             f"{format_count(params.non_embedding)} in the blocks"),
        ("tokens", f"{format_count(plan.tokens)} = {length_text(config.length)}"),
        ("tokens / parameter", f"{per_param} (Chinchilla: about {CHINCHILLA_TOKENS_PER_PARAM} for a dense model)"),
        *(("epochs of " + name, f"{value:.2f}") for name, value in epochs.items()),
        ("FLOPs / token", f"{format_flops(plan.flops_per_token)} by {FORMULA}; "
                          f"{format_flops(plan.flops_per_token_causal)} by {CAUSAL_FORMULA}"),
        ("FLOPs", format_flops(plan.total_flops)),
        *_time_lines(config, plan, machine),
    ]  # fmt: skip
    parts = f"\n\n{_parts_table(plan.step)}" if plan.step else ""
    return f"{pairs(lines)}{parts}\n\n{FORMULA}: {FORMULA_TEXT}"


def _time_lines(config: "RunConfig", plan: "RunPlan", machine: "Hardware | None") -> list[tuple[str, str]]:
    from smalti.base.units import format_count, format_flops, format_frac, format_seconds
    from smalti.cost.flops import FORMULA

    if plan.step_s is None or plan.total_s is None or plan.tokens_per_s is None:
        return [("time", "unknown without a device: give --gpu, --measure or --rate")]
    lines = [("speed", f"{format_count(plan.tokens_per_s)} tokens/s"), ("time", format_seconds(plan.total_s))]
    if machine is None or plan.step_s_low is None or plan.step_s_high is None or plan.step is None:
        return lines
    low, high = plan.step_s / plan.step_s_high, plan.step_s / plan.step_s_low
    ranks = config.train.parallel.ranks
    named = f"{ranks} {'rank' if ranks == 1 else 'ranks'} on {machine.title}"
    measured = machine.measured
    on_threads = f" with {measured.threads} threads, measured {measured.date}" if measured else ""
    span = f"{format_seconds(plan.step_s_low)} to {format_seconds(plan.step_s_high)}"
    lines = [
        ("device", named + on_threads),
        ("step", f"{format_seconds(plan.step_s)} ({span}), bound by {plan.step.bound}"),
        *lines,
    ]
    if ranks > 1 and machine.measured is None:
        lines.append(("network", "includes only FSDP within one node; smalti plan scaling has the rest"))
    if plan.mfu_frac is not None and plan.peak_flops_per_s is not None:
        span = f"{format_frac(plan.mfu_frac * low)} to {format_frac(plan.mfu_frac * high)}"
        peak = f"{format_flops(plan.peak_flops_per_s)}/s, {FORMULA}"
        lines.append(("MFU", f"{format_frac(plan.mfu_frac)} ({span}) of {peak}"))
    return lines


def _parts_table(step: "StepTime") -> str:
    from smalti.base.units import format_bytes, format_count, format_flops, format_frac, format_seconds
    from smalti.cli.tables import table

    rows = [
        (
            part.name,
            format_seconds(part.s),
            format_frac(part.s / step.total_s),
            format_flops(part.flops) if part.flops else "-",
            format_bytes(part.bytes),
            format_count(part.kernels),
            part.bound,
        )
        for part in sorted(step.parts, key=lambda part: -part.s)
    ]
    return table(("part of a step", "time", "share", "FLOPs", "bytes", "kernels", "bound by"), rows)
