"""docs/concepts/plan/flops.md and hardware.md: the numbers that they print are those of the code."""

import re
from pathlib import Path
from typing import Any

import pytest

from smalti.base.errors import UserError
from smalti.config.hardware import hardware, hardware_names
from smalti.config.load import from_dict
from smalti.config.model import ModelConfig
from smalti.cost.flops import mfu
from smalti.cost.params import count
from smalti.plan.flops_conventions import CONVENTIONS, convert_mfu, flops_per_token, train_flops

DOCS = Path(__file__).parents[2] / "docs/concepts/plan"
COLUMNS = (("llama-3-8b", 8192), ("gpt-3-175b", 2048), ("mpt-7b", 2048), ("dbrx", 4096))


def page(name: str) -> str:
    return " ".join((DOCS / name).read_text().split())


def model(preset: str) -> ModelConfig:
    return from_dict(ModelConfig, {"preset": preset}).config


@pytest.mark.parametrize("name", CONVENTIONS)
def test_the_table_of_conventions(name: str) -> None:
    cells = []
    for preset, seq_len in COLUMNS:
        try:
            cells.append(f"{flops_per_token(model(preset), seq_len, name) / 1e9:.3f}")
        except UserError:
            cells.append("-")
    assert f"| `{name}` | {' | '.join(cells)} |" in page("flops.md")


def test_the_worked_examples_of_flops() -> None:
    text = page("flops.md")
    peak = 64 * 312e12
    assert f"{100 * mfu(234614, 6 * 6658859008 + 12 * 32 * 4096 * 2048, peak):.2f} %" == "50.73 %"
    without = 100 * mfu(234614, 6 * 6658859008, peak)
    assert f"6ND alone, it is {without:.2f} %" in text
    assert f"{50.73 - without:.1f} points off" in text
    assert convert_mfu(0.5073, model("mpt-7b"), 2048, source="llm-foundry", target="6n") < 0.47
    long = [flops_per_token(model("llama-3-8b"), 65536, name) / 1e9 for name in ("exact", "6n")]
    assert f"is {long[0]:.0f} GFLOP by `exact` and {long[1]:.0f} by `6n`" in text
    spreads = []
    for preset, seq_len in COLUMNS[1::-1]:
        found = [flops_per_token(model(preset), seq_len, name) for name in CONVENTIONS if name != "megatron-2021"]
        spreads.append(max(found) / min(found))
    assert f"is {spreads[0]:.2f} times the smallest for GPT-3 here and {spreads[1]:.2f} times for Llama-3-8B" in text
    dbrx = count(model("dbrx"))
    assert f"DBRX has {dbrx.total / 1e9:.1f}B and a token meets {dbrx.active / 1e9:.1f}B" in text
    assert f"6 x 131.6 = {6 * dbrx.total / 1e9:.0f}" in text
    assert f"{train_flops(model('dbrx'), 12e12, 4096, '6n'):.2e}".replace("e+", "e") in text


def test_the_worked_examples_of_hardware() -> None:
    text = page("hardware.md")
    total, bits = count(model("dbrx")).total, 4.5
    need = total * bits / 8
    assert f"{total * 4 / 8 / 1e9:.1f} GB at 4 bits" in text
    assert f"{need / 1e9:.1f} GB at 4.5" in text
    for name in ("apple-m4-max-64gb", "apple-m2-max-96gb", "apple-m4-max-128gb", "dgx-spark", "rtx4090"):
        available = hardware(name).available_memory_bytes
        assert f"| `{name}` | {available / 1e9:.1f} | {'yes' if available > need else 'no'} |" in text
    h100 = hardware("h100-sxm")
    assert f"{h100.require_peak('bf16') / h100.memory_bytes_per_s:.0f} FLOPs a byte" in text
    assert f"{h100.memory_bytes / 1e9:.1f}e9 bytes" in text


def test_the_page_names_what_has_no_source() -> None:
    text = page("hardware.md")
    unsure = [name for name in hardware_names() if re.search("no source", str(sources(name)))]
    for name in unsure:
        assert f"`{name}`" in text, f"{name} has a figure without a source, and the page does not say so"


def sources(name: str) -> dict[str, Any]:
    return hardware(name).sources
