"""``smalti tune sft``: help, refusals, and a run that is killed, resumed, exported and equal to an undisturbed one."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from cli_in_process import run_cli
from tiny_runs import tiny_run

RECIPE = """
base: instruct
name: {name}
init_from: runs/tiny
tune:
  examples: {{files: [sums.jsonl], heldout_frac: 0.2}}
train:
  duration: 24step
  global_batch_tokens: 384
  parallel: {{ranks: {ranks}, device: cpu, threads: 1}}
  checkpoint: {{every: 4step}}
  eval_every: 4step
  precision: {{compute: fp32}}
"""


def _work(root: Path) -> Path:
    tiny_run(root)
    rows = [{"prompt": f"add {n} and 1", "completion": str(n + 1)} for n in range(60)]
    (root / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return root


def test_what_cannot_be_tuned_is_refused(tmp_path: Path) -> None:
    result = run_cli(tmp_path, "tune", "sft", "demo")
    assert result.returncode == 2
    assert "demo has no section 'tune:'" in result.stderr
    assert "smalti train demo" in result.stderr
    (tmp_path / "r.yaml").write_text("base: instruct\ntune: {examples: {files: [x.jsonl]}}\n")
    result = run_cli(tmp_path, "tune", "sft", "r.yaml", "init_from=nowhere")
    assert result.returncode == 2
    assert "nowhere" in result.stderr


def test_options_of_train_are_options_of_tune(tmp_path: Path) -> None:
    (_work(tmp_path) / "r.yaml").write_text(RECIPE.format(name="r", ranks=1))
    result = run_cli(tmp_path, "tune", "sft", "r.yaml", "--fork", "--try", "2")
    assert "--try trains from step 0, and --fork does not" in result.stderr


def _losses(run: Path) -> dict[int, float]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {row["step"]: row["loss/train/total"] for row in rows if "loss/train/total" in row}


def _tune(work: Path, name: str, ranks: int) -> "subprocess.Popen[str]":
    (work / f"{name}.yaml").write_text(RECIPE.format(name=name, ranks=ranks))
    command = [sys.executable, "-m", "smalti", "tune", "sft", f"{name}.yaml"]
    return subprocess.Popen(
        command, cwd=work, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )


@pytest.mark.exhaustive  # three runs of real processes; only this has the agent, the tokenizing and the resume together
def test_a_killed_run_equals_an_undisturbed_one(tmp_path: Path) -> None:
    work = _work(tmp_path)
    output = _tune(work, "whole", 2).communicate(timeout=300)[0]
    assert "24 steps" in output, output
    victim, run = _tune(work, "killed", 2), work / "runs/killed"
    end = time.monotonic() + 120
    while not (run / "checkpoints/step-00000008/COMPLETE").exists():
        assert time.monotonic() < end
        assert victim.poll() is None, victim.communicate()[0]
        time.sleep(0.02)
    os.killpg(victim.pid, signal.SIGKILL)
    victim.communicate()
    output = _tune(work, "killed", 2).communicate(timeout=300)[0]
    assert "24 steps" in output, output
    assert _losses(run) == _losses(work / "runs/whole")
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert max(row.get("time/token", 0) for row in rows) == 24 * 384  # prompts and padding are computed too
    best = (run / "checkpoints/best").read_text().strip()
    assert best == (work / "runs/whole/checkpoints/best").read_text().strip()
    assert (run / "checkpoints" / best / "COMPLETE").exists()

    exported = run_cli(work, "export", "runs/killed")
    assert int(best.removeprefix("step-")) == json.loads((run / "export/export.json").read_text())["step"]
    assert exported.returncode == 0, exported.stderr
    assert json.loads((run / "provenance.json").read_text())["command"] == ["smalti", "tune", "sft", "killed.yaml"]
    card = (run / "export/README.md").read_text()
    assert "| examples | sums.jsonl |" in card
    assert "| parents | runs/tiny |" in card
    assert (run / "export/chat_template.jinja").exists()
