"""``smalti plan data``: epochs and repeats of every source and stage, requests, bytes, dollars and start-up time."""

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from smalti.cli.options import Json, Overrides, Recipe

if TYPE_CHECKING:
    from smalti.config.run import RunConfig
    from smalti.data.sources.source import Source
    from smalti.plan.data import DataPlan, Reading, Share


def data(
    recipe: Recipe,
    overrides: Overrides = None,
    tokens: Annotated[
        list[str] | None,
        typer.Option(metavar="SOURCE=N|FILE", help="Tokens of a source, as code=464e9, or a .yaml file of them."),
    ] = None,
    allow_repeats: Annotated[
        bool, typer.Option("--allow-repeats", help="Accept more than 16 epochs of a source.")
    ] = False,
    usd_per_million_gets: Annotated[float, typer.Option(min=0, max=1e6, help="Price of a million requests.")] = 0.4,
    usd_per_gib_month: Annotated[
        float, typer.Option(min=0, max=1e6, help="Price of keeping a GiB for a month.")
    ] = 0.023,
    usd_per_gib_egress: Annotated[
        float, typer.Option(min=0, max=1e6, help="Price of a GiB that leaves the store.")
    ] = 0.0,
    request_latency: Annotated[
        float, typer.Option(min=0, max=3600, help="Seconds until a request is answered.")
    ] = 0.05,
    as_json: Json = False,
) -> None:
    """Print what a run reads from each source in each stage (weight, tokens, epochs), and what reading costs.

    Weights are shown as quantised. An epoch is all whole sequences of a source; epochs continue across stages, but a
    stage with another seq_len shuffles a source anew. Above 4 epochs of a source it warns; above 16 it exits with code
    3, unless --allow-repeats is given. "worth" is the value of a token compared with a new one, by the formula
    below the tables. --tokens gives the size of a source that does not exist yet. Prices default to S3 Standard,
    us-east-1, read inside the region.
    """
    from smalti.base.errors import CheckFailed
    from smalti.cli.plan.data_counts import given_tokens, known_sources, make_plan, reading_of
    from smalti.cli.plan.load import load_recipe
    from smalti.cli.tables import print_json
    from smalti.plan.data import TOO_MANY_EPOCHS

    config = load_recipe(recipe, overrides)
    reading = replace(
        reading_of(config),
        usd_per_million_requests=usd_per_million_gets,
        usd_per_gib_month=usd_per_gib_month,
        usd_per_gib_egress=usd_per_gib_egress,
        request_latency_s=request_latency,
    )
    plan = make_plan(config, known_sources(config, given_tokens(tokens or [], config)), reading)
    if as_json:
        print_json({"name": config.name, **plan.to_json()})
    else:
        print(_text(config, plan, reading))
    too_often = plan.above(TOO_MANY_EPOCHS)
    if too_often and not allow_repeats:
        raise CheckFailed(
            "too many epochs: " + ", ".join(f"{source.name} {source.epochs:.2f}" for source in too_often),
            allowed=f"at most {TOO_MANY_EPOCHS} epochs of each source",
            hint="a lower weight, a shorter run, or more documents; --allow-repeats if it is intended",
        )


def dry_run_lines(config: "RunConfig", sources: "Mapping[str, Source]") -> list[str]:
    """Return the lines of ``smalti train --dry-run``: weights and epochs of the sources, warnings of many repeats."""
    from smalti.base.units import format_count

    plan = _plan_of(config, sources)
    lines = []
    for k, source in enumerate(plan.sources):
        weights = ", then ".join(_weight(stage.shares[k]) for stage in plan.stages)
        lines.append(
            f"source     {source.name}: {format_count(source.n_tokens)} tokens, {_epochs(source.epochs)} epochs, "
            f"weight {weights}"
        )
    return lines + [f"warning    {line}" for line in _repeats(plan)]


def repeat_warnings(config: "RunConfig", sources: "Mapping[str, Source]") -> list[str]:
    """Return the warnings of ``smalti plan data``: a line for each source with too many epochs."""
    return _repeats(_plan_of(config, sources))


def _plan_of(config: "RunConfig", sources: "Mapping[str, Source]") -> "DataPlan":
    from smalti.cli.plan.data_counts import counts_of, make_plan, reading_of

    known = {name: counts_of(name, source, 0) for name, source in sources.items()}
    return make_plan(config, known, reading_of(config))


def _repeats(plan: "DataPlan") -> list[str]:
    from smalti.plan.data import MANY_EPOCHS

    return [plan.repeats_text(source, MANY_EPOCHS) for source in plan.above(MANY_EPOCHS)]


