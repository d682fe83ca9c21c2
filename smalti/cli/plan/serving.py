"""``smalti plan serving``: the memory of serving a model, the devices that hold it, and its decoding speed."""

from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from smalti.cli.options import Json
from smalti.cli.plan.devices import GpuOrAll, Usable, select_devices, too_small_text, usable_bytes
from smalti.cli.plan.load import Model, ModelOverrides, load_model

if TYPE_CHECKING:
    from smalti.config.hardware import Hardware
    from smalti.plan.serving.memory import Load, Served, Split


def serving(
    model: Model,
    overrides: ModelOverrides = None,
    context: Annotated[
        int | None, typer.Option(help="Tokens of a request, prompt and answer; absent: 4096, or the model's maximum.")
    ] = None,
    batch: Annotated[int, typer.Option(help="Concurrent requests.")] = 1,
    weights: Annotated[
        str, typer.Option(help="Format of the weights: fp32 bf16 fp8 int8 int4 nf4 mxfp4 nvfp4, or GGUF's (q4_k_m).")
    ] = "bf16",
    kv: Annotated[str, typer.Option(help="Format of the cache: fp32 bf16 fp8 int8 q8_0 q4_0.")] = "bf16",
    cache: Annotated[
        Literal["paged", "smalti"],
        typer.Option(help="How the cache is allocated: blocks of 16 tokens, or as smalti serve."),
    ] = "paged",
    prefill_tokens: Annotated[
        int | None, typer.Option(help="Prompt tokens that a step processes; absent: 2048, with --cache smalti 256.")
    ] = None,
    gpu: GpuOrAll = None,
    usable: Usable = None,
    as_json: Json = False,
) -> None:
    """Print the memory of serving a model, and the smallest number of each device that holds it.

    Weights and cache are exact, a step's activations an estimate. Tokens/s: an upper bound by bandwidth and peak, and
    the share of it that engines reach. With --gpu, exit 3 where no number of devices holds it.
    """
    from smalti.cli.tables import print_json
    from smalti.plan.serving.memory import PREFILL_TOKENS, Load, Served

    shape = load_model(model, overrides)
    served = Served(shape, weights)
    load = Load(
        context_tokens=min(4096, shape.max_position_embeddings) if context is None else context,
        batch=batch,
        kv=kv,
        cache=cache,
        prefill_tokens={"paged": PREFILL_TOKENS, "smalti": 256}[cache] if prefill_tokens is None else prefill_tokens,
    )
    rows: list[dict[str, Any]] = []
    for device in select_devices(gpu):
        usable_memory = usable_bytes(device, usable)
        device_splits = _splits(served, load, device, usable_memory, every=gpu is not None)
        rows += [_row(served, load, device, usable_memory, split) for split in device_splits]
    plan = _plan(model, served, load) | {"devices": rows}
    if as_json:
        print_json(plan)
    else:
        print(_text(plan, served, load, gpu))
    if gpu is not None and not any(row["fits"] for row in rows):
        raise typer.Exit(3)


def _splits(served: "Served", load: "Load", device: "Hardware", usable: float, *, every: bool) -> "list[Split | None]":
    """Return the smallest split that fits, with ``every`` also larger tensor splits in a node; [None]: none fits."""
    from smalti.plan.serving.devices import smallest_split
    from smalti.plan.serving.memory import Split, tensor_sizes

    smallest = smallest_split(served, load, device, usable)
    if smallest is None:
        return [None]
    sizes = tensor_sizes(served.model, device.devices_per_node) if every else []
    return [smallest[0], *(Split(size) for size in sizes if size > smallest[0].devices)]


def _row(served: "Served", load: "Load", device: "Hardware", usable: float, split: "Split | None") -> dict[str, Any]:
    from smalti.plan.serving.devices import speed
    from smalti.plan.serving.memory import device_memory, largest_batch, largest_context

    row: dict[str, Any] = {
        "name": device.name,
        "title": device.title,
        "room_bytes": int(usable),
        "fits": split is not None,
    }
    if split is None:
        return row
    return row | {
        "gpus": split.devices,
        "tensor": split.tensor,
        "stages": split.stages,
        **device_memory(served, load, split).to_json(),
        "largest_context_tokens": largest_context(served, load, split, usable),
        "largest_batch": largest_batch(served, load, split, usable),
        **speed(served, load, split, device).to_json(),
    }


