"""``smalti plan hardware``: the devices that are known, and one of them with the source of every figure, in print."""

from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from smalti.cli.plan.recipe import Json

if TYPE_CHECKING:
    from smalti.config.hardware import Hardware
    from smalti.config.measured import Measured


def hardware(
    name: Annotated[
        str | None, typer.Argument(metavar="[NAME]", help="A device, or a .yaml file of one; absent: all of them.")
    ] = None,
    save: Annotated[
        str | None, typer.Option(help="With this-machine: write the .yaml file of what was measured.")
    ] = None,
    threads: Annotated[int | None, typer.Option(help="With this-machine: CPU threads; absent: all cores.")] = None,
    device: Annotated[
        Literal["cpu", "cuda"] | None, typer.Option(help="With this-machine: what is measured; absent: its CPU.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Print what is known of devices: dense peaks, memory, links, usual price. With a name: every figure's source.

    this-machine is its CPU, measured in about a minute: matrix products by shape, attention, kernels, an all-reduce.
    With --device cuda it is its first GPU (ROCm's too): large products, a copy, memory; not tried on one yet. Saved, it
    is a device like any other: --gpu FILE.yaml.
    """
    from smalti.base.errors import UserError
    from smalti.cli.plan.measure import THIS_MACHINE, measure
    from smalti.cli.tables import print_json
    from smalti.config.hardware import hardware as find
    from smalti.config.hardware import hardware_names

    given = [
        one for one, value in (("--save", save), ("--threads", threads), ("--device", device)) if value is not None
    ]
    if name != THIS_MACHINE and given:
        raise UserError(f"{given[0]} has no effect without a measurement", allowed=f"with {THIS_MACHINE}")
    if name is None:
        known = [find(one) for one in hardware_names()]
        if as_json:
            print_json([_values(one) for one in known])
        else:
            print(_table_text(known))
        return
    one = measure(save, threads, device or "cpu") if name == THIS_MACHINE else find(name)
    if as_json:
        print_json(_values(one))
    else:
        print(_device_text(one))


def _values(known: "Hardware") -> dict[str, Any]:
    """What its file says, so that it can be kept as one."""
    return known.model_dump(mode="json")


def _table_text(known: "list[Hardware]") -> str:
    from smalti.base.units import format_bytes, format_count
    from smalti.cli.tables import table

    def peak(one: "Hardware", precision: str) -> str:
        value = one.peak(precision)
        return "-" if value is None else format_count(value)

    head = ("device", "bf16", "fp8", "memory", "bandwidth", "node", "in a node", "between nodes", "USD/h", "of")
    rows = [
        (
            one.name,
            peak(one, "bf16"),
            peak(one, "fp8"),
            format_bytes(one.available_memory_bytes),
            _rate(one.memory_bytes_per_s),
            str(one.devices_per_node),
            _rate(one.node_bytes_per_s),
            _rate(one.network_bytes_per_s),
            f"{one.price.usd_per_hour:.2f}" if one.price else "-",
            one.price.date if one.price else "-",
        )
        for one in known
    ]
    notes = (
        "bf16 and fp8: dense FLOP/s; rates: of one device, in one direction; memory: what programs may take; prices: "
        "on demand, in the month named.\nsmalti plan hardware NAME prints where each figure is from."
    )
    return f"{table(head, rows)}\n\n{notes}"


def _device_text(known: "Hardware") -> str:
    from smalti.base.units import format_bytes, format_flops, format_frac
    from smalti.cli.tables import pairs

    peaks = ", ".join(f"{name} {format_flops(value)}/s" for name, value in known.peak_flops_per_s.items())
    usable = known.usable_memory_bytes
    node = f"{known.devices_per_node} devices" + (f", {known.node_link}" if known.node_link else "")
    pair = f", {_rate(known.pair_bytes_per_s)} to one of them" if known.pair_bytes_per_s else ""
    price, lines = known.price, [("name", ", ".join((known.name, *known.aliases))), ("kind", known.kind)]
    lines += [("dense peaks", peaks or "not published")]
    if known.matmul_frac is not None:
        lines.append(("large matmul", f"{format_frac(known.matmul_frac)} of the bf16 peak"))
    lines += [
        ("memory", format_bytes(known.memory_bytes) + (f", {format_bytes(usable)} of it usable" if usable else "")),
        ("bandwidth", _rate(known.memory_bytes_per_s)),
        ("node", node),
        ("in a node", _rate(known.node_bytes_per_s) + pair),
        ("to its host", _rate(known.host_bytes_per_s)),
        ("between nodes", _rate(known.network_bytes_per_s)),
        ("price", f"{price.usd_per_hour:.2f} USD an hour ({price.date}, {price.source})" if price else "-"),
    ]
    text = f"{known.title}\n\n{pairs(lines)}\n\nsources\n{pairs(list(known.sources.items()))}"
    if known.measured is not None:
        text += f"\n\n{_measured_text(known.measured)}"
    return text + "".join(f"\n\n{note}" for note in known.notes)


def _measured_text(found: "Measured") -> str:
    """Products of a few shapes, copies of a few sizes; the file has all."""
    from smalti.base.units import format_bytes, format_flops
    from smalti.cli.tables import pairs

    lines = [("measured", f"{found.date}, {found.threads} threads, {found.software}")]
    for name, of_operands in found.matmul.items():
        squares = [f"{m}: {format_flops(rate)}/s" for m, k, n, rate in of_operands["nt"] if m == k == n]
        lines.append((f"{name} products", ", ".join(squares)))
    for elements, copy_s in found.kernels["fp32"]["copy"]:
        lines.append((f"copy of {format_bytes(4 * elements)}", _rate(8 * elements / copy_s)))
    if found.collective is not None:
        one = found.collective
        lines.append((f"all-reduce, {one.ranks} ranks", f"{one.latency_s * 1e3:.2g} ms and {_rate(one.bytes_per_s)}"))
    return pairs(lines)


def _rate(value: float | None) -> str:
    from smalti.base.units import format_byte_rate

    return "-" if value is None else format_byte_rate(value)
