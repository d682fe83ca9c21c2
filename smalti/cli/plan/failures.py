"""``smalti plan failures``: what failures cost a run; printed, and plotted."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from smalti.cli.options import Json

if TYPE_CHECKING:
    from smalti.plan.failures.reliability import Outlook
    from smalti.plan.failures.setup import Setup
    from smalti.plan.failures.simulate import SimulationSummary

_SWITCHES = {"true": True, "false": False}


def failures(
    values: Annotated[
        list[str] | None, typer.Argument(metavar="KEY=VALUE", help="What is known; gpus is required.")
    ] = None,
    simulate: Annotated[bool, typer.Option("--simulate", help="Also simulate the run many times.")] = False,
    repeats: Annotated[int | None, typer.Option(help="Simulated runs; absent: 200.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of the simulation; absent: 0.")] = None,
    burst: Annotated[
        float | None, typer.Option(help="Weibull shape of the gaps between failures; absent: 1. Below 1: bursts.")
    ] = None,
    plot: Annotated[str | None, typer.Option(help="Draw goodput by interval and by GPUs into this .svg.")] = None,
    as_json: Json = False,
) -> None:
    """Print how often a job fails, how often to save, and the resulting goodput, days, dollars and spare nodes.

    Keys: gpus, gpus_per_node, failures_per_1000_gpu_days (a number, or dbrx, mosaicml, llama-3, meta-rsc-1, meta-rsc-2,
    ft-hsdp), detect_s, restart_s, checkpoint_stall_s, checkpoint_interval_s (absent: the optimum), checkpoint_upload_s,
    failures_during_restart, days (without a failure), price_usd_per_gpu_hour, spares (nodes), repair_days. detect_s,
    restart_s and repair_days may be given for one of Llama 3's causes: detect_s.nccl-watchdog=600.
    """
    from smalti.base.errors import UserError
    from smalti.cli.plan.plot_file import require_svg
    from smalti.plan.failures.reliability import outlook, to_json

    if not simulate and (repeats, seed, burst) != (None, None, None):
        raise UserError("--repeats, --seed and --burst are options of --simulate", hint="--simulate")
    require_svg(plot)
    setup = setup_from(values or [])
    expected = outlook(setup)
    simulated = None
    if simulate:
        from smalti.plan.failures import simulate as simulation

        number = 200 if repeats is None else repeats
        runs = simulation.simulate(setup, repeats=number, seed=seed or 0, burst=1.0 if burst is None else burst)
        simulated = simulation.summary(runs)
    if plot is not None:
        from smalti.base import store
        from smalti.cli.plan.failures_plot import plot_failures

        store.write_text(plot, plot_failures(expected))
    if as_json:
        from dataclasses import asdict

        from smalti.cli.tables import print_json

        print_json({**to_json(expected), "simulated": None if simulated is None else asdict(simulated)})
        return
    print(_text(expected))
    if simulated is not None:
        print(f"\n{_simulated_text(simulated, setup)}")
    if plot is not None:
        print(f"\nplot: {plot}")


def setup_from(words: Sequence[str]) -> "Setup":
    """Parse ``key=value`` words. Raises UserError for unknown or repeated keys and for values that are no numbers."""
    from smalti.base.errors import UserError
    from smalti.plan.failures.causes import TIMES, with_times
    from smalti.plan.failures.rates import failure_rate
    from smalti.plan.failures.setup import LIMITS, NAMES, setup_of
    from smalti.plan.quantities import parse_pairs, require_known

    of_causes = {}
    plain = []
    for word in words:
        name, dot, cause = word.partition("=")[0].strip().partition(".")
        if not dot:
            plain.append(word)
            continue
        require_known(name, TIMES)
        text = parse_pairs([word], (f"{name}.{cause}",))[f"{name}.{cause}"]
        if (cause, name) in of_causes:
            raise UserError(f"{name}.{cause} is given twice", allowed="each key once")
        of_causes[cause, name] = _number(f"{name}.{cause}", text, LIMITS[name])
    known: dict[str, float | bool] = {}
    for name, text in parse_pairs(plain, NAMES).items():
        if name == "failures_during_restart":
            if text.lower() not in _SWITCHES:
                raise UserError(f"{name}={text} is not a switch", allowed="true, false")
            known[name] = _SWITCHES[text.lower()]
        elif name == "failures_per_1000_gpu_days" and text[:1].isalpha() and text.lower() not in ("nan", "inf"):
            known[name] = failure_rate(text).per_1000_gpu_days
        else:
            known[name] = _number(name, text, LIMITS[name])
    return setup_of(known, with_times(of_causes))


def _number(name: str, text: str, limits: tuple[float, float]) -> float:
    """Parse a number within its limits; 0 is accepted only where the lower limit is 0."""
    from smalti.plan.failures.setup import WHOLE
    from smalti.plan.quantities import parse_quantity

    low, high = limits
    if low == 0 and text.strip("0.") == "" and text.count(".") < 2 and "0" in text:
        return 0
    value = parse_quantity(name, text, (low or 1e-12, high)).value
    return int(value) if name in WHOLE and value == int(value) else value


def _text(expected: "Outlook") -> str:
    """Return the expected figures as tables."""
    from smalti.base.units import format_count, format_frac, format_seconds
    from smalti.cli.tables import pairs, table
    from smalti.plan.failures.rates import RATES
    from smalti.plan.failures.reliability import goodput_by_rate, warnings
    from smalti.plan.failures.setup import ASSUMED, CAUSES_SOURCE

    setup, shares = expected.setup, expected.shares
    rate_text = f"{setup.failures_per_1000_gpu_days:.3g} for each 1,000 GPU-days"
    if setup.failures_per_1000_gpu_days:
        rate_text += f": {expected.failures_per_day:.3g} a day, one in {format_seconds(expected.mtbf_s)}"
    lines = [("job", f"{setup.gpus:,} GPUs on {setup.nodes:,} nodes"), ("failures", rate_text)]
    if expected.failures is not None and expected.failures_interval is not None:
        few, many = expected.failures_interval
        lines.append(("", f"{expected.failures:,.0f} in the run (95% of runs: {few:,} to {many:,})"))
    lines.append(("checkpoint", _checkpoint_text(expected)))
    goodput_interval = expected.goodput_interval_frac
    spread = f" ({format_frac(goodput_interval[0])} to {format_frac(goodput_interval[1])})" if goodput_interval else ""
    other = "without" if setup.failures_during_restart else "with"
    lines.append(("goodput", format_frac(shares.useful_frac) + spread))
    lines.append(("", f"{format_frac(expected.other_goodput_frac)} {other} failures during restarts"))
    if expected.calendar_days is not None:
        lines.append(("calendar", f"{expected.calendar_days:.4g} days for {setup.days:g} days of work"))
    if expected.cost_usd is not None:
        lost = expected.cost_usd * (1 - shares.useful_frac)
        lines.append(("cost", f"{format_count(expected.cost_usd)} USD, {format_count(lost)} USD of it lost"))
    if expected.spares_cost_usd is not None:
        lines.append(("", f"{format_count(expected.spares_cost_usd)} USD more for {setup.spares} spare nodes"))
    if expected.spares_p99_nodes is not None:
        lines.append(("spares", f"{expected.spares_p99_nodes} nodes suffice 99% of the time, if every failure "
                                "takes its node"))  # fmt: skip
        lines.append(("", f"{expected.spares_p99_by_cause_nodes} if only those do that Llama 3's causes say"))
    for name in setup.assumed:
        value, why = ASSUMED[name]
        lines.append(("assumed", f"{name}={str(value).lower() if isinstance(value, bool) else f'{value:g}'} ({why})"))
    lines.append(("", f"the mix of causes: {CAUSES_SOURCE}"))
    text = f"{pairs(lines)}\n\n{_hours_text(expected)}"
    rates = [
        [rate.name, f"{rate.per_1000_gpu_days:.2f}", format_frac(frac)]
        for rate, frac in zip(RATES, goodput_by_rate(setup).values(), strict=True)
    ]
    text += "\n\n" + table(["at the rate of", "failures / 1,000 GPU-days", "goodput"], rates)
    return text + "".join(f"\n\nwarning: {line}" for line in warnings(expected))


def _checkpoint_text(expected: "Outlook") -> str:
    from smalti.base.units import format_seconds

    setup = expected.setup
    used = format_seconds(expected.interval_s)
    stall = f"a stall of {format_seconds(setup.checkpoint_stall_s)} every {used} of work"
    if expected.optimal_s is None:
        return stall
    others = f"Young {format_seconds(expected.young_s)}, Daly {format_seconds(expected.daly_s)}"
    if setup.checkpoint_interval_s is None and setup.checkpoint_upload_s <= expected.optimal_s:
        return f"{stall}, the optimum ({others})"
    return f"{stall}; the optimum is {format_seconds(expected.optimal_s)} ({others})"


def _hours_text(expected: "Outlook") -> str:
    """Return a table of where the hours go."""
    from smalti.base.units import format_count, format_frac
    from smalti.cli.tables import table

    names = {
        "useful_frac": "useful work",
        "stall_frac": "checkpoint stalls",
        "redone_frac": "repeated work",
        "detect_frac": "detection",
        "restart_frac": "restarts",
    }
    hours, cost = expected.gpu_hours, expected.cost_usd
    head = ["where the hours go", "share", *(["GPU-hours"] if hours else []), *(["USD"] if cost else [])]
    rows = []
    for field, label in names.items():
        share = getattr(expected.shares, field)
        more = [format_count(share * whole) for whole in (hours, cost) if whole is not None]
        rows.append([label, format_frac(share), *more])
    return table(head, rows)


def _simulated_text(summary: "SimulationSummary", setup: "Setup") -> str:
    """Return the means and spreads of the simulated runs."""
    from smalti.base.units import format_count, format_frac
    from smalti.cli.tables import pairs, table

    goodput, days, count, wait = summary.goodput_frac, summary.calendar_days, summary.failures, summary.wait_h
    lines = [
        ("simulated", f"{summary.repeats} runs; mean, and 90% of the runs between"),
        ("goodput", f"{format_frac(goodput.mean)} ({format_frac(goodput.low)} to {format_frac(goodput.high)})"),
        ("calendar", f"{days.mean:.4g} days ({days.low:.4g} to {days.high:.4g})"),
        ("failures", f"{count.mean:,.0f} ({count.low:,.0f} to {count.high:,.0f})"),
    ]
    if setup.spares is not None:
        lines.append(("waiting", f"{wait.mean:.3g} h for spare nodes ({wait.low:.3g} to {wait.high:.3g}); "
                                 f"{format_frac(summary.waited_frac)} of the runs waited"))  # fmt: skip
    if setup.repair_days is not None:
        most = summary.most_in_repair_nodes
        lines.append(("in repair", f"at most {most.mean:.3g} nodes at once ({most.low:.0f} to {most.high:.0f})"))
    rows = [
        [name, f"{times:.3g}", format_count(summary.lost_h_by_cause[name] * setup.gpus)]
        for name, times in summary.failures_by_cause.items()
    ]
    return f"{pairs(lines)}\n\n{table(['cause', 'failures of a run', 'GPU-hours lost'], rows)}"
