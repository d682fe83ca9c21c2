"""``smalti plan flops``: what a token costs by each convention, and one MFU under all of them, in print."""

from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from smalti.cli.plan.model import Model, Overrides, load_model
from smalti.cli.plan.recipe import Json

if TYPE_CHECKING:
    from smalti.config.model import ModelConfig
    from smalti.plan.flops_conventions import Convention


def flops(
    model: Model,
    overrides: Overrides = None,
    seq_len: Annotated[
        int | None, typer.Option(help="Tokens of a sequence; absent: the longest that the model takes.")
    ] = None,
    mfu: Annotated[float | None, typer.Option(help="An MFU (0..1) to say under every convention.")] = None,
    source: Annotated[
        str | None, typer.Option("--from", help="The convention that it was reported under; absent: exact.")
    ] = None,
    recompute: Annotated[
        Literal["none", "attention", "full"], typer.Option(help="What the backward pass computes again, for HFU.")
    ] = "none",
    gpu: Annotated[
        str | None, typer.Option(help="Also tokens/s at that MFU on this device (a100-40gb), by its bf16 peak.")
    ] = None,
    gpus: Annotated[int, typer.Option(help="How many of it.")] = 1,
    as_json: Json = False,
) -> None:
    """Print the FLOPs of a training token as Smalti and others count them.

    With --mfu also what that utilisation is under each: the same run, the same speed, other formulas.
    """
    from smalti.cli.tables import print_json
    from smalti.plan.flops_conventions import CONVENTIONS, convention

    _check(mfu=mfu, source=source, gpu=gpu, gpus=gpus)
    shape = load_model(model, overrides)
    tokens = shape.max_position_embeddings if seq_len is None else seq_len
    reported = convention(source or "exact").name
    rows = [_row(one, shape, tokens, mfu, reported, recompute) for one in CONVENTIONS.values()]
    speed = _speed(shape, tokens, mfu, reported, gpu, gpus)
    found = {"model": model, "seq_len": tokens, "mfu": mfu, "from": reported, "recompute": recompute, **speed}
    if as_json:
        print_json({**found, "conventions": rows})
    else:
        print(_text(shape, found, rows))


def _check(*, mfu: float | None, source: str | None, gpu: str | None, gpus: int) -> None:
    from smalti.base.errors import UserError

    if mfu is None and (source is not None or gpu is not None):
        given = f"--from {source}" if source is not None else f"--gpu {gpu}"
        raise UserError(f"{given} says nothing without an MFU", allowed="both", hint=f"--mfu 0.4 {given}")
    if gpu is None and gpus != 1:
        raise UserError(f"--gpus {gpus} of no device", allowed="--gpu with it", hint=f"--gpu h100-sxm --gpus {gpus}")
    if not 1 <= gpus <= 10_000_000:
        raise UserError(f"--gpus {gpus} cannot be", allowed="1 to 10,000,000")


def _row(
    one: "Convention",
    shape: "ModelConfig",
    seq_len: int,
    mfu: float | None,
    reported: str,
    recompute: Literal["none", "attention", "full"],
) -> dict[str, Any]:
    from smalti.base.errors import UserError
    from smalti.plan.flops_conventions import convert_mfu, flops_per_token, hfu

    row: dict[str, Any] = {"name": one.name, "formula": one.symbols, "note": one.note, "source": one.source}
    try:
        row["flops_per_token"] = flops_per_token(shape, seq_len, one.name)
    except UserError as error:
        if one.name in (reported, "exact"):
            raise
        return {**row, "flops_per_token": None, "mfu": None, "hfu": None, "why": error.message}
    row["mfu"] = row["hfu"] = None
    if mfu is not None:
        row["mfu"] = convert_mfu(mfu, shape, seq_len, source=reported, target=one.name)
        again = hfu(1.0, shape, seq_len, recompute=recompute, name=one.name)
        row["hfu"] = row["mfu"] * again
    return row


def _speed(
    shape: "ModelConfig", seq_len: int, mfu: float | None, reported: str, gpu: str | None, gpus: int
) -> dict[str, Any]:
    from smalti.config.hardware import hardware
    from smalti.plan.flops_conventions import tokens_per_s

    if gpu is None or mfu is None:
        return {"gpu": None, "gpus": None, "tokens_per_s": None}
    known = hardware(gpu)
    peak = gpus * known.require_peak("bf16")
    rate = tokens_per_s(mfu, shape, seq_len, name=reported, peak_flops_per_s=peak)
    return {"gpu": known.name, "gpus": gpus, "tokens_per_s": rate}


def _text(shape: "ModelConfig", found: dict[str, Any], rows: list[dict[str, Any]]) -> str:
    from smalti.base.units import format_count, format_flops, format_frac
    from smalti.cli.tables import pairs, table
    from smalti.cost.params import count

    params, with_mfu, again = count(shape), found["mfu"] is not None, found["recompute"] != "none"
    exact = next(row["flops_per_token"] for row in rows if row["name"] == "exact")
    head = ["convention", "FLOPs/token", "of exact", *["MFU"] * with_mfu, *["HFU"] * (with_mfu and again)]
    lines = []
    for row in rows:
        flops, line = row["flops_per_token"], [row["name"]]
        line += ["-", "-"] if flops is None else [format_flops(flops), f"{flops / exact:.3f}"]
        line += ["-" if row["mfu"] is None else format_frac(row["mfu"])] * with_mfu
        line += ["-" if row["hfu"] is None else format_frac(row["hfu"])] * (with_mfu and again)
        lines.append(line)
    active = f", {format_count(params.active)} active" if params.active != params.total else ""
    text = f"{found['model']}: {format_count(params.total)} parameters{active}, sequences of {found['seq_len']:,}"
    if with_mfu:
        text += f"; MFU {format_frac(found['mfu'])} by {found['from']}"
    if found["tokens_per_s"] is not None:
        text += f" on {found['gpus']:,} x {found['gpu']}: {format_count(found['tokens_per_s'])} tokens/s"
    notes = pairs([(row["name"], f"{row['formula']}: {row.get('why') or row['note']}") for row in rows])
    return f"{text}\n\n{table(head, lines)}\n\n{notes}"
