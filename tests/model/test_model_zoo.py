"""Our models against transformers: same logits, same bits after a round trip, both ways, for both families."""

import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from model_cases import built, dbrxes, distance, ids, llamas

from smalti.base.errors import DataError
from smalti.config.model import ModelConfig
from smalti.model.huggingface import FAMILIES, load_folder, save_folder

transformers = pytest.importorskip("transformers")


def _theirs(folder: str):
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        folder, output_loading_info=True, trust_remote_code=False
    )
    assert not info["missing_keys"], info
    assert not info["unexpected_keys"], info
    assert not info["mismatched_keys"], info
    return model.eval()


def _held(config: ModelConfig) -> ModelConfig:
    """What a Hugging Face folder can hold of a config: the kernel is ours alone."""
    if config.moe is None:
        return config
    return config.model_copy(update={"moe": config.moe.model_copy(update={"kernel": "grouped"})})


def _check_both_ways(config: ModelConfig, seed: int, time: int) -> None:
    ours = built(config, seed)
    tokens = ids(config, 2, time, seed)
    with tempfile.TemporaryDirectory() as exported, tempfile.TemporaryDirectory() as saved, torch.no_grad():
        save_folder(exported, config, ours.state_dict(), eod_id=0, dtype=torch.float32, max_shard_bytes=20_000)
        theirs = _theirs(exported)
        logits = theirs(tokens).logits
        assert distance(ours(tokens).value, logits) < 1e-5
        assert theirs.config.eos_token_id == theirs.config.bos_token_id == 0

        theirs.save_pretrained(saved)
        if config.moe is not None and config.moe.kernel == "loop":
            return  # a folder has no kernel, and the default one does not take this width
        back = load_folder(saved)
        assert distance(back(tokens).value, logits) < 1e-5
        assert not back.training
        wanted = ours.state_dict()
        assert list(back.state_dict()) == list(wanted)
        assert all(torch.equal(tensor, wanted[name]) for name, tensor in back.state_dict().items())
        described = FAMILIES[config.family].config_to_huggingface
        assert described(back.config) == described(_held(config))


@pytest.mark.proof
@settings(max_examples=settings.default.max_examples // 5)
@given(config=llamas(), seed=st.integers(0, 99), time=st.integers(1, 20))
def test_llama_equals_transformers(config, seed, time):
    _check_both_ways(config, seed, time)


@pytest.mark.proof
@settings(max_examples=settings.default.max_examples // 5)
@given(config=dbrxes(), seed=st.integers(0, 99), time=st.integers(1, 20))
def test_dbrx_equals_transformers(config, seed, time):
    _check_both_ways(config, seed, time)


def test_real_dbrx_config_keeps_its_rotary_base():
    raw = {
        "model_type": "dbrx",
        "d_model": 6144,
        "n_heads": 48,
        "n_layers": 40,
        "max_seq_len": 32768,
        "vocab_size": 100352,
        "attn_config": {"model_type": "", "clip_qkv": 8, "kv_n_heads": 8, "rope_theta": 500000},
        "ffn_config": {
            "model_type": "",
            "ffn_hidden_size": 10752,
            "moe_jitter_eps": 0,
            "moe_loss_weight": 0.05,
            "moe_num_experts": 16,
            "moe_top_k": 4,
        },
        "output_router_logits": False,
        "torch_dtype": "bfloat16",
    }
    config = FAMILIES["dbrx"].config_from_huggingface(raw)
    assert config.rope_theta == 500_000
    assert config.clip_qkv == 8
    assert config.moe is not None
    assert (config.moe.num_experts, config.moe.num_experts_per_tok) == (16, 4)


@pytest.mark.parametrize(
    ("family", "change", "named"),
    [
        ("llama", {"hidden_act": "mish"}, "mish"),
        ("llama", {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "rope_scaling"),
        ("llama", {"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4}}, "llama3"),
        ("llama", {"rope_theta": 5e4}, "two bases"),
        ("llama", {"hidden_size": None}, "hidden_size"),
        ("dbrx", {"ffn_config": {"ffn_hidden_size": 8, "moe_normalize_expert_weights": 2.0}}, "moe_normalize"),
        ("dbrx", {"tie_word_embeddings": True}, "tie_word_embeddings"),
    ],
)
def test_what_we_do_not_compute_is_refused(family, change, named):
    config = {
        "llama": ModelConfig(family="llama", **_SMALL),
        "dbrx": ModelConfig(
            family="dbrx", norm="layernorm", moe={"num_experts": 2, "num_experts_per_tok": 1}, **_SMALL
        ),
    }[family]
    raw = FAMILIES[family].config_to_huggingface(config)
    assert FAMILIES[family].config_from_huggingface(raw) == config
    with pytest.raises(DataError, match=named):
        FAMILIES[family].config_from_huggingface(raw | change)


def test_scaled_bfloat16_export_has_the_stated_dtype(tmp_path: Path):
    config = ModelConfig(family="llama", **_SMALL)
    save_folder(tmp_path, config, built(config).state_dict(), eod_id=3)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert theirs.dtype == torch.bfloat16
    assert theirs.generation_config.eos_token_id == 3


_SMALL = {
    "vocab_size": 16,
    "hidden_size": 16,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}
