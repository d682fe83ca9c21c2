"""``smalti plan budget``: from the known quantities of a run, all that follow; printed, and plotted."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from smalti.cli.options import Json

if TYPE_CHECKING:
    from smalti.plan.budget.solver import Budget


def budget(
    values: Annotated[
        list[str] | None, typer.Argument(metavar="KEY=VALUE", help="What is known; the keys are below.")
    ] = None,
    plot: Annotated[str | None, typer.Option(help="Draw loss against cost, and sizes, into this .svg.")] = None,
    as_json: Json = False,
) -> None:
    """Compute parameters, tokens, FLOPs, GPUs, days, dollars and loss of a run from any of them that are known.

    Keys: params, active_params, tokens, tokens_per_param, tokens_per_active_param, flops, gpus, gpu, mfu, days,
    gpu_hours, price_usd_per_gpu_hour, cost_usd, inference_tokens, loss. Numbers may be written as 7b, 1.4T or 30k;
    shares are 0 to 1. Also: model (a preset, recipe or folder; its parameters are counted), fit (the scaling law),
    precision (bf16 or fp8), unique_tokens (repeats beyond them are worth less), experts (for each active one, by Clark
    et al.), inference_mfu (weighs inference in dollars). Quantities that are needed and not given are assumed, and
    listed.
    """
    from smalti.base.errors import UserError
    from smalti.cli.plan.plot_file import require_svg
    from smalti.cli.tables import print_json
    from smalti.plan.budget.problem import KEYS
    from smalti.plan.quantities import parse_pairs

    require_svg(plot)
    known = parse_pairs(values or [], KEYS)
    if not known:
        raise UserError("nothing is given", allowed=", ".join(KEYS), hint="smalti plan budget cost_usd=1e6")
    answer = solve_budget(known)
    if plot is not None:
        from smalti.base import store
        from smalti.cli.plan.budget_plot import plot_budget

        store.write_text(plot, plot_budget(answer))
    if as_json:
        print_json(answer.to_json())
        return
    print(budget_text(answer))
    if plot is not None:
        print(f"\nplot: {plot}")


def solve_budget(values: Mapping[str, str]) -> "Budget":
    """Return the budget of ``key=value`` pairs; ``model`` may be anything that ``load_model`` finds."""
    from smalti.plan.budget.solver import solve

    if "model" not in values:
        return solve(values)
    from smalti.cli.plan.load import load_model

    return solve(values, model=load_model(values["model"], None))


def budget_text(answer: "Budget") -> str:
    """Return the answer as tables."""
    from smalti.cli.plan.quantities import assumption_text, format_quantity
    from smalti.cli.tables import table

    rows = [
        (name, format_quantity(name, value), _interval(answer, name), answer.origins.get(name, ""))
        for name, value in answer.values.items()
        if value is not None and not (name == "tokens_per_active_param" and _is_dense(answer))
    ]
    parts = [table(("", "value", "interval", "from"), rows)]
    missing = [name for name, value in answer.values.items() if value is None]
    if missing:
        parts.append(f"does not follow: {', '.join(missing)}")
    if answer.choice:
        parts.append(f"chosen: {answer.choice}")
    if answer.assumptions:
        parts.append("\n".join(["assumed:", *(f"  {assumption_text(each)}" for each in answer.assumptions)]))
    for title, lines in (("lifetime:", _lifetime(answer)), ("data:", _repetition(answer)), ("note:", answer.notes)):
        if lines:
            parts.append("\n".join([title, *(f"  {line}" for line in lines)]))
    if answer.other_fits:
        parts.append("\n".join(["by other fits:", *(f"  {_other(answer, fit)}" for fit in answer.other_fits)]))
    if answer.intervals:
        parts.append(f"intervals: {_interval_source(answer)}")
    return "\n\n".join(parts)


def _is_dense(answer: "Budget") -> bool:
    total, active = answer.number("params"), answer.number("active_params")
    return total is not None and active is not None and abs(active / total - 1) < 1e-9


def _interval(answer: "Budget", name: str) -> str:
    from smalti.cli.plan.quantities import format_quantity

    if name not in answer.intervals:
        return ""
    low, high = answer.intervals[name]
    return f"{format_quantity(name, low)} to {format_quantity(name, high)}"


def _lifetime(answer: "Budget") -> Sequence[str]:
    from smalti.base.units import format_count, format_frac
    from smalti.plan.quantities import format_number

    if answer.lifetime is None:
        return ()
    value = answer.lifetime
    weight, saving = value["inference_weight"] or 1.0, value["saving_frac"] or 0.0
    saved = f"this one saves {format_frac(saving)}" if saving >= 0 else f"this one costs {format_frac(-saving)} more"
    lines = [
        f"training and inference take {format_number(value['lifetime_flops'] or 0)} FLOPs"
        + (f", inference counted {weight:.3g} times" if weight != 1 else ""),
        f"the model of this loss that is cheapest to train has {format_count(value['chinchilla_params'] or 0)} "
        f"parameters and {format_count(value['chinchilla_tokens'] or 0)} tokens; training and inference take "
        f"{format_number(value['chinchilla_lifetime_flops'] or 0)} FLOPs: {saved}",
    ]
    if (usd := value["inference_cost_usd"]) is not None:
        lines.append(f"inference costs {usd:,.0f} USD at the price of the training")
    return lines


def _repetition(answer: "Budget") -> Sequence[str]:
    from smalti.base.units import format_count

    if answer.repetition is None:
        return ()
    value = answer.repetition
    line = f"{value['epochs']:.3g} epochs, worth {format_count(value['effective_tokens'])} unique tokens"
    if "effective_params" in value:
        line += f"; the parameters are worth {format_count(value['effective_params'])}"
    return (line,)


def _other(answer: "Budget", name: str) -> str:
    """Return a line with the values of another fit that differ."""
    from smalti.cli.plan.quantities import format_quantity

    differences = []
    for key, value in answer.other_fits[name].items():
        ours = answer.number(key)
        if ours is None or abs(value / ours - 1) > 1e-6:
            differences.append(f"{key} {format_quantity(key, value)}")
    return f"{name}: {', '.join(differences) or 'the same'}"


def _interval_source(answer: "Budget") -> str:
    from smalti.plan.laws.fits import LEVEL

    fit = f"{LEVEL:.0%} by the {answer.fit.interval_source}"
    mfu = "the range of the assumed MFU"
    if not any(assumption.name == "mfu" for assumption in answer.assumptions):
        return fit
    return f"{fit}; with {mfu}" if answer.fit.covariance else mfu
