"""Devices as data: every preset loads with its sources, names map to one device, and bad files are refused by name."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from synthetic_machine import machine, values

from smalti.base.errors import DataError, UserError
from smalti.config.hardware import Hardware, hardware, hardware_names, hardware_of_driver, is_reported_as, read_hardware

ISSUE = ("a100-40gb", "a100-80gb", "h100-sxm", "h100-pcie", "h200", "b200", "gb200", "mi300x", "l40s", "rtx4090")

DRIVERS = [
    ("NVIDIA H100 80GB HBM3", "h100-sxm"),
    ("NVIDIA H100 PCIe", "h100-pcie"),
    ("NVIDIA H100 NVL", "h100-nvl"),
    ("NVIDIA H200", "h200"),
    ("NVIDIA H200 NVL", "h200-nvl"),
    ("NVIDIA H800", "h800"),
    ("NVIDIA GH200 480GB", "gh200"),
    ("GH200 120GB", "gh200"),
    ("NVIDIA A100-SXM4-40GB", "a100-40gb"),
    ("NVIDIA A100-SXM4-80GB", "a100-80gb"),
    ("NVIDIA A100 80GB PCIe", "a100-80gb-pcie"),
    ("NVIDIA A100-PCIE-40GB", "a100-40gb-pcie"),
    ("NVIDIA A800-SXM4-80GB", "a800"),
    ("NVIDIA B200", "b200"),
    ("NVIDIA GB200", "gb200"),
    ("NVIDIA GB10", "dgx-spark"),
    ("NVIDIA L40S", "l40s"),
    ("NVIDIA L4", "l4"),
    ("NVIDIA A10", "a10"),
    ("NVIDIA GeForce RTX 4090", "rtx4090"),
    ("AMD Instinct MI300X", "mi300x"),
    ("AMD Instinct MI325X", "mi325x"),
]

UNKNOWN = [
    "NVIDIA H20",
    "NVIDIA L40",
    "NVIDIA A10G",
    "NVIDIA H800 PCIe",
    "NVIDIA A800 40GB Active",
    "NVIDIA GH200 144G HBM3e",
    "NVIDIA H100 64GB HBM2",
    "NVIDIA A100-SXM-64GB",
    "NVIDIA GeForce RTX 4090 D",
    "NVIDIA GeForce RTX 4090 Laptop GPU",
    "NVIDIA H100 80GB HBM3 MIG 3g.40gb",
    "Tesla V100-SXM2-32GB",
    "Apple M4 Max",
    "cpu",
    "",
]


@pytest.mark.parametrize("name", hardware_names())
def test_every_preset_has_plausible_figures(name: str) -> None:
    one = hardware(name)
    assert one.name == name
    peaks = one.peak_flops_per_s
    if peaks:
        assert 1e14 < peaks["bf16"] < 5e15
        assert peaks["fp16"] == peaks["bf16"] > peaks["tf32"] >= peaks["fp32"]
        assert peaks.get("fp8", 0) in (0, pytest.approx(2 * peaks["bf16"], rel=0.02))
        assert peaks["int8"] == pytest.approx(2 * peaks["bf16"], rel=0.02) or one.name == "rtx4090"
    assert 16e9 < one.available_memory_bytes <= one.memory_bytes < 600e9
    assert 2e11 < one.memory_bytes_per_s < 1e13
    if one.node_bytes_per_s:
        assert one.devices_per_node > 1
        assert (one.network_bytes_per_s or 0) < one.node_bytes_per_s < one.memory_bytes_per_s
    if one.price:
        assert 0.1 < one.price.usd_per_hour < 20
        assert "2026-01" <= one.price.date <= "2026-12"
    assert all(text.strip() for text in one.sources.values())


def test_the_issues_devices_have_a_price_and_a_bf16_peak() -> None:
    for name in ISSUE:
        one = hardware(name)
        assert one.price
        assert one.require_peak("bf16") == one.peak("bf16")


@pytest.mark.parametrize(("reported", "name"), DRIVERS)
def test_names_of_drivers(reported: str, name: str) -> None:
    known = hardware_of_driver(reported)
    assert known is not None
    assert known.name == name
    assert [one for one in hardware_names() if is_reported_as(hardware(one), reported)] == [name], (
        "one device, not the first"
    )


@pytest.mark.parametrize("reported", UNKNOWN)
def test_what_only_looks_alike_is_not_known(reported: str) -> None:
    assert hardware_of_driver(reported) is None


@given(st.sampled_from(DRIVERS), st.text(alphabet="ABHLGX0123489 -", max_size=6))
def test_a_longer_name_is_never_two_devices(pair: tuple[str, str], more: str) -> None:
    assert sum(is_reported_as(hardware(one), pair[0] + more) for one in hardware_names()) <= 1


@pytest.mark.parametrize(
    ("typed", "name"),
    [
        ("H100 SXM", "h100-sxm"),
        ("h100", "h100-sxm"),
        ("H100 PCIe", "h100-pcie"),
        ("H100 NVL", "h100-nvl"),
        ("H200 SXM", "h200"),
        ("h200 nvl", "h200-nvl"),
        ("H800 SXM", "h800"),
        ("A100 80GB", "a100-80gb"),
        ("A100 40GB", "a100-40gb"),
        ("A800 80GB", "a800"),
        ("B200 SXM", "b200"),
        ("GH200", "gh200"),
        ("L40S", "l40s"),
        ("L4", "l4"),
        ("A10", "a10"),
        ("MI300X", "mi300x"),
        ("MI325X", "mi325x"),
        ("rtx_4090", "rtx4090"),
        (" NVIDIA H100 80GB HBM3 ", "h100-sxm"),
    ],
)
def test_names_of_people(typed: str, name: str) -> None:
    assert hardware(typed).name == name


def test_aliases_belong_to_one_device() -> None:
    result = [alias for name in hardware_names() for alias in (name, *hardware(name).aliases)]
    assert len(result) == len(set(result))
    assert all(alias == alias.lower() for alias in result)


def test_unknown_names_are_refused_with_what_is_allowed() -> None:
    with pytest.raises(UserError, match=r"the device 'h20' is not known") as caught:
        hardware("h20")
    assert "h200" in str(caught.value)
    with pytest.raises(UserError, match="'A100' is several devices") as caught:
        hardware("A100")
    assert "a100-80gb" in (caught.value.allowed or "")
    for nothing in ("", "  ", "TPU v5p"):
        with pytest.raises(UserError, match="is not known"):
            hardware(nothing)


def test_only_a_cpu_is_planned_by_measurement() -> None:
    """The time of an operation inside a step relative to its time alone is known for CPUs only."""
    assert machine().measured is not None
    with pytest.raises(ValidationError, match="a section measured in the file of a cuda device"):
        Hardware.model_validate({**values(), "kind": "cuda"})


def test_a_peak_that_is_not_known_is_refused() -> None:
    assert hardware("a100-80gb").peak("fp8") is None
    with pytest.raises(UserError, match="no fp8 peak is known for NVIDIA A100") as caught:
        hardware("a100-80gb").require_peak("fp8")
    assert "bf16" in (caught.value.allowed or "")
    with pytest.raises(UserError, match="no bf16 peak is known for Apple"):
        hardware("apple-m4-max-128gb").require_peak("bf16")


BOX = """name: box
title: A box
kind: cuda
peak_flops_per_s: {bf16: 80e9}
memory_bytes: 8e9
memory_bytes_per_s: 1e11
sources: {peak_flops_per_s: measured, memory_bytes: measured, memory_bytes_per_s: measured}
"""


def test_a_file_of_the_user(tmp_path: Path) -> None:
    path = tmp_path / "box.yaml"
    path.write_text(BOX)
    one = hardware(str(path))
    assert one == read_hardware(str(path))
    assert one.require_peak("bf16") == 80e9
    assert isinstance(one.memory_bytes, float)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (("memory_bytes: 8e9", "memory_bytes: -8e9"), "memory_bytes = -8000000000.0 is not allowed"),
        (("memory_bytes: 8e9", "memory_bytes: .inf"), "memory_bytes = .inf is not allowed"),
        (("memory_bytes: 8e9", "memory_bytes: .nan"), "memory_bytes = .nan is not allowed"),
        (("memory_bytes: 8e9", "memory_bytes: true"), "memory_bytes = true"),
        (("memory_bytes: 8e9", "memory_bytes: 8 GB"), "memory_bytes = 8 GB is not allowed"),
        (("{bf16: 80e9}", "{bf16: 0}"), "peak_flops_per_s.bf16 = 0 is not allowed"),
        (("{bf16: 80e9}", "{bf17: 80e9}"), "bf17"),
        (("kind: cuda", "kind: abacus"), "kind = abacus is not allowed"),
        (("kind: cuda", "kind: cuda\nmemory_gb: 8"), "unknown key memory_gb = 8"),
        (("title: A box\n", ""), "title is missing"),
        (("memory_bytes: measured,", ""), "no source is named for memory_bytes"),
        (("sources: {", "sources: {colour: seen, "), "sources names colour"),
        (("kind: cuda", "kind: cuda\nnode_bytes_per_s: 1e9"), "no source is named for node_bytes_per_s"),
        (("kind: cuda", "kind: cuda\ndevices_per_node: 8"), "without node_bytes_per_s"),
        (("kind: cuda", "kind: cuda\ndrivers: ['(']"), "is not a regular expression"),
        (("kind: cuda", "kind: cuda\nprice: {usd_per_hour: 1, date: May, source: a shop}"), "price.date = May"),
    ],
)
def test_a_wrong_file_is_refused_by_line_and_name(tmp_path: Path, change: tuple[str, str], said: str) -> None:
    path = tmp_path / "box.yaml"
    path.write_text(BOX.replace(*change))
    with pytest.raises(UserError, match=r"box\.yaml") as caught:
        hardware(str(path))
    assert said in str(caught.value)


def test_what_is_no_file_of_a_device(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cannot be read"):
        hardware(str(tmp_path / "none.yaml"))
    (tmp_path / "list.yaml").write_text("[1, 2]")
    with pytest.raises(UserError, match="contains"):
        hardware(str(tmp_path / "list.yaml"))
    (tmp_path / "torn.yaml").write_text("name: [")
    with pytest.raises(UserError, match="not valid YAML"):
        hardware(str(tmp_path / "torn.yaml"))
