"""The model section: options without effect and impossible mixes are refused by name; what is written is read again."""

import pytest
import yaml
from pydantic import ValidationError

from smalti.config.load import dump
from smalti.config.model import ModelConfig

SMALL = {
    "family": "decoder",
    "vocab_size": 48,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
MOE = {"num_experts": 4, "num_experts_per_tok": 2}


@pytest.mark.parametrize(
    "options",
    [
        {"position": "alibi"},
        {"rope_scaling": {"rope_type": "linear", "factor": 2}},
        {"sliding_window": 8, "layer_types": ["full_attention", "sliding_attention"]},
        {"moe": MOE | {"mlp_only_layers": [1], "norm_topk_p": 2}},
        {"qk_norm": "full", "norm_placement": "post"},
    ],
)
def test_what_is_written_is_read_again(options):
    config = ModelConfig(**SMALL, **options)
    assert ModelConfig(**yaml.safe_load(dump(config))) == config


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"position": "alibi", "rope_theta": 5e5}, "rope_theta has no effect with position 'alibi'"),
        ({"position": "alibi", "rope_scaling": {"rope_type": "linear", "factor": 2}}, "rope_scaling has no effect"),
        ({"moe": MOE | {"mlp_only_layers": [0, 1]}}, "none has experts"),
        ({"moe": MOE | {"mlp_only_layers": [0, 0]}}, "each once"),
        ({"moe": MOE | {"mlp_only_layers": [2]}}, "allowed: 0 to 1"),
        ({"moe": MOE | {"norm_topk_prob": False, "norm_topk_p": 2}}, "norm_topk_p"),
        ({"layer_types": ["full_attention"]}, "1 entries"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding_window is absent"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2}}, "needs original_max_position_embeddings"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2, "beta_fast": 1}}, "does not use beta_fast"),
        ({"family": "mistral", "qk_norm": "head"}, "family 'mistral' cannot hold: qk_norm=head"),
        ({"family": "qwen3"}, "it has qk_norm=head"),
        ({"family": "mixtral"}, "moe absent"),
    ],
)
def test_what_has_no_effect_or_does_not_fit_is_refused_by_name(options, named):
    with pytest.raises(ValidationError, match=named):
        ModelConfig(**(SMALL | options))
