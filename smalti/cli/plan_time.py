"""``smalti plan time``: how long a run takes, in print."""

from typing import TYPE_CHECKING, Annotated, Literal

import typer

from smalti.cli.plan_recipe import Gpu, Json, Overrides, Recipe, load_recipe

if TYPE_CHECKING:
    from smalti.config.run import RunConfig
    from smalti.plan.hardware import MeasuredRate
    from smalti.plan.run import RunPlan


def time(
    recipe: Recipe,
    overrides: Overrides = None,
    gpu: Gpu = None,
    rate: Annotated[
        float | None, typer.Option(help="Matmul rate of all ranks together in FLOP/s; absent: measured here (3 s).")
    ] = None,
    efficiency: Annotated[
        float | None, typer.Option(help="Share of that rate that training reaches (0..1); absent: a table.")
    ] = None,
    measure: Annotated[bool, typer.Option(help="Measure this machine where no rate is known.")] = True,
    as_json: Json = False,
) -> None:
    """Print parameters, tokens, FLOPs, and the predicted time of a run.

    The time is training FLOPs / (matmul rate x efficiency); data, evals in the loop and checkpoints are not in it.
    """
    from smalti.data.schedule import tokens_by_source
    from smalti.plan import run as room

    config = load_recipe(recipe, overrides)
    known = _rate(config, gpu=gpu, rate=rate, measure=measure)
    plan = room.plan_run(config, rate_flops_per_s=known.flops_per_s, efficiency_frac=efficiency, device=known.device)
    taken = tokens_by_source(config.data, config.length)
    epochs = {name: taken[name] / size for name, size in _source_tokens(config).items()}
    if as_json:
        from smalti.cli.tables import print_json

        measured = known.measured.to_json() if known.measured else None
        print_json({"name": config.name, **plan.to_json(), "measured": measured, "epochs": epochs})
        return
    print(_time_text(config, plan, known, epochs))


class _Rate:
    """The matmul rate to plan with, and where it is from."""

    def __init__(
        self,
        flops_per_s: float | None,
        origin: str,
        device: Literal["cpu", "cuda"],
        *,
        measured: "MeasuredRate | None" = None,
        peak_flops_per_s: float | None = None,
    ) -> None:
        self.flops_per_s, self.origin, self.device = flops_per_s, origin, device
        self.measured, self.peak_flops_per_s = measured, peak_flops_per_s


def _rate(config: "RunConfig", *, gpu: str | None, rate: float | None, measure: bool) -> _Rate:
    from smalti.base.env import cpu_count
    from smalti.base.errors import UserError
    from smalti.config.hardware import hardware_of_driver
    from smalti.fleet.measure import measure_matmul

    parallel, compute = config.train.parallel, config.train.precision.compute
    if gpu is not None and rate is not None:
        raise UserError("--gpu and --rate both say how fast the ranks are", allowed="one of them")
    if rate is not None:
        return _Rate(rate, "given", "cuda" if parallel.device == "cuda" else "cpu")
    if gpu is not None:
        return _of_device(gpu, parallel.ranks, compute)
    if not measure:
        return _Rate(None, "not measured", "cpu")
    threads = cpu_count() if parallel.threads == "auto" else parallel.threads * parallel.ranks
    found = measure_matmul(threads=min(threads, cpu_count()), dtype=compute, device=parallel.device)
    if found.device == "cpu":
        origin = f"measured here, {found.threads} CPU threads, {found.dtype}"
        return _Rate(found.flops_per_s, origin, "cpu", measured=found, peak_flops_per_s=found.flops_per_s)
    flops, here = found.flops_per_s * parallel.ranks, hardware_of_driver(found.device)
    peak = here.peak(compute) if here else None
    published = None if peak is None else peak * parallel.ranks
    origin = f"measured here, {parallel.ranks} x {found.device}, {found.dtype}"
    return _Rate(flops, origin, "cuda", measured=found, peak_flops_per_s=published)


def _of_device(gpu: str, ranks: int, compute: str) -> _Rate:
    """The share of the published peak that a large matmul reaches, for ``ranks`` of that device."""
    from smalti.base.errors import UserError
    from smalti.config.hardware import hardware

    device = hardware(gpu)
    flops = ranks * device.require_peak(compute)
    if device.matmul_frac is None or compute != "bf16":
        raise UserError(
            f"what share of its {compute} peak a large matmul reaches on {device.title} is not known",
            allowed="a device with matmul_frac, and train.precision.compute=bf16",
            hint=f"give a measured rate of all {ranks} ranks together: --rate {0.8 * flops:.1e}",
        )
    origin = f"{device.matmul_frac:g} of the published peak of {ranks} x {device.title}"
    return _Rate(flops * device.matmul_frac, origin, "cuda", peak_flops_per_s=flops)


def _source_tokens(config: "RunConfig") -> dict[str, int]:
    """Tokens of each source whose token files exist already."""
    from smalti.base import store

    found = {}
    for name, source in config.data.sources.items():
        path = store.join(source.path, "manifest.json")
        if store.exists(path):
            found[name] = int(store.read_json(path)["n_tokens"])
    return found


def _time_text(config: "RunConfig", plan: "RunPlan", known: _Rate, epochs: dict[str, float]) -> str:
    from smalti.base.units import format_count, format_flops, format_frac, format_seconds
    from smalti.cli.tables import pairs
    from smalti.plan.flops import CAUSAL_FORMULA, FORMULA, FORMULA_TEXT, mfu
    from smalti.plan.run import CHINCHILLA_TOKENS_PER_PARAM, length_text

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
    ]  # fmt: skip
    if plan.step_s is None or plan.total_s is None or plan.tokens_per_s is None or plan.rate_flops_per_s is None:
        lines.append(("time", "unknown without a rate: leave --no-measure out, or give --gpu or --rate"))
    else:
        frac = plan.efficiency_frac or 0.0
        lines += [
            ("matmul rate", f"{format_flops(plan.rate_flops_per_s)}/s ({known.origin})"),
            ("efficiency", f"{format_frac(frac)} of it"),
            ("speed", f"{format_count(plan.tokens_per_s)} tokens/s, {format_seconds(plan.step_s)} a step"),
            ("time", format_seconds(plan.total_s)),
        ]
        if known.peak_flops_per_s is not None:
            utilisation = mfu(plan.tokens_per_s, plan.flops_per_token, known.peak_flops_per_s)
            lines.append(("MFU", f"{format_frac(utilisation)} of {format_flops(known.peak_flops_per_s)}/s, {FORMULA}"))
    return f"{pairs(lines)}\n\n{FORMULA}: {FORMULA_TEXT}"
