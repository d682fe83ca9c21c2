"""``smalti plan phases``: what the four phases of a model cost, and the rung that a budget pays for, in print."""

from typing import TYPE_CHECKING, Annotated

import typer

from smalti.cli.plan.recipe import Json

if TYPE_CHECKING:
    from smalti.plan.budget.phases import Estimate, Phase, Phases, Rung


def phases(
    values: Annotated[
        list[str] | None, typer.Argument(metavar="KEY=VALUE...", help="What is known: any of the keys below.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Print tokens, computing and labelling of pretraining, curriculum, fine-tuning and preference, and what is paid.

    Keys: params, active_params or model (a preset, recipe or folder), gpu, gpus, mfu, precision,
    price_usd_per_gpu_hour; pretraining_tokens, curriculum_tokens; pairs (instruction and answer), chats (of several
    turns), comparisons; for each of the three tokens_per_pair and usd_per_pair and so on; fine_tuning_epochs,
    preference_epochs; cost_usd, the budget. Without a count, or with a budget, all four phases are planned, and counts
    that are not given are assumed, and said.
    """
    from smalti.base.errors import UserError
    from smalti.cli.tables import print_json
    from smalti.plan.budget.phases import KEYS, solve
    from smalti.plan.quantities import parse_pairs

    words = parse_pairs(values or [], KEYS)
    if not words:
        raise UserError("nothing is given", allowed=", ".join(KEYS), hint="smalti plan phases params=7b cost_usd=1e6")
    if "model" in words:
        from smalti.cli.plan.model import load_model

        found = solve(words, model=load_model(words["model"], None))
    else:
        found = solve(words)
    if as_json:
        print_json(found.to_json())
    else:
        print(phases_text(found))


def phases_text(found: "Phases") -> str:
    """The answer in print."""
    from smalti.cli.plan.quantities import assumption_text
    from smalti.cli.tables import table

    head = (
        "phase",
        "examples",
        "tokens",
        "FLOPs",
        "GPU hours",
        "days",
        "computing",
        "labelling",
        "USD",
        "interval",
    )
    rows = [_phase(one) for one in found.phases]
    shown = [k for k, _ in enumerate(head) if k == 0 or any(row[k] for row in rows)]
    parts = [table([head[k] for k in shown], [[row[k] for k in shown] for row in rows])]
    asked = found.cost_usd is not None
    rung_head = ("rung", "phases that one pays", "USD", "interval", "paid", "pairs in reach")
    rung_rows = [_rung(one) for one in found.rungs]
    last = 6 if asked else 4
    if any(one.cost_usd for one in found.rungs if one.phases):
        parts.append(table(rung_head[:last], [row[:last] for row in rung_rows]))
    if found.cost_usd is not None:
        parts.append(
            f"{found.cost_usd:,.0f} USD pay for: {found.rung} (pairs in reach: with the computing of the rung paid, "
            "and nothing else labelled)"
        )
    if found.assumptions:
        parts.append("\n".join(["assumed:", *(f"  {assumption_text(one)}" for one in found.assumptions)]))
    return "\n\n".join(parts)


def _phase(one: "Phase") -> tuple[str, ...]:
    from smalti.base.units import format_count
    from smalti.plan.quantities import format_number

    examples = ", ".join(f"{value:,.0f} {kind}" for kind, value in one.examples.items())
    known = one.cost_usd or one.compute_usd or one.labelling_usd
    return (
        one.name,
        examples,
        format_count(one.tokens.value) if one.tokens else "",
        format_number(one.flops.value) if one.flops else "",
        format_number(one.gpu_hours.value) if one.gpu_hours else "",
        format_number(one.days.value) if one.days else "",
        _usd(one.compute_usd),
        _usd(one.labelling_usd),
        _usd(known),
        _span(known),
    )


def _rung(one: "Rung") -> tuple[str, ...]:
    pairs = "" if one.pairs_in_reach is None else f"{one.pairs_in_reach:,.0f}"
    return (
        one.name,
        ", ".join(one.phases) or "none",
        _usd(one.cost_usd),
        _span(one.cost_usd),
        one.affordable or "",
        pairs,
    )


def _usd(one: "Estimate | None") -> str:
    if one is None:
        return ""
    return f"{one.value:,.0f}" if one.value >= 100 or one.value == 0 else f"{one.value:.2f}"


def _span(one: "Estimate | None") -> str:
    if one is None or one.interval is None:
        return ""
    low, high = (f"{end:,.0f}" if end >= 100 else f"{end:.2f}" for end in one.interval)
    return f"{low} to {high}"
