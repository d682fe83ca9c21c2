"""smalti plan layout and smalti plan scaling as commands: what they print, and what they refuse."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from smalti.base.errors import UserError
from smalti.cli.plan import app as plan

VALUES: dict[str, Any] = {
    "name": "dbrx",
    "model": {"preset": "dbrx-132b"},
    "data": {"seq_len": 4096, "sources": {"text": "text"}, "stages": [{"weights": {"text": 1}}]},
    "train": {
        "duration": "12e12tok",
        "global_batch_tokens": 15_360 * 4096,
        "optimizer": {"lr": 1e-4},
        "parallel": {"ranks": 3072, "activation_checkpointing": "full"},
    },
}


@pytest.fixture
def recipe(tmp_path: Path) -> str:
    path = tmp_path / "dbrx.yaml"
    path.write_text(yaml.safe_dump(VALUES))
    return str(path)


def call(*arguments: str) -> str:
    done = CliRunner().invoke(plan.app, list(arguments), catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


@pytest.mark.slow
def test_layouts_in_print(recipe: str) -> None:
    """Devices are the recipe's ranks where none are given; what is left out has its reason."""
    printed = call("layout", recipe)
    assert printed.startswith("dbrx on 3,072 x NVIDIA H100 SXM 80 GB (79.6 GiB): ")
    assert "pipeline 3, 6, 12, 16, 24, 32, 48, 64  left out: 40 layers are not a multiple" in printed
    assert "The fewest devices that hold one row on a rank: " in printed


@pytest.mark.slow
def test_layouts_as_json(recipe: str) -> None:
    found = json.loads(call("layout", recipe, "--gpus", "3072", "--keep", "2", "--json"))
    first, second, *rest = found["layouts"]
    assert len(rest) <= 1
    assert first["step_s"] <= second["step_s"]
    assert first["memory_bytes"] <= first["device_memory_bytes"]
    assert sum(first["shares"].values()) == pytest.approx(1)
    assert {"gpu", "gpus", "smallest_gpus", "possible", "others"} < found.keys()


def test_layouts_that_cannot_be(recipe: str) -> None:
    with pytest.raises(UserError, match="are not whole nodes"):
        call("layout", recipe, "--gpus", "100")
    with pytest.raises(UserError, match="fits no layout of 8 x"):
        call("layout", recipe, "--gpus", "8")
    with pytest.raises(UserError, match="is not known"):
        call("layout", recipe, "--gpu", "h1000")
    with pytest.raises(UserError, match="no network between nodes"):
        call("layout", recipe, "--gpu", "rtx4090", "--gpus", "3072")


@pytest.mark.slow
def test_curves_in_print_and_as_a_picture(recipe: str, tmp_path: Path) -> None:
    picture = tmp_path / "curve.svg"
    printed = call("scaling", recipe, "--gpus", "64,512,3072", "--plot", str(picture))
    assert "(strong scaling):" in printed
    assert "(weak scaling):" in printed
    assert "Speed relative to a dense model with as many active parameters: " in printed
    svg = picture.read_text()
    assert svg.startswith("<svg")
    assert "batch that grows" in svg
    assert printed.endswith(f"plot: {picture}\n")
    with pytest.raises(UserError, match=r"is not an \.svg file"):
        call("scaling", recipe, "--plot", str(tmp_path / "curve.png"))


@pytest.mark.slow
def test_curves_as_json(recipe: str) -> None:
    found = json.loads(call("scaling", recipe, "--gpus", "8,3072", "--json"))
    assert found["strong"]["missing"]["8"].startswith("dbrx (132B parameters) fits no layout of 8 x")
    (point,) = found["strong"]["points"]
    assert point["speed_up"] == point["ideal"] == 1
    assert point["mfu_interval"][0] < point["mfu"] < point["mfu_interval"][1]


@pytest.mark.parametrize("given", ["", "8,", "eight", "8.5", "0", "-8", "1e30", str(10**30)])
def test_numbers_of_devices_that_cannot_be(recipe: str, given: str) -> None:
    with pytest.raises(UserError):
        call("scaling", recipe, "--gpus", given)


@pytest.mark.slow
def test_a_curve_without_a_point_is_refused(recipe: str) -> None:
    with pytest.raises(UserError, match="fits no layout of 8 x"):
        call("scaling", recipe, "--gpus", "8")
