"""Reward models: parameters are counted, transformers gives the same scores, nothing is generated."""

from pathlib import Path

import pytest
import torch
from tiny_models import family_config

from smalti.base.errors import UserError
from smalti.config.model import ModelConfig
from smalti.cost.params import count
from smalti.cost.weights import weights
from smalti.distributed.checkpoint.export import verify
from smalti.model.decoder import Decoder
from smalti.model.huggingface import load, load_folder, save_folder
from smalti.model.init import init_weights
from smalti.serve.engine.engine import Engine
from smalti.tune import prepare

FAMILIES = ("llama", "mistral", "qwen3", "olmo2", "mixtral", "qwen3_moe")


def reward_config(family: str = "llama") -> ModelConfig:
    return family_config(family, 257, 64).model_copy(update={"num_labels": 1})


def _saved(config: ModelConfig, folder: Path) -> Decoder:
    model = Decoder(config)
    init_weights(model, config, seed=3)
    save_folder(folder, config, model.state_dict(), eod_id=256, dtype=torch.float32)
    return model


@pytest.mark.parametrize("family", FAMILIES)
def test_parameters_are_counted(family: str) -> None:
    config = reward_config(family)
    with torch.device("meta"):
        model = Decoder(config)
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    assert shapes["score.weight"] == (1, config.hidden_size)
    assert "lm_head.weight" not in shapes
    assert count(config).total == sum(p.numel() for p in model.parameters()) == sum(w.params for w in weights(config))


def test_only_families_with_a_class_in_transformers() -> None:
    with pytest.raises(ValueError, match="num_labels=1"):
        ModelConfig(**{**family_config("dbrx", 257, 64).model_dump(), "num_labels": 1})
    for family in (*FAMILIES, "decoder"):
        prepare._require_scores(family)
    with pytest.raises(UserError, match=r"family dbrx: transformers has no class of it") as raised:
        prepare._require_scores("dbrx")
    assert raised.value.allowed == f"init_from of a family among {', '.join(FAMILIES)}"


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.sample(1, 2)
def test_transformers_gives_the_same_scores(family: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    config = reward_config(family)
    model = _saved(config, tmp_path / "model")
    back = load(tmp_path / "model")
    assert back.config.num_labels == 1
    torch.testing.assert_close(back.decoder.state_dict(), model.state_dict(), rtol=0, atol=0)
    assert verify(tmp_path / "model") < 1e-5


def test_a_reward_model_generates_nothing(tmp_path: Path) -> None:
    _saved(reward_config(), tmp_path / "model")
    assert load_folder(tmp_path / "model").config.num_labels == 1
    with pytest.raises(UserError, match="generates no text"):
        Engine.from_folder(tmp_path / "model")
