"""``smalti plan hardware``: the known devices, or one of them with the source of every figure."""

from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from smalti.cli.options import Json

if TYPE_CHECKING:
    from smalti.config.hardware import Hardware
    from smalti.config.measured import Measured


def hardware(
    name: Annotated[
        str | None, typer.Argument(metavar="NAME", help="A device, or a .yaml file of one; absent: all of them.")
    ] = None,
    save: Annotated[
        str | None, typer.Option(help="With this-machine: write the measurement to this .yaml file.")
    ] = None,
    threads: Annotated[int | None, typer.Option(help="With this-machine: CPU threads; absent: all cores.")] = None,
    device: Annotated[
        Literal["cpu", "cuda"] | None, typer.Option(help="With this-machine: what to measure; absent: its CPU.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Print the known devices: dense peaks, memory, links, usual price. With a name, also the source of every figure.

    this-machine measures its CPU in about a minute: matrix products by shape, attention, kernels, an all-reduce. With
    --device cuda it measures the first GPU (ROCm too): large products, a copy, memory; not tested on one yet. A saved
    measurement is used like any device: --gpu FILE.yaml.
    """
    from smalti.base.errors import UserError
    from smalti.cli.plan.measure import THIS_MACHINE, measure
    from smalti.cli.tables import print_json
    from smalti.config.hardware import hardware as find
    from smalti.config.hardware import hardware_names

    options = {"--save": save, "--threads": threads, "--device": device}
    used = [option for option, value in options.items() if value is not None]
    if name != THIS_MACHINE and used:
        raise UserError(f"{used[0]} has no effect without a measurement", allowed=f"with {THIS_MACHINE}")
    if name is None:
        known = [find(each) for each in hardware_names()]
        if as_json:
            print_json([_values(each) for each in known])
        else:
            print(_table_text(known))
        return
    machine = measure(save, threads, device or "cpu") if name == THIS_MACHINE else find(name)
    if as_json:
        print_json(_values(machine))
    else:
        print(_device_text(machine))


def _values(device: "Hardware") -> dict[str, Any]:
    """Return the content of the device's file."""
    return device.model_dump(mode="json")


def _table_text(devices: "list[Hardware]") -> str:
    from smalti.base.units import format_bytes, format_count
    from smalti.cli.tables import table

    def peak(device: "Hardware", precision: str) -> str:
        value = device.peak(precision)
        return "-" if value is None else format_count(value)

    head = ("device", "bf16", "fp8", "memory", "bandwidth", "node", "in a node", "between nodes", "USD/h", "of")
    rows = [
        (
            device.name,
            peak(device, "bf16"),
            peak(device, "fp8"),
            format_bytes(device.available_memory_bytes),
            _rate(device.memory_bytes_per_s),
            str(device.devices_per_node),
            _rate(device.node_bytes_per_s),
            _rate(device.network_bytes_per_s),
            f"{device.price.usd_per_hour:.2f}" if device.price else "-",
            device.price.date if device.price else "-",
        )
        for device in devices
    ]
    notes = (
        "bf16 and fp8: dense FLOP/s; rates: of one device, in one direction; memory: what programs may take; prices: "
        "on demand, in the month named.\nsmalti plan hardware NAME prints the source of each figure."
    )
    return f"{table(head, rows)}\n\n{notes}"


def _device_text(device: "Hardware") -> str:
    from smalti.base.units import format_bytes, format_flops, format_frac
    from smalti.cli.tables import pairs

    peaks = ", ".join(f"{name} {format_flops(value)}/s" for name, value in device.peak_flops_per_s.items())
    usable = device.usable_memory_bytes
    node = f"{device.devices_per_node} devices" + (f", {device.node_link}" if device.node_link else "")
    pair = f", {_rate(device.pair_bytes_per_s)} to one of them" if device.pair_bytes_per_s else ""
    price = device.price
    lines = [
        ("name", ", ".join((device.name, *device.aliases))),
        ("kind", device.kind),
        ("dense peaks", peaks or "not published"),
    ]
    if device.matmul_frac is not None:
        lines.append(("large matmul", f"{format_frac(device.matmul_frac)} of the bf16 peak"))
    lines += [
        ("memory", format_bytes(device.memory_bytes) + (f", {format_bytes(usable)} of it usable" if usable else "")),
        ("bandwidth", _rate(device.memory_bytes_per_s)),
        ("node", node),
        ("in a node", _rate(device.node_bytes_per_s) + pair),
        ("to its host", _rate(device.host_bytes_per_s)),
        ("between nodes", _rate(device.network_bytes_per_s)),
        ("price", f"{price.usd_per_hour:.2f} USD an hour ({price.date}, {price.source})" if price else "-"),
    ]
    text = f"{device.title}\n\n{pairs(lines)}\n\nsources\n{pairs(list(device.sources.items()))}"
    if device.measured is not None:
        text += f"\n\n{_measured_text(device.measured)}"
    return text + "".join(f"\n\n{note}" for note in device.notes)


def _measured_text(measured: "Measured") -> str:
    """Return some of the measured matrix products and copies; the file has all of them."""
    from smalti.base.units import format_bytes, format_flops
    from smalti.cli.tables import pairs

    lines = [("measured", f"{measured.date}, {measured.threads} threads, {measured.software}")]
    for name, of_operands in measured.matmul.items():
        squares = [f"{m}: {format_flops(rate)}/s" for m, k, n, rate in of_operands["nt"] if m == k == n]
        lines.append((f"{name} products", ", ".join(squares)))
    for elements, copy_s in measured.kernels["fp32"]["copy"]:
        lines.append((f"copy of {format_bytes(4 * elements)}", _rate(8 * elements / copy_s)))
    if measured.collective is not None:
        all_reduce = measured.collective
        lines.append(
            (
                f"all-reduce, {all_reduce.ranks} ranks",
                f"{all_reduce.latency_s * 1e3:.2g} ms and {_rate(all_reduce.bytes_per_s)}",
            )
        )
    return pairs(lines)


def _rate(value: float | None) -> str:
    from smalti.base.units import format_byte_rate

    return "-" if value is None else format_byte_rate(value)
