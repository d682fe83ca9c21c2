"""Rotary scalings against transformers."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from model_cases import built, dense, distance, ids

from smalti.model.blocks.kv_cache import KVCache
from smalti.model.blocks.rope import rope_frequencies, rope_table

PER_HEAD = (2, 6, 16, 64, 128)


@st.composite
def scalings(draw, width):
    """Fields of ``rope_scaling``."""
    rule = draw(st.sampled_from(["linear", "dynamic", "yarn", "llama3", "longrope"]))
    scaling = {"rope_type": rule}
    original = draw(st.sampled_from([16, 100, 4096]))
    factor = draw(st.sampled_from([1.0, 1.7, 8.0, 40.0]))
    if rule != "longrope" or draw(st.booleans()):
        scaling["factor"] = factor
    if rule in ("yarn", "llama3", "longrope"):
        scaling["original_max_position_embeddings"] = original
    if rule == "llama3":
        low = draw(st.sampled_from([0.5, 1.0, 2.0]))
        scaling |= {"low_freq_factor": low, "high_freq_factor": low + draw(st.sampled_from([0.5, 3.0]))}
    if rule == "longrope":
        divisors = st.lists(st.floats(1, 60), min_size=width // 2, max_size=width // 2)
        scaling |= {"short_factor": draw(divisors), "long_factor": draw(divisors)}
    if rule in ("yarn", "longrope") and draw(st.booleans()):
        scaling["attention_factor"] = draw(st.floats(0.5, 2))
    if rule == "yarn":
        for name, values in (("beta_fast", [20.0, 48.0]), ("beta_slow", [0.5, 3.0]), ("truncate", [True, False])):
            if draw(st.booleans()):
                scaling[name] = draw(st.sampled_from(values))
        for name in ("mscale", "mscale_all_dim"):
            if draw(st.booleans()):
                scaling[name] = draw(st.floats(0.5, 2))
    return scaling


@st.composite
def configs(draw):
    width = draw(st.sampled_from(PER_HEAD))
    return dense(
        head_dim=width,
        rope_theta=draw(st.sampled_from([500.0, 10_000.0, 5e6])),
        rope_scaling=draw(scalings(width)),
        max_position_embeddings=draw(st.sampled_from([32, 200, 8192])),
    )


def theirs(config):
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    return LlamaRotaryEmbedding(
        LlamaConfig(
            hidden_size=config.hidden_size,
            num_attention_heads=config.num_attention_heads,
            head_dim=config.head_dim,
            max_position_embeddings=config.max_position_embeddings,
            rope_parameters=config.rope_scaling.model_dump(exclude_none=True) | {"rope_theta": config.rope_theta},
        )
    )


@pytest.mark.proof
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@settings(max_examples=2 * settings.default.max_examples)
@given(config=configs(), length=st.integers(1, 9000))
def test_frequencies_are_those_of_transformers(config, length):
    if config.rope_scaling.rope_type == "dynamic" and config.head_dim == 2:
        return  # transformers divides by 0
    rotary = theirs(config)
    positions = torch.tensor([[length - 1]])
    cosine, sine = rotary(torch.empty(1), positions)
    frequencies, factor = rope_frequencies(config, positions.max() + 1)
    assert torch.allclose(frequencies, rotary.inv_freq, rtol=1e-6, atol=0)
    assert factor == pytest.approx(rotary.attention_scaling, rel=1e-6)
    ours, turned = rope_table(config, torch.arange(min(length, 64))[None], torch.float32)
    cosine, sine = theirs(config)(torch.empty(1), torch.arange(min(length, 64))[None])
    assert torch.allclose(ours[:, :, 0], cosine, atol=2e-5)
    assert torch.allclose(turned[:, :, 0, config.head_dim // 2 :], sine[..., config.head_dim // 2 :], atol=2e-5)


def long_and_dynamic():
    divisors = {"short_factor": (1.0, 2.0, 1.5, 1.0), "long_factor": (3.0, 8.0, 2.0, 9.0)}
    longrope = {"rope_type": "longrope", "original_max_position_embeddings": 8, **divisors}
    return [
        dense(rope_scaling=longrope),
        dense(rope_scaling={"rope_type": "dynamic", "factor": 4.0}, max_position_embeddings=8),
    ]


@pytest.mark.parametrize("config", long_and_dynamic(), ids=["longrope", "dynamic"])
def test_a_length_changes_all_frequencies_and_a_cache_goes_by_the_length_it_was_made_for(config):
    model, tokens = built(config), ids(config, 2, 12)
    with torch.no_grad():
        whole, short = model(tokens).value, model(tokens[:, :6]).value
        assert distance(whole[:, :6], short) > 1e-3
        for room, expected in ((12, whole), (6, short)):
            cache = KVCache(config, 2, room)
            parts = [
                model(part, cache=cache).value
                for part in tokens[:, :room].split([3, 1, 2, 1, 5][: 3 if room == 6 else 5], 1)
            ]
            assert distance(torch.cat(parts, 1), expected) < 1e-5
        cache = KVCache(config, 2, 12, rope_length_tokens=6)
        assert distance(model(tokens[:, :6], cache=cache).value, short) < 1e-6


@pytest.mark.parametrize("config", long_and_dynamic(), ids=["longrope", "dynamic"])
def test_without_a_cache_the_longest_row_of_the_batch_counts(config):
    model, tokens = built(config), ids(config, 1, 12)
    positions = torch.cat([torch.arange(9), torch.arange(3)])[None]
    documents = (torch.arange(12) >= 9).long()[None]
    with torch.no_grad():
        packed = model(tokens, positions, documents).value
        assert distance(packed[:, :9], model(tokens[:, :9]).value) < 1e-5
        assert distance(packed[:, 9:], model(tokens[:, 9:]).value) > 1e-3
