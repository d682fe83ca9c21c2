"""``smalti tune preference``: the wrong verb is refused; a killed run of KTO equals an undisturbed one."""

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
base: dpo
name: {name}
init_from: runs/tiny
tune:
  examples: {{files: [labels.jsonl], template: chatml, heldout_frac: 0.2}}
  preference: {{loss: kto}}
train:
  duration: 12step
  global_batch_tokens: 768
  parallel: {{ranks: 1, device: cpu, threads: 1}}
  checkpoint: {{every: 2step}}
  eval_every: 4step
  precision: {{compute: fp32}}
"""


def _work(root: Path) -> Path:
    tiny_run(root, context=384)
    rows = [{"prompt": f"add {n} and 1", "completion": str(n + n % 3), "label": n % 3 == 1} for n in range(60)]
    (root / "labels.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return root


def test_the_wrong_verb_is_refused(tmp_path: Path) -> None:
    work = _work(tmp_path)
    (work / "r.yaml").write_text(RECIPE.format(name="r").replace("loss: kto", "loss: kto, reference: live"))
    result = run_cli(work, "tune", "sft", "r.yaml")
    assert result.returncode == 2
    assert "r.yaml is a recipe with a section tune.preference, not for 'smalti tune sft'" in result.stderr
    assert "smalti tune preference r.yaml" in result.stderr


def _metrics(run: Path) -> list[dict[str, float]]:
    names = ("loss/train/total", "preference/kl", "preference/logp", "metrics/eval/validation/preference_loss")
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    kept = [{name: row[name] for name in ("step", *names) if name in row} for row in rows]
    return [row for row in kept if len(row) > 1]


def _tune(work: Path, name: str) -> "subprocess.Popen[str]":
    (work / f"{name}.yaml").write_text(RECIPE.format(name=name))
    command = [sys.executable, "-m", "smalti", "tune", "preference", f"{name}.yaml"]
    return subprocess.Popen(
        command, cwd=work, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )


@pytest.mark.exhaustive  # three runs of real processes; only this resumes the state of a loss
def test_a_killed_run_equals_an_undisturbed_one(tmp_path: Path) -> None:
    work = _work(tmp_path)
    output = _tune(work, "whole").communicate(timeout=300)[0]
    assert "12 steps" in output, output
    victim, run = _tune(work, "killed"), work / "runs/killed"
    end = time.monotonic() + 200
    while not (run / "checkpoints/step-00000004/COMPLETE").exists():
        assert time.monotonic() < end
        assert victim.poll() is None, victim.communicate()[0]
        time.sleep(0.02)
    os.killpg(victim.pid, signal.SIGKILL)
    victim.communicate()
    output = _tune(work, "killed").communicate(timeout=300)[0]
    assert "12 steps" in output, output
    whole = _metrics(work / "runs/whole")
    assert _metrics(run) == whole
    assert any(row.get("preference/kl", 0) > 0 for row in whole), "the estimate is used"
