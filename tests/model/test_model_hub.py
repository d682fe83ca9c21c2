"""Folders as the hub has them: their ``config.json`` with all keys is read, and says what was meant.

``hub/`` holds the files; a model of each is built whole on the meta device.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from model_cases import built, dense, ids, sparse

from smalti.base.errors import DataError
from smalti.config.model import ModelConfig
from smalti.model.huggingface import load, save
from smalti.model.huggingface_config import FAMILIES
from smalti.model.huggingface_weights import meta_weights

FOLDER = Path(__file__).parent / "hub"
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "original_max_position_embeddings": 8192,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}
QWEN3 = {"norm_eps": 1e-6, "rope_theta": 1e6, "head_dim": 128, "qk_norm": "head"}
MPT = {"norm": "layernorm", "position": "alibi", "activation": "gelu", "gated": False, "tie_word_embeddings": True}
MEANT: dict[str, tuple[int, dict[str, Any]]] = {
    "llama-3.1-8b-instruct": (8_030_261_248, {"rope_theta": 5e5, "rope_scaling": LLAMA3}),
    "smollm2-135m": (134_515_008, {"rope_theta": 1e5, "tie_word_embeddings": True, "initializer_range": 1 / 24}),
    "mistral-7b-v0.3": (7_248_023_552, {"rope_theta": 1e6}),
    "qwen3-0.6b": (596_049_920, {**QWEN3, "tie_word_embeddings": True}),
    "olmo-2-1124-7b": (
        7_298_617_344,
        {"norm_eps": 1e-6, "rope_theta": 5e5, "qk_norm": "full", "norm_placement": "post"},
    ),
    "mpt-7b": (6_649_286_656, MPT),
    "mpt-llm-foundry": (6_649_286_656, {**MPT, "clip_qkv": 6.0}),
    "dbrx-base": (
        131_596_523_520,
        {
            "norm": "layernorm",
            "rope_theta": 5e5,
            "clip_qkv": 8.0,
            "moe": {"num_experts": 16, "num_experts_per_tok": 4, "balance_loss_coef": 0.05},
        },
    ),
    "mixtral-8x7b-v0.1": (
        46_702_792_704,
        {"rope_theta": 1e6, "moe": {"num_experts": 8, "num_experts_per_tok": 2, "balance_loss_coef": 0.02}},
    ),
    "olmoe-1b-7b-0924": (
        6_919_161_856,
        {"qk_norm": "full", "moe": {"num_experts": 64, "num_experts_per_tok": 8, "norm_topk_prob": False}},
    ),
    "qwen3-30b-a3b": (
        30_532_122_624,
        {
            **QWEN3,
            "moe": {
                "num_experts": 128,
                "num_experts_per_tok": 8,
                "intermediate_size": 768,
                "balance_loss_coef": 0.001,
            },
        },
    ),
}
"""Parameters (as the model cards count them, a tied head once), and all but the sizes that is not our default."""
_SIZES = {
    "family",
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "max_position_embeddings",
}


_STRICT: dict[str, dict[str, float]] = {
    "mpt-llm-foundry": {"attn_config.attn_pdrop": 0, "attn_config.clip_qkv": 6.0},
    "dbrx-base": {"ffn_config.moe_normalize_expert_weights": 1.0},
}
"""Numbers that transformers 5.23 takes only as whole ones, or only with a point."""


def _raw(name: str) -> dict[str, Any]:
    raw: dict[str, Any] = json.loads((FOLDER / f"{name}.json").read_text())
    return raw


def _read(raw: dict[str, Any]) -> ModelConfig:
    return FAMILIES[raw["model_type"]].config_from_huggingface(raw)


def _with(raw: dict[str, Any], key: str, value: Any) -> dict[str, Any]:
    """``key`` may be ``section.key``."""
    *section, last = key.split(".")
    return raw | ({section[0]: raw[section[0]] | {last: value}} if section else {last: value})


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", MEANT)
def test_the_hubs_configs_say_what_was_meant(name):
    config = _read(_raw(name))
    parameters, meant = MEANT[name]
    assert config.model_dump(exclude_defaults=True, exclude=_SIZES) == meant
    assert sum(tensor.numel() for tensor in meta_weights(config).values()) == parameters


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", MEANT)
@pytest.mark.slow
def test_transformers_reads_the_same_of_them(name):
    transformers = pytest.importorskip("transformers")
    raw = _raw(name)
    for key, value in _STRICT.get(name, {}).items():
        raw = _with(raw, key, value)
    stock = transformers.AutoConfig.for_model(**raw)
    theirs = json.loads(stock.to_json_string())
    if name == "dbrx-base":  # it looks for the base of the rotary frequencies elsewhere, and takes its default
        assert theirs["rope_parameters"].pop("rope_theta") == 10_000.0
    assert _read(theirs) == _read(raw)


@pytest.mark.parametrize("family", ["mpt", "dbrx"])
def test_a_folder_that_brings_its_familys_code_is_read_and_the_code_is_left_alone(tmp_path, family):
    config = sparse(family="dbrx") if family == "dbrx" else _tiny_mpt()
    save(built(config), tmp_path / "a")
    raw = json.loads((tmp_path / "a/config.json").read_text())
    of_hub = _raw({"mpt": "mpt-7b", "dbrx": "dbrx-base"}[family])
    raw |= {key: of_hub[key] for key in ("architectures", "auto_map")}
    (tmp_path / "a/config.json").write_text(json.dumps(raw))
    for file in ("configuration", "modeling"):
        (tmp_path / f"a/{file}_{family}.py").write_text("raise AssertionError('code was run')")
    model = load(tmp_path / "a")
    assert model.config == config
    assert torch.equal(model(ids(config, 2, 5)), built(config)(ids(config, 2, 5)).value)
    save(model, tmp_path / "b")
    assert "auto_map" not in json.loads((tmp_path / "b/config.json").read_text())
    assert list((tmp_path / "b").glob("*.py")) == []


def _tiny_mpt() -> ModelConfig:
    return dense(family="mpt", intermediate_size=128, num_key_value_heads=None, **MPT)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("attn_config.rope", True),
        ("attn_config.alibi", False),
        ("attn_config.alibi_bias_max", 16),
        ("attn_config.sliding_window_size", 256),
        ("attn_config.qk_ln", True),
        ("attn_config.qk_gn", True),
        ("attn_config.fused_qkv", False),
        ("attn_config.kv_n_heads", 8),
        ("attn_config.attn_type", "grouped_query_attention"),
        ("attn_config.attn_logit_softcapping", 50.0),
        ("attn_config.attn_pdrop", 0.1),
        ("ffn_config.ffn_type", "mptglu"),
        ("ffn_config.ffn_act_fn", {"name": "relu"}),
        ("final_logit_softcapping", 30.0),
        ("block_overrides", {"order": []}),
        ("norm_eps", 1e-6),
        ("no_bias", False),
        ("logit_scale", "inv_sqrt_d_model"),
    ],
)
def test_what_llm_foundry_trains_and_the_family_cannot_hold_is_refused_by_name(key, value):
    with pytest.raises(DataError, match=key.replace(".", r"\.")):
        _read(_with(_raw("mpt-llm-foundry"), key, value))


def test_attention_of_another_kind_is_refused():
    raw = _raw("qwen3-0.6b")
    with pytest.raises(DataError, match="layer_types"):
        _read(raw | {"layer_types": ["linear_attention"] * raw["num_hidden_layers"]})
    assert _read(raw | {"layer_types": ["full_attention"] * raw["num_hidden_layers"]}) == _read(raw)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"vocab_size": -1}, "vocab_size = -1 is not allowed"),
        ({"num_attention_heads": 3, "head_dim": None}, "hidden_size=4096 is not a multiple"),
        ({"rope_scaling": {"rope_type": "mrope"}}, "rope_type = mrope is not allowed"),
        ({"rope_scaling": {"type": "linear"}}, "'linear' needs factor"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0, "finetuned": True}}, "unknown key finetuned"),
    ],
)
def test_values_that_make_no_model_are_told_in_a_line(change, words):
    with pytest.raises(DataError, match=words) as caught:
        _read(_raw("llama-3.1-8b-instruct") | change)
    assert "\n" not in caught.value.message
    assert "pydantic" not in str(caught.value)
