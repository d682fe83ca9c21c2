"""``smalti plan budget``: what it prints, draws and refuses."""

import json
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from smalti.base.errors import UserError
from smalti.cli.main import run
from smalti.cli.plan.budget import budget, budget_text, solve_budget
from smalti.plan.budget.solver import NAMES


def text(*words: str) -> str:
    return budget_text(solve_budget(dict(word.split("=", 1) for word in words)))


def test_a_table_with_all_that_was_assumed(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", "budget", "gpu=h100-sxm", "gpus=64", "days=7"]) == 0
    out = capsys.readouterr().out
    rows = {line.split()[0]: line.split() for line in out.partition("\n\n")[0].splitlines()}
    assert rows["params"][:2] == ["params", "11.3B"]
    assert rows["mfu"][:5] == ["mfu", "0.4", "0.3", "to", "0.5"]
    assert rows["gpus"][1:] == ["64", "given"]
    for part in (
        "does not follow: inference_tokens",
        "chosen: parameters and tokens of flops=1.532e22: compute-optimal by besiroglu-2024",
        "  mfu = 0.4 (0.3 to 0.5): large bf16 runs",
        "  price_usd_per_gpu_hour = ",
        "by other fits:\n  hoffmann-2022: ",
        "intervals: 80% by the bootstrap over the 240 runs of the fit, to first order; with the range of the assumed",
    ):
        assert part in out, part


def test_json_has_every_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", "budget", "loss=2.1", "inference_tokens=2T", "--json"]) == 0
    value = json.loads(capsys.readouterr().out)
    assert list(value)[: len(NAMES)] == list(NAMES)
    assert value["gpus"] is None
    assert value["lifetime"]["saving_frac"] > 0.2
    assert {one["name"] for one in value["assumptions"]} == {"active_params", "fit"}


def test_what_else_is_told() -> None:
    assert "inference costs" in text("loss=2.0", "inference_tokens=1e13", "inference_mfu=0.2", "gpu=h100-sxm")
    assert "29.8 epochs, worth 140B unique tokens" in text("flops=1e22", "unique_tokens=10b")
    assert "tokens_per_active_param" in text("params=132b", "active_params=36b", "tokens=12T")
    assert "tokens_per_active_param" not in text("params=132b", "tokens=12T").partition("by other fits")[0]


def test_a_model_that_is_a_recipe(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", "budget", "model=demo", "tokens=1b", "--json"]) == 0
    value = json.loads(capsys.readouterr().out)
    assert value["origins"]["params"] == "counted from demo"
    assert 1e6 < value["params"] < 1e8


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "words",
    [
        ("gpu=h100-sxm", "gpus=512", "days=30"),
        ("loss=2.05", "inference_tokens=2T"),
        ("flops=1e22", "unique_tokens=10b", "fit=hoffmann-2022-rounded"),
        ("params=132b", "active_params=36b", "tokens=12T", "experts=4", "cost_usd=2e7"),
    ],
)
def test_a_picture(tmp_path: Path, words: tuple[str, ...]) -> None:
    path = tmp_path / "budget.svg"
    budget(list(words), plot=str(path))
    root = ET.fromstring(path.read_text())
    said = " ".join(root.itertext())
    assert "this run: " in said
    assert "loss " in said
    assert len(root.findall(".//{*}path")) > 15
    assert "nan" not in path.read_text()


def test_refusals(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="nothing is given"):
        budget([])
    with pytest.raises(UserError, match=r"is not an \.svg file"):
        budget(["params=7b"], plot=str(tmp_path / "budget.png"))
    with pytest.raises(UserError, match="has no point to draw"):
        budget(["tokens_per_param=20"], plot=str(tmp_path / "budget.svg"))
    with pytest.raises(UserError, match="params is given twice"):
        budget(["params=7b", "params=8b"])
    with pytest.raises(UserError, match="gives params no value"):
        budget(["params"])
    assert run(["plan", "budget", "params=7e9", "tokens=1.4e11", "flops=1e21"]) == 2


@pytest.mark.slow
def test_no_torch() -> None:
    code = (
        "import sys; from smalti.cli.main import run; run(['plan', 'budget', 'cost_usd=1e6', 'model=mpt-7b']);"
        "sys.exit(any(name in sys.modules for name in ('torch', 'numpy', 'scipy')))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0
