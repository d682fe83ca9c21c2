"""smalti plan and smalti runs as commands: what they print, and what they refuse."""

import json
from pathlib import Path
from typing import Any

import pytest
import synthetic_machine
import yaml
from cli_in_process import output_of
from example_config import VALUES
from synthetic_run import metric_rows, write_evals, write_lines

from smalti.base.errors import CheckFailed, DataError, UserError
from smalti.cli.plan import app as plan
from smalti.cli.runs import app as runs
from smalti.cli.tables import pairs, table


@pytest.fixture
def recipe(tmp_path: Path) -> str:
    tokens = tmp_path / "tokens"
    tokens.mkdir()
    (tokens / "manifest.json").write_text(json.dumps({"n_tokens": 163_840}))
    values = json.loads(json.dumps(VALUES))
    values["data"]["sources"]["code"] = str(tokens)
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(values))
    return str(path)


@pytest.fixture
def machine_file(tmp_path: Path) -> str:
    path = tmp_path / "machine.yaml"
    path.write_text(json.dumps(synthetic_machine.values()))  # which is YAML too
    return str(path)


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "runs" / "small"
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(VALUES))
    (folder / "status.json").write_text(
        json.dumps(
            {"state": "done", "reason": None, "attempt": 0, "step": 100, "heartbeat": "2026-03-01T12:00:00.000Z"}
        )
    )
    write_lines(folder / "metrics.jsonl", metric_rows(100))
    write_lines(
        folder / "events.jsonl",
        [{"time": "2026-03-01T12:00:00.000Z", "attempt": 0, "event": "auto_resolved", "device": "cpu",
          "peak_flops_per_s": 8.3e11}],
    )  # fmt: skip
    write_evals(folder / "evals" / "demo" / "2026-03-01T12-07-00.000Z")
    return folder


def test_time_with_a_rate(recipe: str) -> None:
    text = output_of(plan.app, "time", recipe, "--rate", "5e11")
    for part in (
        "1.64M total",
        "100 steps x 8192 tokens",
        "epochs of code",
        "2.00",
        "6N+12LHQS",
        "Chinchilla",
        "speed",
    ):
        assert part in text, part
    assert "prose" not in text, "no token files, no epochs"
    assert "part of a step" not in text


@pytest.mark.parametrize("verb", ["time", "memory"])
def test_an_empty_device_is_no_device(recipe: str, verb: str) -> None:
    with pytest.raises(UserError, match="the device '' is not known"):
        output_of(plan.app, verb, recipe, "--gpu", "")


