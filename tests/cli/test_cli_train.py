"""``smalti train``: what is refused before a process starts, and a real run that is killed and resumed."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from smalti.data.tokens.writer import TokenWriter
from smalti.track.run import RunFolder

RECIPE = """\
name: t
model:
  vocab_size: 512
  hidden_size: 32
  intermediate_size: 64
  num_hidden_layers: 2
  num_attention_heads: 2
data:
  sources: {a: tokens/a, b: tokens/b}
  heldout: {h: tokens/h}
  seq_len: 32
  stages:
  - until: 0.8run
    weights: {a: 1, b: 2}
  - weights: {b: 1}
train:
  duration: 40step
  global_batch_tokens: 256
  optimizer: {lr: 1e-3}
  parallel: {ranks: 2, device: cpu, threads: 1}
  checkpoint: {every: 10step}
  eval_every: 1run
"""


def write_tokens(folder: Path, seed: int, *, tokenizer: str = "ab" * 32, vocab_size: int = 512) -> None:
    rng = np.random.default_rng(seed)
    with TokenWriter(folder, vocab_size=vocab_size, eod_id=0, tokenizer_digest=tokenizer) as writer:
        for _ in range(30):
            ids = rng.integers(1, 500, size=rng.integers(20, 200))
            writer.add(ids, 4 * ids.size)


@pytest.fixture
def work(tmp_path: Path) -> Path:
    for seed, name in enumerate("abh"):
        write_tokens(tmp_path / "tokens" / name, seed)
    (tmp_path / "r.yaml").write_text(RECIPE)
    return tmp_path


def train(work: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "smalti", "train", *arguments]
    environment = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE")}
    return subprocess.run(command, cwd=work, env=environment, capture_output=True, text=True, timeout=240, check=False)


def test_print_config_starts_nothing(work):
    done = train(work, "r.yaml", "seed=3", "--print-config")
    assert done.returncode == 0
    assert any(line.split() == ["seed:", "3", "#", "command", "line"] for line in done.stdout.splitlines())
    assert not (work / "runs").exists()


def test_dry_run_prints_the_plan_and_starts_nothing(work):
    done = train(work, "r.yaml", "--dry-run")
    assert done.returncode == 0, done.stderr
    assert "40 steps x 256 tokens" in done.stdout
    assert "2 ranks on cpu" in done.stdout
    assert not (work / "runs").exists()


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["data.sources.a=tokens/none"], ["data.sources.a = tokens/none", "manifest.json is missing"]),
        (["train.parallel.replicate=3"], ["replicate=3 does not divide the 2 ranks", "1, 2"]),
        (["model.vocab_size=300"], ["model.vocab_size=300 is smaller than the 512", "hint: model.vocab_size=512"]),
        (["init_from=nowhere"], ["init_from = nowhere does not exist"]),
        (["data.seq_len=2048", "train.global_batch_tokens=20480", "data.sources.a=tokens/short"],
         ["tokens/short holds", "less than one sequence"]),
        (["data.sources.b=tokens/foreign"], ["data.sources.b was written by another tokenizer"]),
        (["train.optimizer.lrr=1"], ["did you mean train.optimizer.lr?"]),
    ],
)  # fmt: skip
def test_what_cannot_work_is_refused_before_anything_starts(work, overrides, words):
    write_tokens(work / "tokens/foreign", 9, tokenizer="cd" * 32)
    with TokenWriter(work / "tokens/short", vocab_size=512, eod_id=0, tokenizer_digest="ab" * 32) as writer:
        writer.add(np.arange(1, 100), 400)
    done = train(work, "r.yaml", *overrides)
    assert done.returncode == 2
    for word in words:
        assert word in done.stderr
    assert "Traceback" not in done.stderr
    assert not (work / "runs").exists()


def test_a_missing_recipe(work):
    done = train(work, "nowhere.yaml")
    assert done.returncode == 2
    assert "error: there is no recipe file or recipe named 'nowhere.yaml'" in done.stderr


@pytest.mark.slow
def test_killed_resumed_and_never_killed_give_the_same_losses(work):
    assert (done := train(work, "r.yaml", "name=whole")).returncode == 0, done.stderr
    process = subprocess.Popen(
        [sys.executable, "-m", "smalti", "train", "r.yaml", "name=killed"], cwd=work, stderr=subprocess.PIPE, text=True
    )
    folder, end = RunFolder(work / "runs/killed"), time.monotonic() + 120
    while not (folder.checkpoints / "latest").exists():
        assert process.poll() is None, process.stderr.read()
        assert time.monotonic() < end
        time.sleep(0.02)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    started = time.monotonic()
    os.kill(int(children[1]), signal.SIGKILL)
    _, text = process.communicate(timeout=30)
    if process.returncode == 0:
        pytest.skip("the run was over before it could be killed")
    assert process.returncode == 75
    assert time.monotonic() - started < 10
    assert f"rank 1 (pid {children[1]}) was killed by SIGKILL" in text
    assert train(work, "r.yaml", "name=killed").returncode == 0
    assert losses(work / "runs/killed") == losses(work / "runs/whole")
    assert [event["attempt"] for event in folder.events() if event["event"] == "attempt_started"] == [0, 1]
    refused = train(work, "r.yaml", "name=killed", "train.optimizer.lr=0.5")
    assert refused.returncode == 2
    assert "train.optimizer.lr: 0.001 -> 0.5" in refused.stderr


def losses(folder: Path) -> list[tuple[int, float]]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [(line["step"], line["loss/train/total"]) for line in lines if "loss/train/total" in line]
