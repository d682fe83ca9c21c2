"""``smalti plan flops``: FLOPs of a token under each convention, and one MFU converted to all of them."""

from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from smalti.cli.options import Json
from smalti.cli.plan.load import Model, ModelOverrides, load_model

if TYPE_CHECKING:
    from smalti.config.model import ModelConfig
    from smalti.plan.flops_conventions import Convention


def flops(
    model: Model,
    overrides: ModelOverrides = None,
    seq_len: Annotated[int | None, typer.Option(help="Tokens of a sequence; absent: the model's maximum.")] = None,
    mfu: Annotated[float | None, typer.Option(help="An MFU (0..1) to convert to every convention.")] = None,
    source: Annotated[
        str | None, typer.Option("--from", help="The convention under which it was reported; absent: exact.")
    ] = None,
    recompute: Annotated[
        Literal["none", "attention", "full"], typer.Option(help="What the backward pass recomputes, for HFU.")
    ] = "none",
    gpu: Annotated[
        str | None, typer.Option(help="Also tokens/s at that MFU on this device (a100-40gb), by its bf16 peak.")
    ] = None,
    gpus: Annotated[int, typer.Option(help="Number of these devices.")] = 1,
    as_json: Json = False,
) -> None:
    """Print the FLOPs per training token as Smalti and others count them.

    With --mfu, also prints the same utilisation under each convention.
    """
    from smalti.cli.tables import print_json
    from smalti.plan.flops_conventions import CONVENTIONS, convention

    _check(mfu=mfu, source=source, gpu=gpu, gpus=gpus)
    shape = load_model(model, overrides)
    tokens = shape.max_position_embeddings if seq_len is None else seq_len
    reported = convention(source or "exact").name
    rows = [_row(each, shape, tokens, mfu, reported, recompute) for each in CONVENTIONS.values()]
    speed = _speed(shape, tokens, mfu, reported, gpu, gpus)
    result = {"model": model, "seq_len": tokens, "mfu": mfu, "from": reported, "recompute": recompute, **speed}
    if as_json:
        print_json({**result, "conventions": rows})
    else:
        print(_text(shape, result, rows))


def _check(*, mfu: float | None, source: str | None, gpu: str | None, gpus: int) -> None:
    from smalti.base.errors import UserError

    if mfu is None and (source is not None or gpu is not None):
        option = f"--from {source}" if source is not None else f"--gpu {gpu}"
        raise UserError(f"{option} has no effect without an MFU", allowed="both", hint=f"--mfu 0.4 {option}")
    if gpu is None and gpus != 1:
        raise UserError(
            f"--gpus {gpus} has no effect without --gpu", allowed="both", hint=f"--gpu h100-sxm --gpus {gpus}"
        )
    if not 1 <= gpus <= 10_000_000:
        raise UserError(f"--gpus {gpus} is out of range", allowed="1 to 10,000,000")


def _row(
    convention: "Convention",
    shape: "ModelConfig",
    seq_len: int,
    mfu: float | None,
    reported: str,
    recompute: Literal["none", "attention", "full"],
) -> dict[str, Any]:
    from smalti.base.errors import UserError
    from smalti.plan.flops_conventions import convert_mfu, flops_per_token, hfu

    row: dict[str, Any] = {
        "name": convention.name,
        "formula": convention.symbols,
        "note": convention.note,
        "source": convention.source,
    }
    try:
        row["flops_per_token"] = flops_per_token(shape, seq_len, convention.name)
    except UserError as error:
        if convention.name in (reported, "exact"):
            raise
        return {**row, "flops_per_token": None, "mfu": None, "hfu": None, "why": error.message}
    row["mfu"] = row["hfu"] = None
    if mfu is not None:
        row["mfu"] = convert_mfu(mfu, shape, seq_len, source=reported, target=convention.name)
        again = hfu(1.0, shape, seq_len, recompute=recompute, name=convention.name)
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


def _text(shape: "ModelConfig", result: dict[str, Any], rows: list[dict[str, Any]]) -> str:
    from smalti.base.units import format_count, format_flops, format_frac
    from smalti.cli.tables import pairs, table
    from smalti.cost.params import count

    params = count(shape)
    with_mfu = result["mfu"] is not None
    again = result["recompute"] != "none"
    exact = next(row["flops_per_token"] for row in rows if row["name"] == "exact")
    head = ["convention", "FLOPs/token", "of exact", *["MFU"] * with_mfu, *["HFU"] * (with_mfu and again)]
    lines = []
    for row in rows:
        flops = row["flops_per_token"]
        line = [row["name"]]
        line += ["-", "-"] if flops is None else [format_flops(flops), f"{flops / exact:.3f}"]
        line += ["-" if row["mfu"] is None else format_frac(row["mfu"])] * with_mfu
        line += ["-" if row["hfu"] is None else format_frac(row["hfu"])] * (with_mfu and again)
        lines.append(line)
    active = f", {format_count(params.active)} active" if params.active != params.total else ""
    text = f"{result['model']}: {format_count(params.total)} parameters{active}, sequences of {result['seq_len']:,}"
    if with_mfu:
        text += f"; MFU {format_frac(result['mfu'])} by {result['from']}"
    if result["tokens_per_s"] is not None:
        text += f" on {result['gpus']:,} x {result['gpu']}: {format_count(result['tokens_per_s'])} tokens/s"
    notes = pairs([(row["name"], f"{row['formula']}: {row.get('why') or row['note']}") for row in rows])
    return f"{text}\n\n{table(head, lines)}\n\n{notes}"
