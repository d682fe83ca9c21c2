"""`smalti plan memory` in print and as JSON, and the warning of a dry run that would not fit."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from example_config import VALUES, example_config

from smalti.cli.main import run
from smalti.cli.train import local_layout
from smalti.cli.train.local_memory import memory_warning
from smalti.cost.axes import Layout
from smalti.cost.layout.auto import Resolved
from smalti.cost.memory.per_rank import memory_per_rank
from smalti.fleet import machine


@pytest.fixture
def big(tmp_path: Path) -> str:
    """An MoE of 5B on eight ranks."""
    values: dict[str, Any] = {**VALUES, "name": "big", "model": {"preset": "dbrx-5b"}}
    values["train"] = {**VALUES["train"], "global_batch_tokens": 2**22, "parallel": {"ranks": 8}}
    values["data"] = {**VALUES["data"], "seq_len": 2048}
    (tmp_path / "big.yaml").write_text(yaml.safe_dump(values))
    return str(tmp_path / "big.yaml")


def test_parts_phases_and_what_would_help(big: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", "memory", big, "--gpu", "a100-40gb"]) == 0
    out = capsys.readouterr().out
    for words in ("activations", "phases", "(assumed)", "it does not fit", "would help", "train.microbatch_tokens="):
        assert words in out
    assert run(["plan", "memory", big, "--gpu", "h200"]) == 0
    out = capsys.readouterr().out
    assert "it fits" in out
    assert "would help" not in out


def test_json_proposes_what_fits(big: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", "memory", big, "--gpu", "a100-40gb", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["total_bytes"] > plan["device_memory_bytes"] > plan["would_help"][0]["total_bytes"]
    change = plan["would_help"][0]["change"]
    assert change == f"train.microbatch_tokens={plan['largest_microbatch_tokens']}"
    assert run(["plan", "memory", big, *change.split(), "--gpu", "a100-40gb", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["would_help"] == []


def test_an_unknown_device_is_refused(big: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", "memory", big, "--gpu", "h1000"]) == 2
    assert "h1000" in capsys.readouterr().err
    assert run(["plan", "memory", big, "--gpu", "apple-m4-max-36gb"]) == 2
    assert "CUDA, ROCm, a CPU" in capsys.readouterr().err


def _machine(monkeypatch: pytest.MonkeyPatch, ram_bytes: float, *gpus: dict[str, Any]) -> None:
    monkeypatch.setattr(machine, "memory", lambda: {"total_bytes": ram_bytes, "cgroup_limit_bytes": None})
    monkeypatch.setattr(machine, "gpus", lambda: {"devices": list(gpus)})


def test_a_dry_run_warns_of_what_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    small, auto = example_config("train.microbatch_tokens=8192"), example_config()
    on_cpu = example_config("train.microbatch_tokens=8192", "train.parallel.device=cpu")
    _machine(monkeypatch, 24e9)
    assert memory_warning(small, ranks=1) is None
    _machine(monkeypatch, 0.9e9)
    warned = memory_warning(small, ranks=1)
    assert warned is not None
    assert "this machine has" in warned
    assert "would fit: train.microbatch_tokens=" in warned
    assert memory_warning(auto, ranks=1) is None, "it takes what fits"
    assert "one of 2" in str(memory_warning(small, ranks=2))
    _machine(monkeypatch, 0.8e9, {"name": "NVIDIA H100 80GB HBM3", "memory_bytes": 80e9})
    assert memory_warning(small, ranks=1) is None, "it would run on the GPU"
    assert memory_warning(on_cpu, ranks=1) is not None
    _machine(monkeypatch, 24e9, {"name": "Tiny", "memory_bytes": 7e8})
    for one in (small, auto):
        assert "neither" in str(memory_warning(one, ranks=1)), "CUDA alone takes most of it"
    _machine(monkeypatch, 24e9)
    assert memory_warning(example_config("train.parallel.device=cuda"), ranks=1) is None, "that GPU is elsewhere"


def test_the_warning_is_of_the_layout_that_is_rehearsed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Matrices cut over four ranks need less than four copies do, and fit where those do not."""
    fixed = ("train.microbatch_tokens=8192", "train.parallel.ranks=4")
    copies = example_config(*fixed, "train.parallel.replicate=4")
    cut = example_config(*fixed, "train.parallel.tensor=4")
    needed = [memory_per_rank(one, device="cuda").total_bytes for one in (copies, cut)]
    assert needed[1] < needed[0]
    _machine(monkeypatch, 24e9, {"name": "Made up", "memory_bytes": sum(needed) / 2})
    assert "a rank needs" in str(memory_warning(copies, ranks=4))
    assert memory_warning(cut, ranks=4) is None
    # and where the planner chooses, it is what it has chosen
    chosen = Resolved(Layout(tensor=4), "planner")
    monkeypatch.setattr(local_layout, "local_layout", lambda config, ranks: chosen)
    assert memory_warning(copies, ranks=4) is None
