"""``smalti plan``: the arithmetic of a run before it starts, and after it how right that was."""

from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from smalti.cli.plan_data import data

if TYPE_CHECKING:
    from smalti.config.run import RunConfig
    from smalti.plan.budget import Budget
    from smalti.plan.hardware import MeasuredRate

app = typer.Typer(
    add_completion=False,
    rich_markup_mode=None,
    no_args_is_help=True,
    help="Parameters, FLOPs, memory and time of a run before it starts.",
)

_Recipe = Annotated[str, typer.Argument(metavar="RECIPE", help="A .yaml file, a run folder, or the name of a recipe.")]
_Overrides = Annotated[list[str] | None, typer.Argument(metavar="[A.B=VALUE]...", help="Changes to the recipe.")]
_Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
_Gpu = Annotated[str | None, typer.Option(help="Plan for ranks on this GPU ('H100 SXM') instead of this machine.")]


@app.command(epilog="Example: smalti plan budget demo train.duration=2000step --json")
def budget(
    recipe: _Recipe,
    overrides: _Overrides = None,
    gpu: _Gpu = None,
    rate: Annotated[
        float | None, typer.Option(help="Matmul rate of all ranks together in FLOP/s; absent: measured here (3 s).")
    ] = None,
    efficiency: Annotated[
        float | None, typer.Option(help="Share of that rate that training reaches (0..1); absent: a table.")
    ] = None,
    measure: Annotated[bool, typer.Option(help="Measure this machine where no rate is known.")] = True,
    as_json: _Json = False,
) -> None:
    """Print parameters, tokens, FLOPs, and the predicted time of a run.

    The time is training FLOPs / (matmul rate x efficiency); data, evals in the loop and checkpoints are not in it.
    """
    from smalti.data.schedule import tokens_by_source
    from smalti.plan import budget as room

    config = _load(recipe, overrides)
    known = _rate(config, gpu=gpu, rate=rate, measure=measure)
    plan = room.budget(config, rate_flops_per_s=known.flops_per_s, efficiency_frac=efficiency, device=known.device)
    taken = tokens_by_source(config.data, config.length)
    epochs = {name: taken[name] / size for name, size in _source_tokens(config).items()}
    if as_json:
        from smalti.cli.tables import print_json

        measured = known.measured.to_json() if known.measured else None
        print_json({"name": config.name, **plan.to_json(), "measured": measured, "epochs": epochs})
        return
    print(_budget_text(config, plan, known, epochs))


@app.command(epilog="Example: smalti plan memory demo train.parallel.ranks=8 --gpu 'H100 SXM'")
def memory(recipe: _Recipe, overrides: _Overrides = None, gpu: _Gpu = None, as_json: _Json = False) -> None:
    """Print the bytes on one rank: weights, gradients, moments, activations, logits."""
    from smalti.base.units import format_bytes, format_frac
    from smalti.cli.tables import pairs, print_json
    from smalti.plan.memory import memory_per_rank

    config = _load(recipe, overrides)
    parts = memory_per_rank(config)
    capacity = _peak(gpu).memory_bytes if gpu else None
    if as_json:
        print_json({"name": config.name, **parts.to_json(), "device_memory_bytes": capacity})
        return
    parallel = config.train.parallel
    lines = [("ranks", f"{parallel.ranks} (replicate {parallel.replicate})")]
    lines += [("microbatch", f"{parts.microbatch_tokens} tokens")]
    for name, value in parts.to_json().items():
        if name.endswith("_bytes"):
            lines.append((name.removesuffix("_bytes"), format_bytes(value)))
    if capacity is not None:
        share = format_frac(parts.total_bytes / capacity)
        lines.append(("of device", f"{share} of {format_bytes(capacity)}; leave 2 to 6 GB for CUDA and NCCL"))
    print(pairs(lines))


app.command(epilog="Example: smalti plan data recipe.yaml --tokens code=464e9 --tokens prose=4.87e9")(data)


@app.command(epilog="Example: smalti plan verify runs/demo --within 1.5")
def verify(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run folder, or its name in runs/.")],
    within: Annotated[
        float | None, typer.Option(help="Exit 3 unless measured step time is within this factor of the predicted.")
    ] = None,
    as_json: _Json = False,
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


def _load(recipe: str, overrides: list[str] | None) -> "RunConfig":
    from smalti.config.load import load
    from smalti.config.run import RunConfig

    return load(RunConfig, recipe, overrides or []).config


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
    from smalti.fleet.measure import measure_matmul
    from smalti.plan.hardware import GEMM_OF_PEAK_FRAC, known_peak

    parallel, compute = config.train.parallel, config.train.precision.compute
    if gpu is not None and rate is not None:
        raise UserError("--gpu and --rate both say how fast the ranks are", allowed="one of them")
    if rate is not None:
        return _Rate(rate, "given", "cuda" if parallel.device == "cuda" else "cpu")
    if gpu is not None:
        peak, ranks = _peak(gpu), parallel.ranks
        if compute != "bf16":
            raise UserError(f"the published peak of {peak.name} is for bf16, and train.precision.compute={compute}")
        flops = ranks * peak.bf16_flops_per_s
        origin = f"{GEMM_OF_PEAK_FRAC} of the published peak of {ranks} x {peak.name}"
        return _Rate(flops * GEMM_OF_PEAK_FRAC, origin, "cuda", peak_flops_per_s=flops)
    if not measure:
        return _Rate(None, "not measured", "cpu")
    threads = cpu_count() if parallel.threads == "auto" else parallel.threads * parallel.ranks
    found = measure_matmul(threads=min(threads, cpu_count()), dtype=compute, device=parallel.device)
    if found.device == "cpu":
        origin = f"measured here, {found.threads} CPU threads, {found.dtype}"
        return _Rate(found.flops_per_s, origin, "cpu", measured=found, peak_flops_per_s=found.flops_per_s)
    flops, peak_here = found.flops_per_s * parallel.ranks, known_peak(found.device)
    published = peak_here.bf16_flops_per_s * parallel.ranks if peak_here and compute == "bf16" else None
    origin = f"measured here, {parallel.ranks} x {found.device}, {found.dtype}"
    return _Rate(flops, origin, "cuda", measured=found, peak_flops_per_s=published)


def _peak(gpu: str) -> Any:
    from smalti.base.errors import UserError
    from smalti.plan.hardware import PEAKS, peak_named

    peak = peak_named(gpu)
    if peak is None:
        raise UserError(
            f"no peak is known for the GPU '{gpu}'",
            allowed=", ".join(one.name for one in PEAKS),
            hint="give a measured rate: --rate 7.9e14",
        )
    return peak


def _source_tokens(config: "RunConfig") -> dict[str, int]:
    """Tokens of each source whose token files exist already."""
    from smalti.base import store

    found = {}
    for name, source in config.data.sources.items():
        path = store.join(source.path, "manifest.json")
        if store.exists(path):
            found[name] = int(store.read_json(path)["n_tokens"])
    return found


def _budget_text(config: "RunConfig", plan: "Budget", known: _Rate, epochs: dict[str, float]) -> str:
    from smalti.base.units import format_count, format_flops, format_frac, format_seconds
    from smalti.cli.tables import pairs
    from smalti.plan.budget import CHINCHILLA_TOKENS_PER_PARAM, length_text
    from smalti.plan.flops import CAUSAL_FORMULA, FORMULA, FORMULA_TEXT, mfu

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
