"""Small configs and models for the tests of this room."""

from typing import Any

import torch
from torch import Tensor

from smalti.config.model import ModelConfig
from smalti.model.decoder import Decoder
from smalti.model.init import init_weights


def dense(**changes: Any) -> ModelConfig:
    fields: dict[str, Any] = {
        "family": "decoder",
        "vocab_size": 48,
        "hidden_size": 32,
        "intermediate_size": 40,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "initializer_range": 0.2,
    }
    return ModelConfig(**(fields | changes))


def sparse(**changes: Any) -> ModelConfig:
    moe = {"num_experts": 6, "num_experts_per_tok": 2} | changes.pop("moe", {})
    return dense(norm="layernorm", intermediate_size=24, moe=moe, **changes)


def built(config: ModelConfig, seed: int = 1, dtype: torch.dtype = torch.float32) -> Decoder:
    model = Decoder(config)
    init_weights(model, config, seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:  # weights of 1 would hide a norm that is skipped
                parameter.copy_(1 + 0.3 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed)))
    return model.to(dtype)


def ids(config: ModelConfig, batch: int, time: int, seed: int = 0) -> Tensor:
    return torch.randint(0, config.vocab_size, (batch, time), generator=torch.Generator().manual_seed(seed))


def distance(a: Tensor, b: Tensor) -> float:
    """Relative distance in the 2-norm, in float64."""
    a, b = a.detach().double(), b.detach().double()
    return float((a - b).norm() / b.norm().clamp(min=1e-30))
