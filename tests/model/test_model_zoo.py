"""Each family's conversions of configs and weights, both ways, and what they refuse; see also ``test_parity_*``."""

from typing import Any

import pytest
import torch
from model_cases import built, dense

from smalti.base.errors import DataError
from smalti.config.model import ModelConfig
from smalti.model.decoder import Decoder
from smalti.model.huggingface import FAMILIES

_EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2}
_QUERY_NORM: dict[str, Any] = {"qk_norm": "head"}
_MPT: dict[str, Any] = {
    "norm": "layernorm",
    "position": "alibi",
    "gated": False,
    "activation": "gelu",
    "tie_word_embeddings": True,
    "intermediate_size": 128,
    "num_key_value_heads": None,
}
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "truncate": False}
CASES: list[ModelConfig] = [
    dense(family=family, **options)
    for family, options in [
        ("llama", {}),
        ("llama", {"head_dim": 6, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
        ("mistral", {"sliding_window": 5, "hidden_size": 40, "num_attention_heads": 6, "head_dim": 8}),
        ("qwen3", {**_QUERY_NORM, "attention_bias": True}),
        (
            "qwen3",
            {**_QUERY_NORM, "sliding_window": 3, "layer_types": ("full_attention", "sliding_attention")},
        ),
        ("olmo2", {"qk_norm": "full", "norm_placement": "post", "rope_scaling": _YARN}),
        ("mpt", _MPT),
        ("mpt", {**_MPT, "clip_qkv": 3.0, "attention_multiplier": 0.1, "norm_eps": 1e-3}),
        ("dbrx", {"norm": "layernorm", "clip_qkv": 8.0, "moe": {**_EXPERTS, "norm_topk_p": 2.0}}),
        ("dbrx", {"norm": "layernorm", "rope_scaling": _YARN, "moe": {**_EXPERTS, "norm_topk_prob": False}}),
        ("mixtral", {"sliding_window": 7, "head_dim": 10, "moe": _EXPERTS}),
        ("olmoe", {"qk_norm": "full", "clip_qkv": 2.0, "moe": {**_EXPERTS, "norm_topk_prob": False}}),
        (
            "qwen3_moe",
            {**_QUERY_NORM, "sliding_window": 4, "moe": {**_EXPERTS, "intermediate_size": 16, "mlp_only_layers": (1,)}},
        ),
    ]
]
each_case = pytest.mark.parametrize("config", CASES, ids=lambda config: config.family)


def test_each_family_has_a_case():
    assert {config.family for config in CASES} == set(FAMILIES)


@each_case
def test_config_survives_the_way_there_and_back(config):
    family = FAMILIES[config.family]
    raw = {"model_type": config.family, "transformers_version": "5.23.0", **family.config_to_huggingface(config)}
    assert family.config_from_huggingface(raw) == config


@each_case
def test_each_parameter_is_in_one_rule_and_comes_back_bit_for_bit(config):
    rules = FAMILIES[config.family].rules(config)
    ours = built(config).state_dict()
    assert sorted(name for rule in rules for name in rule.ours) == sorted(ours)
    theirs = [name for rule in rules for name in rule.theirs]
    assert len(set(theirs)) == len(theirs)
    for rule in rules:
        there = rule.to_theirs([ours[name] for name in rule.ours])
        assert len(there) == len(rule.theirs)
        back = rule.to_ours([tensor.clone() for tensor in there])
        assert all(torch.equal(ours[name], tensor) for name, tensor in zip(rule.ours, back, strict=True))
        assert len({tensor.untyped_storage().data_ptr() for tensor in back}) == len(back)


@each_case
def test_rules_work_without_memory(config):
    with torch.device("meta"):
        weights = Decoder(config).state_dict()
    for rule in FAMILIES[config.family].rules(config):
        there = rule.to_theirs([weights[name] for name in rule.ours])
        back = rule.to_ours(there)
        assert [tensor.shape for tensor in back] == [weights[name].shape for name in rule.ours]


def test_plain_layers_by_step_and_by_list():
    raw = _raw("qwen3_moe") | {"num_hidden_layers": 6, "decoder_sparse_step": 2, "mlp_only_layers": [3]}
    assert FAMILIES["qwen3_moe"].config_from_huggingface(raw).moe.mlp_only_layers == (0, 2, 3, 4)


def test_moe_families_read_the_number_of_experts_under_either_name():
    for family, key, other in (
        ("mixtral", "num_local_experts", "num_experts"),
        ("olmoe", "num_experts", "num_local_experts"),
        ("qwen3_moe", "num_experts", "num_local_experts"),
    ):
        raw = _raw(family)
        experts = raw.pop(key)
        assert FAMILIES[family].config_from_huggingface(raw | {other: experts}).moe.num_experts == experts
        with pytest.raises(DataError, match="num_local_experts is"):
            FAMILIES[family].config_from_huggingface(raw | {other: experts, key: experts + 1})


@pytest.mark.parametrize(
    ("family", "change", "named"),
    [
        ("llama", {"hidden_act": "mish"}, "mish"),
        ("llama", {"rope_theta": 5e4}, "two bases"),
        ("llama", {"hidden_size": None}, "hidden_size"),
        ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ("dbrx", {"tie_word_embeddings": True}, "tie_word_embeddings"),
        ("dbrx", {"resid_pdrop": 0.1}, "resid_pdrop"),
        ("dbrx", {"attn_config": {"rope_theta": 5.0}}, "two bases"),
        ("dbrx", {"num_key_value_heads": 4}, "num_key_value_heads"),
        ("mixtral", {"router_jitter_noise": 0.1}, "router_jitter_noise"),
        ("mixtral", {"attention_bias": True}, "attention_bias"),
        ("olmoe", {"sliding_window": 4}, "sliding_window"),
        ("qwen3_moe", {"num_experts": 0}, "num_experts"),
        ("qwen3_moe", {"decoder_sparse_step": 0}, "decoder_sparse_step"),
        ("qwen3_moe", {"max_window_layers": 1}, "max_window_layers"),
        ("qwen3_moe", {"norm_topk_prob": "yes"}, "norm_topk_prob"),
    ],
)
def test_what_we_do_not_compute_is_refused(family, change, named):
    with pytest.raises(DataError, match=named):
        FAMILIES[family].config_from_huggingface(_raw(family) | change)


@pytest.mark.parametrize(
    ("section", "change"),
    [
        ("ffn_config", {"moe_normalize_expert_weights": 0.5}),
        ("ffn_config", {"moe_jitter_eps": 0.1}),
        ("ffn_config", {"ffn_act_fn": {"name": "gelu", "approximate": "tanh"}}),
        ("ffn_config", {"hidden_size": 8}),
        ("attn_config", {"attn_pdrop": 0.1}),
        ("attn_config", {"qk_ln": True}),
    ],
)
def test_sections_of_dbrx_are_read_key_by_key(section, change):
    raw = _raw("dbrx")
    with pytest.raises(DataError, match=r"norm_topk_p|approximate|" + next(iter(change))):
        FAMILIES["dbrx"].config_from_huggingface(raw | {section: raw[section] | change})


def _raw(family: str) -> dict[str, Any]:
    config = next(config for config in reversed(CASES) if config.family == family)
    return FAMILIES[family].config_to_huggingface(config)
