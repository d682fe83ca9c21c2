"""Parameter counts: equal to the real module, to published sizes, and to a count by hand."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smalti.config.families import FAMILIES
from smalti.config.model import ModelConfig, MoEConfig
from smalti.cost.params import count

FREE_CHOICES: dict[str, st.SearchStrategy[Any]] = {
    "norm": st.sampled_from(["rmsnorm", "layernorm"]),
    "norm_placement": st.sampled_from(["pre", "post"]),
    "gated": st.booleans(),
    "attention_bias": st.booleans(),
    "mlp_bias": st.booleans(),
    "position": st.sampled_from(["rope", "alibi"]),
    "qk_norm": st.sampled_from([None, "head", "full"]),
    "embedding_norm": st.booleans(),
    "tie_word_embeddings": st.booleans(),
    "head_dim": st.sampled_from([None, 2, 4, 6]),
    "sliding_window": st.sampled_from([None, 3]),
}
"""Options with an effect on parameters or FLOPs, for families that may choose them."""

MOE_CHOICES: dict[str, st.SearchStrategy[Any]] = {
    "intermediate_size": st.none() | st.integers(1, 24),
    "num_shared_experts": st.integers(0, 2),
    "mlp_only_layers": st.sampled_from([(), (0,)]),
}


@st.composite
def models(draw: st.DrawFn) -> ModelConfig:
    """Any model that the schema admits, of any family, at most 8 wide per head."""
    family = draw(st.just("decoder") | st.sampled_from([*FAMILIES]))
    options = FAMILIES.get(family)
    free = options.free if options else {*FREE_CHOICES, "moe", "num_key_value_heads"}
    heads = draw(st.integers(1, 6))
    kv_heads = draw(st.sampled_from([n for n in range(1, heads + 1) if heads % n == 0]))
    hidden = heads * 2 * draw(st.integers(1, 4))
    values: dict[str, Any] = {
        "family": family,
        "vocab_size": draw(st.integers(2, 40)),
        "hidden_size": hidden,
        "intermediate_size": 4 * hidden if family == "mpt" else draw(st.integers(1, 24)),
        "num_hidden_layers": draw(st.integers(1, 3)),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads if "num_key_value_heads" in free else None,
        **(options.fixed if options else {}),
        **{name: draw(values) for name, values in FREE_CHOICES.items() if name in free},
    }
    if "moe" in free and (family != "decoder" or draw(st.booleans())):
        experts = draw(st.integers(2, 5))
        free_moe = options.free_moe if options else None
        moe = {name: draw(values) for name, values in MOE_CHOICES.items() if free_moe is None or name in free_moe}
        chosen = draw(st.integers(1, experts))
        if values["num_hidden_layers"] == 1:
            moe.pop("mlp_only_layers", None)  # at least one layer has experts
        values["moe"] = MoEConfig(num_experts=experts, num_experts_per_tok=chosen, kernel="loop", **moe)
    return ModelConfig(**values)


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
    assert params.bias == sum(size for name, size in sizes.items() if name.endswith("bias"))
    assert params.head == sizes.get("lm_head.weight", 0)


def test_parts_make_up_the_whole() -> None:
    @given(models())
    def check(config: ModelConfig) -> None:
        p = count(config)
        assert p.total == p.embedding + p.head + p.attention + p.mlp + p.router + p.norm + p.bias
        assert p.active == p.total - p.mlp + p.mlp_active
        assert p.matmul_active == p.active - p.norm - p.bias - (0 if config.tie_word_embeddings else p.embedding)
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
        (by_hand(position="alibi", norm_placement="post"), 80 + 80 + 2 * (192 + 144 + 16) + 8),
        (by_hand(embedding_norm=True), 80 + 80 + 2 * (192 + 144 + 16) + 8 + 8),
        # biases: q 8 + k 4 + v 4 + o 8; gate 6 + up 6 + down 8
        (by_hand(attention_bias=True, mlp_bias=True), 80 + 80 + 2 * (192 + 24 + 144 + 20 + 16) + 8),
        (by_hand(gated=False, mlp_bias=True), 80 + 80 + 2 * (192 + 96 + 14 + 16) + 8),
    ],
)
def test_by_hand(config: ModelConfig, total: int) -> None:
    assert count(config).total == total


def test_active_by_hand() -> None:
    """Five experts of width 3, two of them chosen, one beside them, and a plain MLP with biases in layer 0."""
    moe = MoEConfig(
        num_experts=5, num_experts_per_tok=2, intermediate_size=3, num_shared_experts=1, mlp_only_layers=(0,)
    )
    params = count(by_hand(moe=moe, mlp_bias=True))
    ends, attention, expert, router, norms, biases = 160, 2 * 192, 3 * 8 * 3, 8 * 5, 2 * 16 + 8, 6 + 6 + 8
    assert params.total == ends + attention + 144 + (5 + 1) * expert + router + norms + biases
    assert params.active == ends + attention + 144 + (2 + 1) * expert + router + norms + biases
    assert params.matmul_active == 80 + attention + 144 + (2 + 1) * expert + router


def test_every_expert_active_is_all_active(proof: Callable[..., int]) -> None:
    for experts in range(2, 2 + proof(short=4, full=30)):
        moe = MoEConfig(num_experts=experts, num_experts_per_tok=experts)
        params = count(by_hand(moe=moe))
        assert params.active == params.total
