"""smalti plan hardware: the table, one device with its sources, JSON."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from cli_in_process import output_of

from smalti.base.errors import UserError
from smalti.cli.plan import app as plan
from smalti.config.hardware import hardware, hardware_names

call = partial(output_of, plan.app, "hardware")


def test_the_table_has_a_line_for_each_device() -> None:
    lines = {line.split()[0]: line for line in call().splitlines() if line}
    for name in hardware_names():
        assert name in lines
    assert lines["h100-sxm"].split()[1:3] == ["989T", "1.98P"]
    assert "79.6 GiB" in lines["h100-sxm"]
    assert "450 GB/s" in lines["h100-sxm"]
    assert "96.0 GiB" in lines["apple-m4-max-128gb"], "what programs may take, not what is built in"


def test_one_device_names_the_source_of_every_figure() -> None:
    text = call("H100 SXM")
    known = hardware("h100-sxm")
    assert text.startswith(known.title)
    for source in known.sources.values():
        assert source in text
    assert "bf16 989 TFLOP/s" in text
    assert "3.35 TB/s" in text
    assert "64 GB/s to one of them" in call("mi300x")
    assert "not published" in call("apple-m4-max-64gb")


def test_json() -> None:
    every: list[dict[str, Any]] = json.loads(call("--json"))
    assert [one["name"] for one in every] == list(hardware_names())
    one = json.loads(call("gb200", "--json"))
    assert one["devices_per_node"] == 72
    assert one["peak_flops_per_s"]["fp4"] == 1e16
    assert one in every


@pytest.mark.parametrize("name", ["rtx4090", "h100-sxm", "apple-m4-max-64gb"])
def test_json_of_a_device_is_a_file_of_it(name: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(call(name, "--json"))
    assert hardware(str(path)) == hardware(name)


def test_an_unknown_device_is_refused() -> None:
    with pytest.raises(UserError, match="the device 'abacus' is not known"):
        call("abacus")
