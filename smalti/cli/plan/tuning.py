"""``smalti plan tuning``: the memory of tuning a model, and the fewest of each device that hold it."""

from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from smalti.cli.options import Json
from smalti.cli.plan.devices import GpuOrAll, Usable, require_trainable, select_devices, too_small_text, usable_bytes
from smalti.cli.plan.load import Model, ModelOverrides, load_model

if TYPE_CHECKING:
    from smalti.config.hardware import Hardware
    from smalti.plan.tuning import Tuned


def tuning(
    model: Model,
    overrides: ModelOverrides = None,
    method: Annotated[
        Literal["full", "lora", "qlora", "dpo", "dpo-lora"], typer.Option(help="The tuning method.")
    ] = "lora",
    rank: Annotated[int | None, typer.Option(help="Rank of the adapters; absent: 16.")] = None,
    targets: Annotated[
        str | None, typer.Option(help="Matrices with an adapter, such as q_proj,v_proj; absent: all-linear.")
    ] = None,
    seq_len: Annotated[int | None, typer.Option(help="Tokens of a row; absent: 2048, or the model's maximum.")] = None,
    microbatch: Annotated[int, typer.Option(help="Rows of a forward pass on a device; with DPO, pairs.")] = 1,
    quantize: Annotated[
        Literal["nf4", "nf4_double", "int8"] | None,
        typer.Option(help="Frozen matrices of qlora, as adapter.quantize; absent: nf4."),
    ] = None,
    recompute: Annotated[bool, typer.Option(help="Recompute each layer in the backward pass.")] = True,
    gpu: GpuOrAll = None,
    usable: Usable = None,
    as_json: Json = False,
) -> None:
    """Print trainable parameters and bytes of tuning a model, and the fewest of each device that hold it.

    smalti tune trains all weights, or adapters (section adapter of a recipe). With --gpu, exit 3 where no number of
    devices is enough.
    """
    from smalti.cli.tables import print_json
    from smalti.plan.serving.devices import max_devices
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
            quantize,
        ),
    )
    rows = []
    for device in _trainable(select_devices(gpu), alone=gpu is not None):
        available_bytes = usable_bytes(device, usable, reserved_frac=0.0)
        fewest = plan.fewest(available_bytes, max_devices(device))
        row: dict[str, Any] = {"name": device.name, "title": device.title, "memory_bytes": int(available_bytes)}
        rows.append(
            row | {"fits": fewest is not None} | ({"gpus": fewest.devices, **fewest.to_json()} if fewest else {})
        )
    if as_json:
        print_json(_head(model, plan) | {"on_one": plan.on(1).to_json(), "devices": rows})
    else:
        print(_text(model, plan, rows, gpu))
    if gpu is not None and not rows[0]["fits"]:
        raise typer.Exit(3)


def _trainable(devices: "list[Hardware]", *, alone: bool) -> "list[Hardware]":
    """Return the devices that a model can be trained on; with ``alone`` (one device), raises UserError for others."""
    if alone:
        require_trainable(devices[0])
    return [device for device in devices if device.kind != "mps"]


def _head(name: str, plan: "Tuned") -> dict[str, Any]:
    tuning = plan.tuning
    return {
        "model": name,
        "params": plan.params,
        "method": tuning.method,
        "quantize": (tuning.quantize or "nf4") if tuning.method == "qlora" else None,
        "rank": plan.rank if tuning.adapts else None,
        "targets": list(plan.targets) if tuning.adapts else None,
        "seq_len": tuning.seq_len,
        "microbatch": tuning.microbatch,
        "recompute": tuning.recompute,
        "trainable_params": plan.trainable,
    }


_NOTES = {
    "state_bytes": "fp32 masters, gradients, two moments",
    "frozen_bytes": "the base model",
    "reference_bytes": "the reference model in bf16",
    "gathered_bytes": "gathered at one time",
    "activations_bytes": "of a microbatch (upper estimate)",
    "logits_bytes": "in chunks",
    "reduced_bytes": "gradients of embedding and head, after the three above are freed",
}


def _text(name: str, plan: "Tuned", rows: list[dict[str, Any]], gpu: str | None) -> str:
    from smalti.base.units import format_bytes, format_count, format_frac
    from smalti.cli.tables import pairs, table

    tuning = plan.tuning
    memory = plan.on(1).to_json()
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
        (key.removesuffix("_bytes"), f"{format_bytes(memory[key])}, {note}")
        for key, note in _NOTES.items()
        if memory[key]
    ]
    lines += [("driver, NCCL", f"{format_bytes(memory['reserved_bytes'])} (assumed)")]
    lines += [("fragments", f"{format_bytes(memory['fragmentation_bytes'])} (assumed)")]
    lines.append(("on one device", format_bytes(memory["total_bytes"])))
    head = ("device", "memory", "devices", "on each", "share")
    cells = [
        (row["name"], format_bytes(row["memory_bytes"]), f"{row['gpus']:,}", format_bytes(row["total_bytes"]),
         format_frac(row["total_bytes"] / row["memory_bytes"]))
        for row in rows if row["fits"]
    ]  # fmt: skip
    text = [pairs(lines), ""] + ([table(head, cells)] if cells else [])
    if small := [row["name"] for row in rows if not row["fits"]]:
        text.append(f"too small: {', '.join(small)}" if gpu is None else too_small_text(gpu))
    return "\n".join(text)
