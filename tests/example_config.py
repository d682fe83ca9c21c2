"""A small run config, for tests that need one and set a field or two."""

from typing import Any

from smalti.config.load import from_dict
from smalti.config.run import RunConfig

VALUES: dict[str, Any] = {
    "name": "small",
    "model": {
        "family": "llama",
        "vocab_size": 4096,
        "hidden_size": 128,
        "intermediate_size": 344,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
    },
    "data": {
        "sources": {"code": "tokens/code", "prose": "tokens/prose"},
        "seq_len": 256,
        "stages": [
            {"until": "0.8run", "weights": {"code": 1, "prose": 3}},
            {"until": "1run", "weights": {"code": 1}},
        ],
    },
    "train": {"duration": "100step", "global_batch_tokens": 8192, "optimizer": {"lr": 3e-3}},
}


def example_config(*overrides: str) -> RunConfig:
    """The small config with ``a.b=value`` changes."""
    return from_dict(RunConfig, VALUES, overrides=overrides).config
