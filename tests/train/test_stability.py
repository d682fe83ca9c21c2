"""Every option against instability trains a toy model, and changes its losses."""

from functools import cache
from typing import Any

import pytest
import torch

from smalti.config.model import ModelConfig
from smalti.config.optimizer import OptimizerConfig
from smalti.config.train import LossConfig
from smalti.model.decoder import Decoder
from smalti.model.init import init_weights
from smalti.train.batches import Microbatch
from smalti.train.loss import LanguageLoss
from smalti.train.optim import build_optimizer

STEPS = 20


@cache
def _plain() -> list[float]:
    return _losses()


def _losses(z_loss_coef: float = 0.0, **options: Any) -> list[float]:
    """Cross-entropy of a toy model that overfits one batch."""
    config = ModelConfig.model_validate(
        {"family": "decoder", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
         "num_attention_heads": 4, **options}
    )  # fmt: skip
    model = Decoder(config)
    init_weights(model, config, seed=1)
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(0, 64, (4, 17), generator=generator)
    batch = Microbatch(rows[:, :-1], rows[:, 1:], torch.arange(16).expand(4, 16), None)
    loss, optimizer = LanguageLoss(config, LossConfig(z_loss_coef=z_loss_coef)), build_optimizer(
        model, OptimizerConfig(lr=1e-2)
    )  # fmt: skip
    result = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        total, weight, metrics = loss(model, batch)
        (total / weight).backward()
        optimizer.step()
        result.append(float(metrics["loss/train/cross_entropy"] / weight))
    return result


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    "options",
    [
        {"qk_norm": "head"},
        {"qk_norm": "full"},
        {"z_loss_coef": 0.1},
        {"embedding_norm": True},
        {"clip_qkv": 0.1},
        {"attn_logit_softcapping": 0.1},
        {"final_logit_softcapping": 2.0},
        {"residual_multiplier": 0.5},
        {"norm_placement": "post"},
    ],
    ids=lambda options: next(iter(options)),
)
def test_trains_and_has_an_effect(options: dict[str, Any]) -> None:
    plain, protected = _plain(), _losses(**options)
    assert protected[-1] < 0.8 * protected[0]
    assert protected != pytest.approx(plain, rel=1e-4)
