"""``smalti tune compare``: prompted ways in process, and all ways with an interruption as real processes."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from cli_in_process import run_cli
from tiny_runs import TEXTS, tiny_run, write_tokens

from smalti.data.tokenizer.encode import load_tokenizer

RECIPE = """
base: instruct
name: sums
init_from: runs/tiny
tune:
  examples: {files: [sums.jsonl], heldout_frac: 0.2}
data:
  seq_len: 128
  heldout: {code: data/long}
train:
  duration: 12step
  global_batch_tokens: 256
  parallel: {ranks: 1, device: cpu, threads: 1}
  checkpoint: {every: 2step}
  eval_every: 12step
  precision: {compute: fp32}
"""
FOLDER = "runs/sums-compare"


@pytest.fixture
def work(tmp_path: Path) -> Path:
    tiny_run(tmp_path, context=128)
    write_tokens(tmp_path / "data/long", load_tokenizer(tmp_path / "data/tokenizer"), [text * 4 for text in TEXTS])
    rows = [{"prompt": f"add {n} and 1", "completion": str(n + 1)} for n in range(60)]
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "sums.yaml").write_text(RECIPE)
    return tmp_path


def _result(work: Path) -> dict[str, Any]:
    return json.loads((work / FOLDER / "compare.json").read_text())


@pytest.mark.slow  # the templates' processes and two evaluations
def test_prompted_ways_are_compared_and_not_repeated(work: Path) -> None:
    arguments = ("tune", "compare", "sums.yaml", "--ways", "prompt,retrieve", "--limit", "6", "--shots", "2")
    first = run_cli(work, *arguments)
    assert first.returncode == 0, first.stderr
    result = _result(work)
    assert (result["questions"], result["baseline"], list(result["ways"])) == (6, "prompt", ["prompt", "retrieve"])
    prompt, retrieve = result["ways"].values()
    assert prompt["scores"].keys() == {"likelihood", "answers", "heldout/code"}
    assert prompt["scores"]["likelihood"]["interval"][0] > 0
    assert prompt["cost"]["examples"] == 2 > 0 == prompt["cost"]["kept_bytes"] < retrieve["cost"]["kept_bytes"]
    assert retrieve["scores"]["heldout/code"]["difference"]["verdict"] == "no difference shown"
    lines = (work / FOLDER / "questions/retrieve/likelihood.jsonl").read_text().splitlines()
    nearest, asked = ([m["content"] for m in json.loads(lines[0])["messages"]][at] for at in (-4, -2))
    assert nearest != asked
    assert nearest.startswith("add ")
    assert "6 held-out questions" in first.stdout
    assert "<svg" in (work / FOLDER / "compare.html").read_text()
    again = run_cli(work, *arguments, "--json")
    assert json.loads(again.stdout)["ways"] == result["ways"]
    (work / "notes.txt").write_text("To add 1 is to count.\n\nOther text.\n")
    other = json.loads(run_cli(work, *arguments, "--documents", "notes.txt", "--json").stdout)["ways"]
    assert other["prompt"]["folder"] == prompt["folder"]
    assert (other["retrieve"]["cost"]["kept_bytes"], other["retrieve"]["cost"]["examples"]) == (32, 1)


@pytest.mark.exhaustive  # two trainings in processes, one of them interrupted
def test_an_interrupted_comparison_continues(work: Path) -> None:
    options = ("--ways", "prompt,lora,continue", "--limit", "8", "--shots", "1")

    def start() -> "subprocess.Popen[str]":
        return subprocess.Popen(
            [sys.executable, "-m", "smalti", "tune", "compare", "sums.yaml", *options],
            cwd=work,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE")},
        )

    process, end = start(), time.monotonic() + 120
    while not (work / FOLDER / "lora/checkpoints/step-00000002/COMPLETE").exists():
        assert time.monotonic() < end
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    output = process.communicate(timeout=120)[0]
    assert process.returncode == 130, output
    assert not (work / FOLDER / "compare.json").exists()
    finished = (work / FOLDER / "prompt/way.json").stat().st_mtime_ns
    process = start()
    output = process.communicate(timeout=300)[0]
    assert process.returncode == 0, output
    assert (work / FOLDER / "prompt/way.json").stat().st_mtime_ns == finished
    assert (work / FOLDER / "lora/logs/attempt-1").exists()
    ways = _result(work)["ways"]
    cost = {way: entry["cost"] for way, entry in ways.items()}
    assert 0 < cost["lora"]["kept_bytes"] < cost["continue"]["kept_bytes"]
    assert cost["lora"]["train_tokens"] == cost["continue"]["train_tokens"] == 12 * 256
    assert cost["lora"]["prompt_tokens"] == cost["continue"]["prompt_tokens"]
    assert all(cost[way]["train_s"] > 0 for way in ("lora", "continue"))
    assert all(entry["scores"]["heldout/code"]["value"] > 0 for entry in ways.values())
    read = run_cli(work, "eval", "read", f"{FOLDER}/continue", "--task", "answers")
    assert read.returncode == 0, read.stderr
