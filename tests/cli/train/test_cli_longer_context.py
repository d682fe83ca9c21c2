"""A longer context from a recipe that states only how: dry run, training, and an export as transformers computes it."""

import json
from pathlib import Path

import pytest
from cli_in_process import run_cli
from tiny_runs import TEXTS, tiny_run, tiny_tokenizer, write_tokens

from smalti.config.load import load
from smalti.config.run import RunConfig

RECIPE = """\
name: longer
init_from: runs/tiny
model: {rope_scaling: {rope_type: yarn, factor: 4}}
data:
  sources: {code: data/long}
  tokenizer: data/tokenizer
  seq_len: 96
  stages:
    - {until: 1step, weights: {code: 1}}
    - {seq_len: 384, weights: {code: 1}}
train: {duration: 2step, global_batch_tokens: 384, optimizer: {lr: 1e-3}, parallel: {device: cpu, threads: 1}}
"""


@pytest.fixture
def work(tmp_path: Path) -> Path:
    tiny_run(tmp_path)
    write_tokens(tmp_path / "data/long", tiny_tokenizer(), ["".join(TEXTS) * 8])
    (tmp_path / "longer.yaml").write_text(RECIPE)
    return tmp_path


@pytest.mark.usefixtures("no_rehearsal")
def test_the_dry_run_says_how_the_context_changes(work: Path) -> None:
    done = run_cli(work, "train", "longer.yaml", "--dry-run")
    assert done.returncode == 0, done.stderr
    assert "context    96 -> 384 by yarn, factor 4\n" in done.stdout
    assert "more than" not in done.stdout
    done = run_cli(work, "train", "longer.yaml", "model.max_position_embeddings=400", "--dry-run")
    assert "warning    model.max_position_embeddings=400 is more than the 384 covered by yarn, factor 4" in done.stdout


@pytest.mark.exhaustive
def test_a_longer_model_is_exported_as_it_was_trained(work: Path) -> None:
    pytest.importorskip("transformers")
    done = run_cli(work, "train", "longer.yaml")
    assert done.returncode == 0, done.stderr
    scaling = load(RunConfig, str(work / "runs/longer")).config.model.rope_scaling
    assert scaling is not None
    assert scaling.original_max_position_embeddings == 96
    done = run_cli(work, "export", "runs/longer", "--verify")
    assert "transformers computes the same logits" in done.stdout, done.stderr
    config = json.loads((work / "runs/longer/export/config.json").read_text())
    assert config["max_position_embeddings"] == 384
    stated = config.get("rope_scaling") or config["rope_parameters"]
    assert (stated["rope_type"], stated["factor"], stated["original_max_position_embeddings"]) == ("yarn", 4.0, 96)
