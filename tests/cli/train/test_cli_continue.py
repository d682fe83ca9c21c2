"""Continued pretraining, whole: a folder that transformers saved -> new data, with and without replay -> the table."""

import functools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from cli_in_process import run_cli

from smalti.data.tokens.writer import TokenWriter

VOCAB, SEQ_LEN = 96, 32


def progression(step: int, n: int, seed: int) -> np.ndarray:
    """n documents of SEQ_LEN tokens, each the token before it plus ``step`` in a half of the vocabulary that is this
    step's own: [n, SEQ_LEN]."""
    half, first = VOCAB // 2 - 1, np.random.default_rng(seed).integers(0, VOCAB, size=(n, 1))
    return (first + step * np.arange(SEQ_LEN)) % half + 1 + (half if step == 7 else 0)


def write_tokens(folder: Path, step: int, seed: int) -> None:
    with TokenWriter(folder, vocab_size=VOCAB, eod_id=0, tokenizer_digest="ab" * 32) as writer:
        for row in progression(step, 200, seed):
            writer.add(row, 3 * row.size)


def write_llama(folder: Path) -> None:
    """A Llama of transformers' own, that knows the progression of 3."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(60):
        ids = torch.from_numpy(progression(3, 16, step))
        loss = model(input_ids=ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.save_pretrained(folder)


def smalti(work: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A process of its own trains; all else is done in this one."""
    if arguments[0] == "train" and "--dry-run" not in arguments:
        command = [sys.executable, "-m", "smalti", *arguments]
        return subprocess.run(command, cwd=work, capture_output=True, text=True, timeout=240, check=False)
    return run_cli(work, *arguments)


@functools.cache
def model_section(work: Path) -> dict[str, Any]:
    section: dict[str, Any] = yaml.safe_load(smalti(work, "config", "model", "llama").stdout)
    return section


def recipe(work: Path, name: str, weights: dict[str, float], **changes: Any) -> str:
    """A run that continues from ``work/llama``; its model section is what ``smalti config model`` prints."""
    model = model_section(work)
    tree = {
        "name": name,
        "init_from": "llama",
        **model,
        "data": {
            "sources": {one: f"tokens/{one}" for one in weights},
            "heldout": {"old": "tokens/old-heldout", "new": "tokens/new-heldout"},
            "retain": {"old": 0.05},
            "seq_len": SEQ_LEN,
            "stages": [{"weights": weights}],
        },
        "train": {
            "duration": "30step",
            "global_batch_tokens": 512,
            "optimizer": {"lr": 1e-3},
            "precision": {"compute": "fp32"},
            "eval_every": "10step",
            "eval_tokens": 512,
            "checkpoint": {"every": "10step"},
            "parallel": {"ranks": 1, "device": "cpu", "threads": 1},
        },
    }
    tree["train"] |= changes
    (work / f"{name}.yaml").write_text(yaml.safe_dump(tree))
    return f"{name}.yaml"


def events(work: Path, name: str, kind: str) -> list[dict[str, Any]]:
    lines = (work / "runs" / name / "events.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["event"] == kind]


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("continue")
    for seed, (name, step) in enumerate({"old": 3, "old-heldout": 3, "new": 7, "new-heldout": 7}.items()):
        write_tokens(root / "tokens" / name, step, seed + 1000)
    write_llama(root / "llama")
    return root


@pytest.mark.exhaustive
def test_without_replay_the_run_warns_of_what_it_forgets(work: Path) -> None:
    done = smalti(work, "train", recipe(work, "forgets", {"new": 1.0}))
    assert done.returncode == 0, done.stderr
    assert "held-out 'old' has changed by +" in done.stderr
    told = events(work, "forgets", "forgetting")
    assert told
    assert all(event["set"] == "old" and event["worse_frac"] > event["allowed_frac"] == 0.05 for event in told)
    table = [line.split() for line in done.stderr.splitlines() if line.startswith(("old  ", "new  "))]
    assert [row[:2] for row in table] == [["old", "old"], ["new", "new"]]
    assert table[0][-5:] == ["%", "worse", "than", "its", "bound"]
    assert table[1][-1] == "learned"
    for shown in (smalti(work, "runs", "show", "forgets").stdout, _report(work, "forgets")):
        assert "worse than its bound" in shown
    found = json.loads(smalti(work, "runs", "show", "forgets", "--json").stdout)["continued"]
    before = {one["set"]: one["before"] for one in found["sets"]}
    assert before["old"] < 0.5 < before["new"]  # what transformers taught it, measured before our first step


@pytest.mark.exhaustive
def test_with_replay_it_does_not_and_a_resumed_run_measures_step_0_once(work: Path) -> None:
    name = recipe(work, "keeps", {"new": 1.0, "old": 1.0})
    done = smalti(work, "train", name)
    assert done.returncode == 0, done.stderr
    assert "'old' is +" not in done.stderr
    assert events(work, "keeps", "forgetting") == []
    assert [line.split()[-1] for line in done.stderr.splitlines() if line.startswith("old  ")] == ["kept"]
    (work / "runs/keeps/checkpoints/step-00000030/COMPLETE").unlink()
    again = smalti(work, "train", name)
    assert again.returncode == 0, again.stderr
    assert len([event for event in events(work, "keeps", "eval") if event["step"] == 0]) == 1
    assert "kept" in again.stderr
    other = smalti(work, "train", name, "train.eval_tokens=256")
    assert other.returncode == 0  # finished: nothing is measured any more


@pytest.mark.slow
def test_a_model_section_that_is_not_the_folders_is_refused_by_its_field(work: Path) -> None:
    name = recipe(work, "other", {"new": 1.0})
    done = smalti(work, "train", name, "model.norm_eps=0.5", "--dry-run")
    assert done.returncode == 2
    assert "model.norm_eps is 0.5; in init_from=llama it is" in done.stderr
    assert "hint: smalti config model llama prints it" in done.stderr
    longer = smalti(work, "train", name, "model.max_position_embeddings=128", "--dry-run")
    assert longer.returncode == 0, longer.stderr
    assert "warning    model.max_position_embeddings=128 is more than the 64" in longer.stdout
    assert "from       llama, retains old +5 %" in longer.stdout


@pytest.mark.exhaustive
def test_the_values_of_weights_are_checked_as_the_run_starts_and_not_by_its_dry_run(work: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    weights = safetensors.load_file(work / "llama" / "model.safetensors")
    weights["model.norm.weight"][3] = float("nan")
    (work / "broken").mkdir()
    (work / "broken" / "config.json").write_bytes((work / "llama" / "config.json").read_bytes())
    safetensors.save_file(weights, work / "broken" / "model.safetensors")
    command = ["train", recipe(work, "of-broken", {"new": 1.0}), "init_from=broken"]
    assert smalti(work, *command, "--dry-run").returncode == 0
    done = smalti(work, *command)
    assert done.returncode == 2
    assert "model.norm.weight" in done.stderr
    assert "allowed: finite numbers" in done.stderr


def _report(work: Path, name: str) -> str:
    smalti(work, "runs", "report", f"runs/{name}")
    return (work / "runs" / name / "report.html").read_text()
