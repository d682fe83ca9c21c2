"""``smalti train`` with tokens in an S3 store: the same losses as from a disk, also with faults."""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from forked_command import start
from s3_server import Faults, object_server, s3_environment

from smalti.data.tokens.writer import TokenWriter

RECIPE = """\
name: t
model: {vocab_size: 512, hidden_size: 32, intermediate_size: 64, num_hidden_layers: 2, num_attention_heads: 2}
data:
  sources: {a: tokens/a, b: tokens/b}
  seq_len: 32
  stages: [{weights: {a: 1, b: 2}}]
train:
  duration: 30step
  global_batch_tokens: 256
  optimizer: {lr: 1e-3}
  parallel: {ranks: 2, device: cpu, threads: 1}
"""


@pytest.fixture
def work(tmp_path: Path) -> Path:
    for seed, name in enumerate("ab"):
        rng = np.random.default_rng(seed)
        with TokenWriter(tmp_path / "tokens" / name, vocab_size=512, eod_id=0, tokenizer_digest="ab" * 32) as writer:
            for _ in range(60):
                ids = rng.integers(1, 500, size=rng.integers(20, 200))
                writer.add(ids, 4 * ids.size)
    (tmp_path / "r.yaml").write_text(RECIPE)
    return tmp_path


def train(work: Path, name: str, *overrides: str, **environment: str) -> list[dict[str, Any]]:
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("AWS_", "RANK", "WORLD_SIZE"))}
    command = start("train", "r.yaml", f"name={name}", *overrides, folder=work, environment={**kept, **environment})
    code, output = command.finish(240)
    assert code == 0, output[-3000:]
    lines = [json.loads(line) for line in (work / "runs" / name / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "loss/train/total" in line]


def objects_of(work: Path) -> dict[str, bytes]:
    files = [path for path in (work / "tokens").rglob("*") if path.is_file()]
    return {f"bucket/{path.relative_to(work / 'tokens').as_posix()}": path.read_bytes() for path in files}


IN_STORE = "data.sources={a: s3://bucket/a, b: s3://bucket/b}"


@pytest.mark.exhaustive
def test_the_job_requests_each_index_once(work: Path) -> None:
    shutil.copytree(work / "tokens/b", work / "tokens/h")
    with object_server(objects_of(work)) as server:
        heldout = "data.heldout={h: s3://bucket/h}"
        train(work, "once", "train.duration=4step", IN_STORE, heldout, **s3_environment(server.url))
        assert {name: server.gets(f"{name}/manifest.json") for name in "abh"} == {"a": 1, "b": 1, "h": 1}
        assert "metrics/eval/h/bits_per_byte" in (work / "runs/once/metrics.jsonl").read_text()

        absent = started(work, "absent", "data.sources={a: s3://bucket/x, b: s3://bucket/b}", server.url)
        errors = absent.communicate(timeout=120)[1]
        assert absent.returncode == 2, errors
        assert "\nerror: data.sources.a = s3://bucket/x: " in errors
        assert "hint:" in errors


def started(work: Path, name: str, sources: str, url: str) -> "subprocess.Popen[str]":
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("AWS_", "RANK", "WORLD_SIZE"))}
    command = [sys.executable, "-m", "smalti", "train", "r.yaml", f"name={name}", sources, "train.duration=100000step"]
    return subprocess.Popen(
        [*command, "data.fetch.prefetch=0.1s", "train.log_every=1step"],
        cwd=work,
        env={**kept, **s3_environment(url)},
        stderr=subprocess.PIPE,
        text=True,
    )


def until(condition: Callable[[], bool]) -> None:
    end_s = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end_s
        time.sleep(0.05)


@pytest.mark.exhaustive
def test_a_job_that_waits_for_its_store_saves_and_ends_on_a_signal(work: Path) -> None:
    run = work / "runs/r"

    def steps() -> int:
        return len((run / "metrics.jsonl").read_text().splitlines()) if (run / "metrics.jsonl").exists() else 0

    def still() -> bool:
        before = steps()
        time.sleep(1.0)
        return steps() == before

    with object_server(objects_of(work)) as server:
        job = started(work, "r", IN_STORE, server.url)
        try:
            until(lambda: steps() > 10)
            server.server.cut()
            until(still)
            at_step = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])["step"]
            job.terminate()
            errors = job.communicate(timeout=20)[1]
        finally:
            job.kill()
        assert job.returncode == 75, errors
        assert (run / f"checkpoints/step-{at_step:08d}/COMPLETE").exists()


@pytest.mark.exhaustive  # two runs beside a server
def test_a_run_from_a_store_is_the_run_from_the_disk(work: Path) -> None:
    near = train(work, "near")
    faults = Faults(unavailable=0.03, truncate=0.03, latency_s=0.01)
    with object_server(objects_of(work), faults) as server:
        far = train(
            work,
            "far",
            IN_STORE,
            f"data.fetch.cache={work}/cache",
            **s3_environment(server.url),
        )
        assert server.counts["LIST"] == 0
        manifests = server.gets("manifest.json")
    assert [line["loss/train/total"] for line in far] == [line["loss/train/total"] for line in near]
    last = far[-1]
    assert last["data/fetch/requests"] > 0
    assert last["data/fetch/bytes"] > 0
    assert "data/fetch/requests" not in near[-1]
    assert manifests <= 2 * 2  # of two sources; as many again after faults
