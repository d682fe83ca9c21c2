"""``smalti plan budget``: whatever of a run is given, and all that follows, in print and as a picture."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from smalti.cli.plan.recipe import Json

if TYPE_CHECKING:
    from smalti.plan.budget.solver import Budget


def budget(
    values: Annotated[
        list[str] | None, typer.Argument(metavar="KEY=VALUE...", help="What is known: any of the keys below.")
    ] = None,
    plot: Annotated[str | None, typer.Option(help="Draw loss against cost, and sizes, into this .svg.")] = None,
    as_json: Json = False,
) -> None:
    """Print parameters, tokens, FLOPs, GPUs, days, dollars and loss of a run: from any of them all that follows.

    Keys: params, active_params, tokens, tokens_per_param, tokens_per_active_param, flops, gpus, gpu, mfu, days,
    gpu_hours, price_usd_per_gpu_hour, cost_usd, inference_tokens, loss. 7b, 1.4T and 30k are read; shares go from 0 to
    1. And: model (a preset, recipe or folder: counts the parameters), fit (the law of the loss), precision (bf16 or
    fp8), unique_tokens (repeats beyond them are worth less), experts (for each one used, by Clark et al.),
    inference_mfu (weighs inference in dollars). What is missing and needed is assumed, and said.
    """
    from smalti.base.errors import UserError
    from smalti.cli.tables import print_json
    from smalti.plan.budget.problem import KEYS
    from smalti.plan.quantities import parse_pairs

    if plot is not None and not plot.endswith(".svg"):
        raise UserError(f"--plot {plot} is no picture", allowed="a file whose name ends with .svg")
    words = parse_pairs(values or [], KEYS)
    if not words:
        raise UserError("nothing is given", allowed=", ".join(KEYS), hint="smalti plan budget cost_usd=1e6")
    found = solved(words)
    if plot is not None:
        from smalti.base import store
        from smalti.cli.plan.budget_plot import picture

        store.write_text(plot, picture(found))
    if as_json:
        print_json(found.to_json())
        return
    print(budget_text(found))
    if plot is not None:
        print(f"\npicture: {plot}")


def solved(words: Mapping[str, str]) -> "Budget":
    """The budget of ``key=value`` words; ``model`` may be anything that has parameters to count."""
    from smalti.plan.budget.solver import solve

    if "model" not in words:
        return solve(words)
    from smalti.cli.plan.model import load_model

    return solve(words, model=load_model(words["model"], None))


def budget_text(found: "Budget") -> str:
    """The answer in print."""
    from smalti.cli.plan.quantities import assumption_text, format_quantity
    from smalti.cli.tables import table

    rows = [
        (name, format_quantity(name, value), _interval(found, name), found.origins.get(name, ""))
        for name, value in found.values.items()
        if value is not None and not (name == "tokens_per_active_param" and _is_dense(found))
    ]
    parts = [table(("", "value", "interval", "from"), rows)]
    missing = [name for name, value in found.values.items() if value is None]
    if missing:
        parts.append(f"does not follow: {', '.join(missing)}")
    if found.choice:
        parts.append(f"chosen: {found.choice}")
    if found.assumptions:
        parts.append("\n".join(["assumed:", *(f"  {assumption_text(one)}" for one in found.assumptions)]))
    for title, lines in (("lifetime:", _lifetime(found)), ("data:", _repetition(found)), ("note:", found.notes)):
        if lines:
            parts.append("\n".join([title, *(f"  {line}" for line in lines)]))
    if found.other_fits:
        parts.append("\n".join(["by other fits:", *(f"  {_other(found, one)}" for one in found.other_fits)]))
    if found.intervals:
        parts.append(f"intervals: {_interval_source(found)}")
    return "\n\n".join(parts)


def _is_dense(found: "Budget") -> bool:
    total, active = found.number("params"), found.number("active_params")
    return total is not None and active is not None and abs(active / total - 1) < 1e-9


def _interval(found: "Budget", name: str) -> str:
    from smalti.cli.plan.quantities import format_quantity

    if name not in found.intervals:
        return ""
    low, high = found.intervals[name]
    return f"{format_quantity(name, low)} to {format_quantity(name, high)}"


def _lifetime(found: "Budget") -> Sequence[str]:
    from smalti.base.units import format_count, format_frac
    from smalti.plan.quantities import format_number

    if found.lifetime is None:
        return ()
    value = found.lifetime
    weight, saving = value["inference_weight"] or 1.0, value["saving_frac"] or 0.0
    saved = f"this saves {format_frac(saving)}" if saving >= 0 else f"this costs {format_frac(-saving)} more"
    lines = [
        f"training and use take {format_number(value['lifetime_flops'] or 0)} FLOPs"
        + (f", those of use counted {weight:.3g} times" if weight != 1 else ""),
        f"the model of this loss that is cheapest to train has {format_count(value['chinchilla_params'] or 0)} "
        f"parameters and {format_count(value['chinchilla_tokens'] or 0)} tokens and takes "
        f"{format_number(value['chinchilla_lifetime_flops'] or 0)}: {saved}",
    ]
    if (usd := value["inference_cost_usd"]) is not None:
        lines.append(f"use costs {usd:,.0f} USD at the price of the training")
    return lines


def _repetition(found: "Budget") -> Sequence[str]:
    from smalti.base.units import format_count

    if found.repetition is None:
        return ()
    value = found.repetition
    line = f"{value['epochs']:.3g} epochs, worth {format_count(value['effective_tokens'])} tokens never seen"
    if "effective_params" in value:
        line += f"; the parameters are worth {format_count(value['effective_params'])}"
    return (line,)


def _other(found: "Budget", name: str) -> str:
    """What another fit says otherwise."""
    from smalti.cli.plan.quantities import format_quantity

    said = []
    for key, value in found.other_fits[name].items():
        ours = found.number(key)
        if ours is None or abs(value / ours - 1) > 1e-6:
            said.append(f"{key} {format_quantity(key, value)}")
    return f"{name}: {', '.join(said) or 'the same'}"


def _interval_source(found: "Budget") -> str:
    from smalti.plan.laws.fits import LEVEL

    fit = f"{LEVEL:.0%} by the {found.fit.interval_source}"
    mfu = "the range of the assumed MFU"
    if not any(one.name == "mfu" for one in found.assumptions):
        return fit
    return f"{fit}; with {mfu}" if found.fit.covariance else mfu
