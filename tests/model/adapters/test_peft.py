"""Adapters in PEFT's format: peft computes the same logits with ours, ours with peft's, and others are refused."""

import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from smalti.base.errors import DataError, UserError
from smalti.config.adapter import AdapterConfig
from smalti.config.model import ModelConfig
from smalti.model.adapters.adapter import Adapter, Merged
from smalti.model.adapters.apply import apply, is_trained
from smalti.model.adapters.peft import load, save
from smalti.model.decoder import Decoder
from smalti.model.huggingface import load_folder
from smalti.model.huggingface import save as save_model
from smalti.model.init import init_weights

MOE = {"num_experts": 4, "num_experts_per_tok": 2}
CASES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {"qk_norm": "head", "norm_eps": 1e-6},
    "dbrx": {"norm": "layernorm", "moe": MOE},
    "mixtral": {"moe": MOE},
    "qwen3_moe": {"qk_norm": "head", "moe": MOE},
    "olmoe": {"qk_norm": "full", "moe": MOE},
}


def model_config(family: str) -> ModelConfig:
    if family == "reward":
        return model_config("llama").model_copy(update={"num_labels": 1})
    tree = {
        "family": family, "vocab_size": 40, "hidden_size": 24, "intermediate_size": 20, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32,
        "initializer_range": 0.2,
    }  # fmt: skip
    return ModelConfig(**(tree | CASES[family]))


def drawn(config: ModelConfig, adapter: AdapterConfig, base: Path | None = None) -> tuple[Decoder, Adapter]:
    """A model with adapters, B not 0, whose base is saved; and its adapters."""
    model = Decoder(config)
    init_weights(model, config, seed=1)
    if base is not None:
        save_model(model, base)
    weights = model.state_dict()
    apply(model, adapter)
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        if is_trained(name):
            parameter.data = torch.randn(parameter.shape, generator=generator) / 4
    return model.eval(), Adapter.of_tensors(model.state_dict(), weights, adapter.scale)


def logits(model: nn.Module) -> Tensor:
    ids_BT = torch.arange(20).view(2, 10)
    with torch.no_grad():
        output = model(ids_BT)
    return output.value if isinstance(model, Decoder) else output.logits


ADAPTERS = {
    "all": AdapterConfig(rank=3, alpha=5, targets=("attention", "mlp")),
    "attention": AdapterConfig(rank=2, alpha=4, targets=("q_proj", "v_proj"), rslora=True, layers=(1, 1)),
}


@pytest.mark.parametrize("family", [*CASES, "reward"])
@pytest.mark.parametrize("which", ADAPTERS)
def test_saved_adapter_is_read_back(family: str, which: str, tmp_path: Path) -> None:
    config, adapter = model_config(family), ADAPTERS[which]
    model, ours = drawn(config, adapter)
    if family == "dbrx" and which == "all":
        with pytest.raises(UserError, match="family dbrx keeps all experts in one matrix"):
            save(tmp_path, ours, config, adapter, "base")
        return
    save(tmp_path, ours, config, adapter, "base")
    again = load(tmp_path, config)
    assert again.scale == ours.scale
    assert again.pairs.keys() == ours.pairs.keys()
    plain = Decoder(config)
    init_weights(plain, config, seed=1)
    plain.load_state_dict(Merged(plain.state_dict(), again))
    torch.testing.assert_close(logits(plain), logits(model), rtol=1e-5, atol=1e-5)


