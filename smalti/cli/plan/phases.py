"""``smalti plan phases``: what the four phases of a model cost, and how far a budget goes."""

from typing import TYPE_CHECKING, Annotated

import typer

from smalti.cli.options import Json

if TYPE_CHECKING:
    from smalti.plan.budget.phases import Estimate, Phase, Phases, Rung


def phases(
    values: Annotated[
        list[str] | None, typer.Argument(metavar="KEY=VALUE", help="What is known; the keys are below.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Print tokens, compute and labelling cost of pretraining, curriculum, fine-tuning and preference tuning.

    Keys: params, active_params or model (a preset, recipe or folder), gpu, gpus, mfu, precision,
    price_usd_per_gpu_hour; pretraining_tokens, curriculum_tokens; pairs (instruction and answer), chats (of several
    turns), comparisons; for each of the three tokens_per_pair, usd_per_pair and so on; fine_tuning_epochs,
    preference_epochs; cost_usd, the budget. Without a count, or with a budget, all four phases are planned; counts
    that are not given are assumed, and listed.
    """
    from smalti.base.errors import UserError
    from smalti.cli.tables import print_json
    from smalti.plan.budget.phases import KEYS, solve
    from smalti.plan.quantities import parse_pairs

    known = parse_pairs(values or [], KEYS)
    if not known:
        raise UserError("nothing is given", allowed=", ".join(KEYS), hint="smalti plan phases params=7b cost_usd=1e6")
    if "model" in known:
        from smalti.cli.plan.load import load_model

        answer = solve(known, model=load_model(known["model"], None))
    else:
        answer = solve(known)
    if as_json:
        print_json(answer.to_json())
    else:
        print(phases_text(answer))


def phases_text(answer: "Phases") -> str:
    """Return the answer as tables."""
    from smalti.cli.plan.quantities import assumption_text
    from smalti.cli.tables import table

    head = (
        "phase",
        "examples",
        "tokens",
        "FLOPs",
        "GPU hours",
        "days",
        "compute",
        "labelling",
        "USD",
        "interval",
    )
    rows = [_phase(phase) for phase in answer.phases]
    shown = [k for k, _ in enumerate(head) if k == 0 or any(row[k] for row in rows)]
    parts = [table([head[k] for k in shown], [[row[k] for k in shown] for row in rows])]
    has_budget = answer.cost_usd is not None
    rung_head = ("rung", "phases to pay for", "USD", "interval", "affordable", "affordable pairs")
    rung_rows = [_rung(phase) for phase in answer.rungs]
    last = 6 if has_budget else 4
    if any(phase.cost_usd for phase in answer.rungs if phase.phases):
        parts.append(table(rung_head[:last], [row[:last] for row in rung_rows]))
    if answer.cost_usd is not None:
        parts.append(
            f"{answer.cost_usd:,.0f} USD pay for: {answer.rung} (affordable pairs: after the compute of the rung, with "
            "nothing else labelled)"
        )
    if answer.assumptions:
        parts.append("\n".join(["assumed:", *(f"  {assumption_text(phase)}" for phase in answer.assumptions)]))
    return "\n\n".join(parts)


def _phase(phase: "Phase") -> tuple[str, ...]:
    from smalti.base.units import format_count
    from smalti.plan.quantities import format_number

    examples = ", ".join(f"{value:,.0f} {kind}" for kind, value in phase.examples.items())
    known = phase.cost_usd or phase.compute_usd or phase.labelling_usd
    return (
        phase.name,
        examples,
        format_count(phase.tokens.value) if phase.tokens else "",
        format_number(phase.flops.value) if phase.flops else "",
        format_number(phase.gpu_hours.value) if phase.gpu_hours else "",
        format_number(phase.days.value) if phase.days else "",
        _usd(phase.compute_usd),
        _usd(phase.labelling_usd),
        _usd(known),
        _span(known),
    )


def _rung(rung: "Rung") -> tuple[str, ...]:
    pairs = "" if rung.pairs_in_reach is None else f"{rung.pairs_in_reach:,.0f}"
    return (
        rung.name,
        ", ".join(rung.phases) or "none",
        _usd(rung.cost_usd),
        _span(rung.cost_usd),
        rung.affordable or "",
        pairs,
    )


def _usd(estimate: "Estimate | None") -> str:
    if estimate is None:
        return ""
    return f"{estimate.value:,.0f}" if estimate.value >= 100 or estimate.value == 0 else f"{estimate.value:.2f}"


def _span(estimate: "Estimate | None") -> str:
    if estimate is None or estimate.interval is None:
        return ""
    low, high = (f"{end:,.0f}" if end >= 100 else f"{end:.2f}" for end in estimate.interval)
    return f"{low} to {high}"