def _text(config: "RunConfig", plan: "DataPlan", reading: "Reading") -> str:
    from smalti.base.units import format_count
    from smalti.plan.data import WORTH_FORMULA

    blocks = [f"{config.name}: {format_count(plan.tokens)} tokens in {plan.steps:,} steps", _sources_text(plan)]
    if len(plan.stages) > 1:
        blocks.append(_stages_text(plan))
    notes = [
        f"note: {format_count(source.restart_tokens)} tokens of '{source.name}' are seen again before all of it was "
        "seen once, because seq_len changes"
        for source in plan.sources
        if source.restart_tokens >= 1
    ]
    notes += [f"warning: {line}" for line in _repeats(plan)]
    if notes:
        blocks.append("\n".join(notes))
    return "\n\n".join([*blocks, _costs_text(config, plan, reading), f"worth: {WORTH_FORMULA}"])


def _sources_text(plan: "DataPlan") -> str:
    from smalti.base.units import format_bytes, format_count, format_frac
    from smalti.cli.tables import table

    one_stage, padded = len(plan.stages) == 1, plan.padding_frac > 0
    head = ["source", "holds", *(["weight"] if one_stage else []), "takes", "share", "epochs", "worth"]
    head += [*(["padding"] if padded else []), "requests", "reads", "stored"]
    rows = []
    for k, source in enumerate(plan.sources):
        row = [source.name, format_count(source.n_tokens)]
        row += [_weight(plan.stages[0].shares[k])] if one_stage else []
        row += [format_count(source.tokens), format_frac(source.share_frac), _epochs(source.epochs)]
        row += [format_frac(source.worth_frac), *([format_frac(source.padding_frac)] if padded else [])]
        row.append("not known" if source.requests is None else f"{source.requests:,}")
        sizes = source.read_bytes, source.stored_bytes
        rows.append([*row, *("not known" if size is None else format_bytes(size) for size in sizes)])
    return table(head, rows)


def _stages_text(plan: "DataPlan") -> str:
    from smalti.base.units import format_count
    from smalti.cli.tables import table

    rows = []
    for stage in plan.stages:
        steps = f"{stage.start_step:,} - {stage.end_step:,}"
        for share in stage.shares:
            if share.sequences or share.weight or share.weight_end:
                counts = format_count(share.tokens), _epochs(share.epochs), _epochs(share.epochs_after)
                rows.append((stage.name, steps, f"{stage.seq_len:,}", share.name, _weight(share), *counts))
    return table(("stage", "steps", "seq_len", "source", "weight", "takes", "epochs", "so far"), rows)


def _costs_text(config: "RunConfig", plan: "DataPlan", reading: "Reading") -> str:
    from smalti.base import store
    from smalti.base.units import format_bytes, format_count, format_seconds
    from smalti.cli.tables import pairs

    if plan.requests is None or plan.read_bytes is None or plan.stored_bytes is None or plan.index_bytes is None:
        named = ", ".join(source.name for source in plan.sources if source.requests is None)
        return f"requests, bytes, dollars and start-up: not known, because {named} is not in Smalti's token files"
    assert plan.first_batch_s is not None
    assert plan.tokens_per_s_limit is not None
    prices = (
        f"{_usd(plan.requests_usd)} at {reading.usd_per_million_requests:g} USD a million",
        f"{_usd(plan.egress_usd)} at {reading.usd_per_gib_egress:g} USD a GiB",
        f"{_usd(plan.storage_usd_per_month)} a month at {reading.usd_per_gib_month:g} USD a GiB",
    )
    bound = "at most" if config.data.packing == "concat" else "or less in the mean"
    ranks = f"{reading.ranks} rank" + ("s" if reading.ranks > 1 else "")
    start = f"first batch on {ranks} after {format_seconds(plan.first_batch_s)}"
    speed = f"{format_count(plan.tokens_per_s_limit)} tokens/s"
    lines = [
        ("requests", f"{plan.requests:,} {bound}: {prices[0]}"),
        ("reads", f"{format_bytes(plan.read_bytes)}: {prices[1]}"),
        ("stored", f"{format_bytes(plan.stored_bytes)}: {prices[2]}"),
        ("indexes", f"{format_bytes(plan.index_bytes)} in {plan.index_requests} requests, once for the whole job"),
        ("start", f"{start}, at {format_seconds(reading.request_latency_s)} a request"),
        ("limit", f"{speed} by data.fetch.requests_per_s={reading.requests_per_s:g}"),
    ]
    if all(store.is_local(source.path) for source in config.data.sources.values()):
        lines.append(("", "(local folders need none of this; it is what an object store would take)"))
    return pairs(lines)


def _weight(share: "Share") -> str:
    """Return the weight as it is quantised, in six digits; of a ramp that of its first and last part."""
    ends = dict.fromkeys((share.weight, share.weight_end))
    return " -> ".join(f"{float(weight):.6g}" for weight in ends)


def _epochs(value: float) -> str:
    return f"{value:.2f}" if value >= 0.1 or not value else f"{value:.2g}"


def _usd(value: float | None) -> str:
    return "not known" if value is None else f"{value:,.2f} USD"
