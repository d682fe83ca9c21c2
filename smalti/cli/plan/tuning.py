"""``smalti plan tuning``: the memory of tuning a model, and the fewest of each device that it takes, in print."""

from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from smalti.cli.plan.model import Gpu, Model, Overrides, Usable, devices, load_model, not_enough, room
from smalti.cli.plan.recipe import Json

if TYPE_CHECKING:
    from smalti.config.hardware import Hardware
    from smalti.plan.tuning import Tuned


def tuning(
    model: Model,
    overrides: Overrides = None,
    method: Annotated[
        Literal["full", "lora", "qlora", "dpo", "dpo-lora"], typer.Option(help="What is trained, and how.")
    ] = "lora",
    rank: Annotated[int | None, typer.Option(help="Rank of the adapters; absent: 16.")] = None,
    targets: Annotated[
        str | None, typer.Option(help="Matrices with an adapter, as q_proj,v_proj; absent: all-linear.")
    ] = None,
    seq_len: Annotated[int | None, typer.Option(help="Tokens of a row; absent: 2048, or all that it can.")] = None,
    microbatch: Annotated[int, typer.Option(help="Rows of a forward pass on a device; with DPO pairs.")] = 1,
    recompute: Annotated[bool, typer.Option(help="Compute each layer again in the backward pass.")] = True,
    gpu: Gpu = None,
    usable: Usable = None,
    as_json: Json = False,
) -> None:
    """Print trainable parameters and bytes of tuning a model, and the fewest of each device that hold it.

    The trainer here tunes all weights (init_from); adapters and DPO are planned by the same arithmetic. With --gpu,
    exit 3 where no number of them is enough.
    """
    from smalti.cli.tables import print_json
    from smalti.plan.serving.devices import most_devices
    from smalti.plan.tuning import Tuned, Tuning

    shape = load_model(model, overrides)
    plan = Tuned(
        shape,
        Tuning(
            method,
            min(2048, shape.max_position_embeddings) if seq_len is None else seq_len,
            microbatch,
            rank,
            tuple(part.strip() for part in targets.split(",")) if targets is not None else (),
            recompute,
        ),
    )
    rows = []
    for known in _trainable(devices(gpu), alone=gpu is not None):
        there = room(known, usable, reserved_frac=0.0)
        found = plan.fewest(there, most_devices(known))
        row: dict[str, Any] = {"name": known.name, "title": known.title, "memory_bytes": int(there)}
        rows.append(row | {"fits": found is not None} | ({"gpus": found.devices, **found.to_json()} if found else {}))
    if as_json:
        print_json(_head(model, plan) | {"on_one": plan.on(1).to_json(), "devices": rows})
    else:
        print(_text(model, plan, rows, gpu))
    if gpu is not None and not rows[0]["fits"]:
        raise typer.Exit(3)


def _trainable(known: "list[Hardware]", *, alone: bool) -> "list[Hardware]":
    """Those that a model can be trained on; UserError where the only one is none."""
    from smalti.base.errors import UserError

    if alone and known[0].kind == "mps":
        raise UserError(
            f"smalti train does not run on {known[0].title}",
            allowed="CUDA, ROCm, a CPU",
            hint="--gpu h100-sxm, or leave it out for all",
        )
    return [one for one in known if one.kind != "mps"]


def _head(name: str, plan: "Tuned") -> dict[str, Any]:
    tuning = plan.tuning
    return {
        "model": name,
        "params": plan.params,
        "method": tuning.method,
        "rank": plan.rank if tuning.adapts else None,
        "targets": list(plan.targets) if tuning.adapts else None,
        "seq_len": tuning.seq_len,
        "microbatch": tuning.microbatch,
        "recompute": tuning.recompute,
        "trainable_params": plan.trainable,
    }


_SAID = {
    "state_bytes": "fp32 masters, gradients, two moments",
    "frozen_bytes": "the base",
    "reference_bytes": "the reference in bf16",
    "gathered_bytes": "whole at one time",
    "activations_bytes": "of a microbatch, an upper estimate",
    "logits_bytes": "in chunks",
    "reduced_bytes": "gradients of embedding and head, after the three above are gone",
}


def _text(name: str, plan: "Tuned", rows: list[dict[str, Any]], gpu: str | None) -> str:
    from smalti.base.units import format_bytes, format_count, format_frac
    from smalti.cli.tables import pairs, table

    tuning, one = plan.tuning, plan.on(1).to_json()
    share = format_frac(plan.trainable / plan.params)
    how = f", rank {plan.rank} on {', '.join(plan.targets)}" if tuning.adapts else ""
    unit = "pairs" if tuning.rows > tuning.microbatch else "rows"
    lines = [
        ("model", f"{name}: {format_count(plan.params)} parameters"),
        ("method", f"{tuning.method}{how}"),
        ("trained", f"{plan.trainable:,} parameters ({share})"),
        ("microbatch", f"{tuning.microbatch:,} {unit} of {tuning.seq_len:,} tokens"),
    ]
    lines += [
        (key.removesuffix("_bytes"), f"{format_bytes(one[key])}, {said}") for key, said in _SAID.items() if one[key]
    ]
    lines += [("driver, NCCL", f"{format_bytes(one['reserved_bytes'])} (assumed)")]
    lines += [("fragments", f"{format_bytes(one['fragmentation_bytes'])} (assumed)")]
    lines.append(("on one device", format_bytes(one["total_bytes"])))
    head = ("device", "memory", "devices", "on each", "share")
    cells = [
        (row["name"], format_bytes(row["memory_bytes"]), f"{row['gpus']:,}", format_bytes(row["total_bytes"]),
         format_frac(row["total_bytes"] / row["memory_bytes"]))
        for row in rows if row["fits"]
    ]  # fmt: skip
    text = [pairs(lines), ""] + ([table(head, cells)] if cells else [])
    if small := [row["name"] for row in rows if not row["fits"]]:
        text.append(f"too small: {', '.join(small)}" if gpu is None else not_enough(gpu))
    return "\n".join(text)