@pytest.mark.sample(2)
@pytest.mark.slow
@pytest.mark.parametrize("family", CASES)
@pytest.mark.parametrize("which", ADAPTERS)
def test_peft_computes_the_same_logits(family: str, which: str, tmp_path: Path) -> None:
    """Ours in peft, and what peft saves of it in ours."""
    peft = pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")
    config, adapter = model_config(family), ADAPTERS[which]
    if family == "dbrx" and which == "all":
        pytest.skip("PEFT has no format for it")
    model, ours = drawn(config, adapter, tmp_path / "base")
    (tmp_path / "ours").mkdir()
    save(tmp_path / "ours", ours, config, adapter, str(tmp_path / "base"))
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base", attn_implementation="eager").eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = peft.PeftModel.from_pretrained(base, str(tmp_path / "ours"))
    torch.testing.assert_close(logits(theirs), logits(model), rtol=1e-5, atol=1e-5)

    theirs.save_pretrained(tmp_path / "theirs")
    again = load(tmp_path / "theirs", config)
    plain = load_folder(tmp_path / "base")
    plain.load_state_dict(Merged(plain.state_dict(), again))
    torch.testing.assert_close(logits(plain), logits(model), rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_peft_computes_the_same_scores_of_a_reward_model(tmp_path: Path) -> None:
    """With ours in peft, and with what peft saves of it in ours, beside a language model without scores."""
    peft = pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")
    base, adapter = model_config("llama"), ADAPTERS["all"]
    drawn(base, adapter, tmp_path / "base")
    config = model_config("reward")
    model, ours = drawn(config, adapter)
    (tmp_path / "ours").mkdir()
    save(tmp_path / "ours", ours, config, adapter, str(tmp_path / "base"))
    theirs = transformers.AutoModelForSequenceClassification.from_pretrained(
        tmp_path / "base", num_labels=1, attn_implementation="eager"
    ).eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = peft.PeftModel.from_pretrained(theirs, str(tmp_path / "ours"))
    ids_1T = torch.arange(10)[None]
    with torch.no_grad():
        scores = model(ids_1T).value[:, -1]
        torch.testing.assert_close(theirs(ids_1T).logits, scores, rtol=1e-5, atol=1e-5)
    theirs.save_pretrained(tmp_path / "theirs")
    for folder in ("ours", "theirs"):
        again = load(tmp_path / folder, config)
        plain = Decoder(config)
        plain.load_state_dict(Merged(load_folder(tmp_path / "base").state_dict(), again))
        torch.testing.assert_close(plain(ids_1T).value[:, -1].detach(), scores, rtol=1e-5, atol=1e-5)
        with pytest.raises(DataError, match=r"modules_to_save=.*'score'.*trained whole"):
            load(tmp_path / folder, base)


def test_adapter_of_another_kind_or_model_is_refused(tmp_path: Path) -> None:
    config = model_config("llama")
    save(tmp_path, drawn(config, ADAPTERS["all"])[1], config, ADAPTERS["all"], "base")
    with pytest.raises(DataError, match=r"has A \[3, 24\] and B \[24, 3\]; a matrix \[32, 24\] needs"):
        load(tmp_path, config.model_copy(update={"head_dim": 8}))
    with pytest.raises(DataError, match=r"tensors that this model has no place for, such as .*layers.1"):
        load(tmp_path, config.model_copy(update={"num_hidden_layers": 1}))
    raw = json.loads((tmp_path / "adapter_config.json").read_text())
    (tmp_path / "adapter_config.json").write_text(json.dumps(raw | {"use_dora": True}))
    with pytest.raises(DataError, match="use_dora=True"):
        load(tmp_path, config)
    with pytest.raises(DataError, match=r"no adapter_config.json") as raised:
        load(tmp_path / "none", config)
    assert raised.value.hint is None
    (tmp_path / "run").mkdir()
    shutil.copytree(tmp_path, tmp_path / "run/adapter", ignore=shutil.ignore_patterns("run"))
    with pytest.raises(DataError, match=r"run has no adapter_config.json(.|\n)*hint: its folder .*run/adapter has one"):
        load(tmp_path / "run", config)
    (tmp_path / "scores").mkdir()
    reward = model_config("reward")
    save(tmp_path / "scores", drawn(reward, ADAPTERS["all"])[1], reward, ADAPTERS["all"], "base")
    with pytest.raises(DataError, match=r"modules_to_save=\['score'\]") as raised:
        load(tmp_path / "scores", config)
    assert "generates no text" in str(raised.value.hint)
