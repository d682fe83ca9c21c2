"""Parameter counts: equal to the real module, to published sizes, and to a count by hand."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smalti.config.model import ModelConfig, MoEConfig
from smalti.plan.params import count


@st.composite
def models(draw: st.DrawFn) -> ModelConfig:
    """Any model that the schema admits, at most 8 wide per head."""
    kv = draw(st.integers(1, 3))
    heads = kv * draw(st.integers(1, 3))
    head_dim = 2 * draw(st.integers(1, 4))
    experts = draw(st.none() | st.integers(2, 5))
    return ModelConfig(
        family="decoder",
        vocab_size=draw(st.integers(2, 40)),
        hidden_size=draw(st.just(heads * head_dim) | st.integers(1, 24)),
        intermediate_size=draw(st.integers(1, 24)),
        num_hidden_layers=draw(st.integers(1, 3)),
        num_attention_heads=heads,
        num_key_value_heads=kv,
        head_dim=head_dim,
        norm=draw(st.sampled_from(["rmsnorm", "layernorm"])),
        gated=draw(st.booleans()),
        qk_norm=draw(st.sampled_from([None, "head", "full"])),
        tie_word_embeddings=draw(st.booleans()),
        moe=None
        if experts is None
        else MoEConfig(num_experts=experts, num_experts_per_tok=draw(st.integers(1, experts)), kernel="loop"),
    )


@pytest.mark.proof
@given(models())
def test_equal_to_the_module(config: ModelConfig) -> None:
    torch = pytest.importorskip("torch")
    from smalti.model.decoder import Decoder

    with torch.device("meta"):
        model = Decoder(config)
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    params = count(config)
    assert params.total == sum(sizes.values())
    assert params.embedding == sizes["embed.weight"]
    assert params.norm == sum(size for name, size in sizes.items() if "norm" in name)
    assert params.head == sizes.get("lm_head.weight", 0)


def test_parts_make_up_the_whole() -> None:
    @given(models())
    def check(config: ModelConfig) -> None:
        p = count(config)
        assert p.total == p.embedding + p.head + p.attention + p.mlp + p.router + p.norm
        assert p.active == p.total - p.mlp + p.mlp_active
        assert p.matmul_active == p.active - p.norm - (0 if config.tie_word_embeddings else p.embedding)
        assert 0 < p.active <= p.total

    check()


def by_hand(**changes: Any) -> ModelConfig:
    values: dict[str, Any] = {
        "family": "decoder",
        "vocab_size": 10,
        "hidden_size": 8,
        "intermediate_size": 6,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    return ModelConfig(**{**values, **changes})


@pytest.mark.parametrize(
    ("config", "total"),
    [
        # embedding + head + 2 x (q 64 + k 32 + v 32 + o 64 + 3 x 48 + norms 16) + last norm
        (by_hand(), 80 + 80 + 2 * (192 + 144 + 16) + 8),
        (by_hand(tie_word_embeddings=True), 80 + 2 * (192 + 144 + 16) + 8),
        (by_hand(gated=False), 80 + 80 + 2 * (192 + 96 + 16) + 8),
        (by_hand(qk_norm="head"), 80 + 80 + 2 * (192 + 144 + 16 + 4) + 8),
        (
            by_hand(moe=MoEConfig(num_experts=3, num_experts_per_tok=1)),
            80 + 80 + 2 * (192 + 3 * 144 + 24 + 16) + 8,
        ),
    ],
)
def test_by_hand(config: ModelConfig, total: int) -> None:
    assert count(config).total == total


def test_every_expert_active_is_all_active(proof: Callable[..., int]) -> None:
    for experts in range(2, 2 + proof(short=4, full=30)):
        moe = MoEConfig(num_experts=experts, num_experts_per_tok=experts)
        params = count(by_hand(moe=moe))
        assert params.active == params.total