def _plan(name: str, served: "Served", load: "Load") -> dict[str, Any]:
    from dataclasses import asdict

    from smalti.cost.params import count
    from smalti.plan.serving.memory import device_memory

    params = count(served.model)
    memory = device_memory(served, load)
    return {
        "model": name,
        "params": params.total,
        "active_params": params.active,
        "weights": served.form,
        "bits_per_param": 8 * served.weights_bytes / params.total,
        **asdict(load),
        "weights_bytes_by_kind": served.bytes_by_kind,
        **memory.to_json(),
    }


def _text(plan: dict[str, Any], served: "Served", load: "Load", gpu: str | None) -> str:
    from smalti.base.units import format_bytes, format_count
    from smalti.cli.tables import pairs

    kinds = ", ".join(f"{kind} {format_bytes(size)}" for kind, size in plan["weights_bytes_by_kind"].items())
    a_token = plan["kv_bytes"] / load.batch / load.context_tokens
    requests = "1 request" if load.batch == 1 else f"{load.batch:,} requests"
    lines = [
        ("model", f"{plan['model']}: {format_count(plan['params'])} parameters, "
                  f"{format_count(plan['active_params'])} active"),
        ("load", f"{requests} of {load.context_tokens:,} tokens"),
        ("weights", f"{format_bytes(plan['weights_bytes'])} in {served.form}, "
                    f"{plan['bits_per_param']:.3f} bits each"),
        ("", kinds),
        ("cache", f"{format_bytes(plan['kv_bytes'])} in {load.kv}, {format_bytes(a_token)} a token"),
        ("activations", f"{format_bytes(plan['activations_bytes'])} (estimate)"),
        ("total", format_bytes(plan["total_bytes"])),
    ]  # fmt: skip
    return "\n".join([pairs(lines), "", *_table(plan["devices"], gpu), "", *_notes(plan["devices"])])


def _table(rows: list[dict[str, Any]], gpu: str | None) -> list[str]:
    from smalti.base.units import format_bytes, format_count
    from smalti.cli.tables import table

    fitting = [row for row in rows if row["fits"]]
    head = ("device", "usable", "devices", "split", "on each", "longest context", "largest batch", "tokens/s at most",
            "expected")  # fmt: skip
    cells = [
        (
            row["name"],
            format_bytes(row["room_bytes"]),
            str(row["gpus"]),
            _split_text(row),
            format_bytes(row["total_bytes"]),
            f"{row['largest_context_tokens']:,}",
            f"{row['largest_batch']:,}",
            format_count(row["most_tokens_per_s"]),
            f"{format_count(row['low_tokens_per_s'])} to {format_count(row['high_tokens_per_s'])}",
        )
        for row in fitting
    ]
    lines = [table(head, cells)] if cells else []
    if small := [row["name"] for row in rows if not row["fits"]]:
        lines.append(f"too small: {', '.join(small)}" if gpu is None else too_small_text(gpu))
    return lines


def _split_text(row: dict[str, Any]) -> str:
    from smalti.plan.serving.memory import Split

    return str(Split(row["tensor"], row["stages"]))


def _notes(rows: list[dict[str, Any]]) -> list[str]:
    from smalti.plan.serving.devices import ALONE_FRAC, JOINED_FRAC, RESERVED_FRAC

    ranges = [f"{low:g} to {high:g} of it on {where}"
              for where, (low, high) in (("one device", ALONE_FRAC), ("several", JOINED_FRAC))]  # fmt: skip
    return [
        f"usable: memory less {RESERVED_FRAC:.0%} for the runtime, or what the system lets programs use",
        f"tokens/s at most: of the whole batch, by bandwidth and peak; expected: {ranges[0]}, {ranges[1]}",
    ]
