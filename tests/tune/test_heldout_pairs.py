"""Measures of held-out pairs in the loop: those of each pair alone, on any number of ranks."""

from pathlib import Path
from typing import Any

import pytest
import torch
from example_rows import pack, some_pairs
from test_preference_loss import loss_of
from test_preference_reference import _example
from tiny_models import llama_config
from tiny_runs import tiny_tokenizer

from smalti.base.errors import UserError
from smalti.config.load import from_dict
from smalti.config.preference import RewardConfig
from smalti.config.run import RunConfig
from smalti.data.examples import Example
from smalti.data.examples.folder import write_examples
from smalti.evals import mesh_scores
from smalti.model.decoder import Decoder
from smalti.model.init import init_weights
from smalti.track.names import check
from smalti.tune import heldout
from smalti.tune.reward.loss import RewardLoss

PAIRS = some_pairs(9)


def _config(folder: Path, labels: int | None = None) -> RunConfig:
    model = llama_config(320).model_copy(update={"num_labels": labels}).model_dump(mode="json")
    train = {"duration": "1step", "global_batch_tokens": 96, "optimizer": {"lr": 1e-3}, "parallel": {"device": "cpu"}}
    data = {
        "sources": {"a": "nowhere"},
        "seq_len": 24,
        "stages": [{"weights": {"a": 1}}],
        "heldout": {"v": str(folder)},
    }
    tree: dict[str, Any] = {"name": "r", "model": model, "data": data, "train": train}
    if labels:
        tree |= {"init_from": "nowhere", "tune": {"examples": {"files": ["none.jsonl"]}, "reward": {}}}
    return from_dict(RunConfig, tree).config


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_examples(tmp_path / "pairs", [_example(pair, n) for n, pair in enumerate(PAIRS)], tiny_tokenizer())
    return tmp_path / "pairs"


@pytest.mark.parametrize("kind", ["simpo", "reward"])
def test_measures_are_those_of_all_pairs(folder: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = _config(folder, 1 if kind == "reward" else None)
    loss: Any = RewardLoss(RewardConfig()) if kind == "reward" else loss_of({"loss": "simpo"})
    model = Decoder(config.model)
    init_weights(model, config.model, seed=1)
    hook = heldout.pairs_hook(config, loss)
    assert hook is not None
    metrics = hook(model, 0)
    check(metrics)
    if kind == "simpo":
        with torch.no_grad():
            total, weight, sums = loss(model, pack([PAIRS], dtype=torch.float32))
        expected = {name.replace("/", "_"): float(v / weight) for name, v in sums.items() if "targets" not in name}
        expected["preference_loss"] = float(total / weight)
        assert metrics == pytest.approx({f"metrics/eval/v/{name}": v for name, v in expected.items()}, rel=1e-5)
    parts = []
    for rank in range(12):  # more ranks than rows
        shard = mesh_scores.Shard(rank, 12, lambda rows: rows)
        monkeypatch.setattr(heldout, "shard_of", lambda *_, shard=shard: shard)
        pairs = heldout._load("v", config, None, shard)
        assert pairs is not None
        assert [len(batch.tokens) for batch in pairs.batches] == [1]
        with torch.no_grad():
            parts.append(loss(model, heldout.to_microbatch(pairs.batches[0], torch.device("cpu"), mask_documents=True)))
    assert sum(int(weight) for _, weight, _ in parts) == len(PAIRS)
    mean = sum(float(total) for total, _, _ in parts) / len(PAIRS)
    kind = "reward" if kind == "reward" else "preference"
    assert mean == pytest.approx(metrics[f"metrics/eval/v/{kind}_loss"], rel=1e-5)


def test_text_beside_the_pairs_of_a_reward_model_is_refused(folder: Path) -> None:
    answers = [_example(pair, number) for number, pair in enumerate(PAIRS)]
    alone = [Example(e.sequences[:1], {}, e.id) for e in answers]
    write_examples(folder.parent / "text", alone, tiny_tokenizer())
    with pytest.raises(UserError, match=r"data.heldout.v holds text, and a reward model predicts none"):
        heldout.pairs_hook(_config(folder.parent / "text", 1), RewardLoss(RewardConfig()))
    assert heldout.pairs_hook(_config(folder.parent / "text"), loss_of({"loss": "simpo"})) is None