def test_time_asks_nothing_of_a_network(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(url: str) -> None:
        raise DataError(f"{url} was asked for")

    monkeypatch.setattr("smalti.base.cloud.size_bytes", refuse)
    remote = [f"data.sources.{name}=s3://nowhere/{name}" for name in ("code", "prose")]
    value = json.loads(output_of(plan.app, "time", recipe, *remote, "--gpu", "h100-sxm", "--json"))
    assert value["epochs"] == {}
    assert "epochs of" not in output_of(plan.app, "time", recipe, *remote)


def test_time_on_a_gpu(recipe: str) -> None:
    text = output_of(plan.app, "time", recipe, "--gpu", "h100 sxm", "train.parallel.ranks=8")
    for part in ("8 ranks on NVIDIA H100 SXM", "bound by", "part of a step", "optimizer", "MFU"):
        assert part in text, part
    value = json.loads(output_of(plan.app, "time", recipe, "train.parallel.ranks=8", "--gpu", "h100 sxm", "--json"))
    assert value["device"] == "h100-sxm"
    assert value["step_s_low"] < value["step_s"] < value["step_s_high"]
    assert sum(part["s"] for part in value["step"]["parts"]) == pytest.approx(value["step"]["total_s"])
    assert value["epochs"] == pytest.approx({"code": 2.0})
    assert value["steps"] == 100


def test_time_on_a_measured_machine(recipe: str, machine_file: str) -> None:
    text = output_of(plan.app, "time", recipe, "--gpu", machine_file)
    for part in ("1 rank on A synthetic CPU with 2 threads, measured 2026-11-22", "bound by memory", "projections"):
        assert part in text, part


def test_time_without_a_device(recipe: str) -> None:
    assert "unknown without a device" in output_of(plan.app, "time", recipe)


def test_time_refuses(recipe: str) -> None:
    with pytest.raises(UserError, match="the device 'abacus' is not known"):
        output_of(plan.app, "time", recipe, "--gpu", "abacus")
    with pytest.raises(UserError, match="exclude each other"):
        output_of(plan.app, "time", recipe, "--gpu", "H100 SXM", "--rate", "1")
    with pytest.raises(UserError, match="exclude each other"):
        output_of(plan.app, "time", recipe, "--measure", "--rate", "1")
    with pytest.raises(UserError, match="no bf16 peak is known"):
        output_of(plan.app, "time", recipe, "--gpu", "apple-m4-max-36gb")


def test_memory(recipe: str) -> None:
    text = output_of(plan.app, "memory", recipe, "--gpu", "H100 SXM")
    assert "activations" in text
    assert "of 79.6 GiB" in text
    value = json.loads(output_of(plan.app, "memory", recipe, "--json"))
    assert value["total_bytes"] > value["params_bytes"] > 0


def test_verify(run_folder: Path, machine_file: str) -> None:
    text = output_of(plan.app, "verify", str(run_folder))
    assert "tokens_per_s" in text
    assert "830 GFLOP/s" in text
    assert "no time is predicted" in text
    assert "predicted for A synthetic CPU" in output_of(plan.app, "verify", str(run_folder), "--gpu", machine_file)
    value = json.loads(
        output_of(plan.app, "verify", str(run_folder), "--gpu", machine_file, "--json", "--within", "20")
    )
    by_name = {one["name"]: one for one in value["comparisons"]}
    assert by_name["tokens_per_s"]["measured"] == pytest.approx(16_000, rel=0.05)
    assert by_name["tokens"]["ratio"] == 1
    assert by_name["step_s"]["ratio"] is not None


def test_verify_predicts_for_the_gpu_that_a_run_recorded(run_folder: Path) -> None:
    write_lines(
        run_folder / "events.jsonl",
        [{"time": "2026-03-01T12:00:00.000Z", "attempt": 0, "event": "auto_resolved", "device": "cuda:0",
          "device_name": "NVIDIA H100 80GB HBM3", "peak_flops_per_s": 989.4e12}],
    )  # fmt: skip
    assert "predicted for NVIDIA H100 SXM" in output_of(plan.app, "verify", str(run_folder))


def test_verify_as_a_gate(run_folder: Path, machine_file: str) -> None:
    with pytest.raises(CheckFailed, match="times the predicted"):
        output_of(plan.app, "verify", str(run_folder), "--within", "1.0", "--gpu", machine_file)
    with pytest.raises(UserError, match="is less than 1"):
        output_of(plan.app, "verify", str(run_folder), "--within", "0.5")
    with pytest.raises(CheckFailed, match="its device is not known"):
        output_of(plan.app, "verify", str(run_folder), "--within", "2")
    with pytest.raises(UserError, match="exclude each other"):
        output_of(plan.app, "verify", str(run_folder), "--measure", "--gpu", machine_file)
    with pytest.raises(UserError, match="there is no run folder"):
        output_of(plan.app, "verify", str(run_folder.parent / "nowhere"))


def test_runs_ls_of_nothing(tmp_path: Path) -> None:
    assert output_of(runs.app, "ls", str(tmp_path)) == f"no run in {tmp_path}\n"
    with pytest.raises(DataError, match="no folder"):
        output_of(runs.app, "ls", str(tmp_path / "nowhere"))


def test_runs_report_counts_parameters(run_folder: Path) -> None:
    path = output_of(runs.app, "report", str(run_folder)).strip()
    assert "<dd>1.64M</dd>" in Path(path).read_text()
    (run_folder / "config.yaml").write_text("name: of another kind\n")
    assert Path(output_of(runs.app, "report", str(run_folder)).strip()).exists()


VERBS = {plan.app: ("time", "memory", "verify"), runs.app: ("ls", "show", "report")}


@pytest.mark.parametrize(("app", "verb"), [(app, verb) for app, verbs in VERBS.items() for verb in verbs])
def test_every_verb_shows_an_example(app: Any, verb: str) -> None:
    assert "Example: smalti " in output_of(app, verb, "--help")


def test_tables() -> None:
    assert table(("a", "n"), [("x", "1"), ("long", "10")]) == "a      n\nx      1\nlong  10"
    assert pairs([("a", "1"), ("long", "2"), ("", "")]) == "a     1\nlong  2\n"
