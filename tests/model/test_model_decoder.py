"""The decoder as a whole: documents, positions, cache, head, mask, meta device, parameter count."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from model_cases import built, dense, distance, ids, sparse

from smalti.base.errors import UserError
from smalti.cost.params import count
from smalti.model.blocks.kv_cache import KVCache
from smalti.model.decoder import Decoder
from smalti.model.init import init_weights

CONFIGS = {
    "dense": dense(),
    "qk_norm": dense(qk_norm="head", head_dim=6),
    "plain_mlp": dense(gated=False, activation="gelu", tie_word_embeddings=True, norm="layernorm"),
    "moe": sparse(clip_qkv=0.5),
    "moe_plain": sparse(gated=False),
    "alibi": dense(
        position="alibi", num_attention_heads=6, num_key_value_heads=3, head_dim=5, attention_multiplier=0.3
    ),
    "windows": dense(sliding_window=4, layer_types=("sliding_attention", "full_attention"), attn_logit_softcapping=2.0),
    "alibi_window": dense(position="alibi", sliding_window=3, attn_logit_softcapping=2.0, head_dim=7),
    "yarn": dense(rope_scaling={"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}),
}


@pytest.fixture(params=CONFIGS, scope="module")
def config(request):
    return CONFIGS[request.param]


def _documents(lengths: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    documents = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))[None].int()
    positions = torch.cat([torch.arange(length) for length in lengths])[None].int()
    return documents, positions


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packed_documents_equal_documents_alone(config, dtype):
    model, lengths = built(config, dtype=dtype), [5, 1, 9, 3]
    tokens = ids(config, 1, sum(lengths))
    documents, positions = _documents(lengths)
    with torch.no_grad():
        packed = model(tokens, positions, documents).value
        alone = torch.cat([model(part).value for part in tokens.split(lengths, dim=1)], dim=1)
    # In bfloat16 a choice of experts may differ where two are nearly equal, so the norm over all logits is compared.
    assert distance(packed, alone) < (1e-5 if dtype == torch.float32 else 0.1)


def test_no_token_sees_later_ones(config):
    model, tokens = built(config), ids(config, 2, 12)
    changed = tokens.clone()
    changed[:, 7:] = (changed[:, 7:] + 1) % config.vocab_size
    with torch.no_grad():
        before, after = model(tokens).value, model(changed).value
    assert distance(before[:, :7], after[:, :7]) < 1e-6
    assert distance(before[:, 7:], after[:, 7:]) > 1e-3


@settings(max_examples=max(20, settings.default.max_examples // 10))
@given(pieces=st.lists(st.integers(1, 5), min_size=1, max_size=6), name=st.sampled_from(sorted(CONFIGS)))
def test_decoding_in_pieces_equals_one_forward(pieces, name):
    config = CONFIGS[name]
    model, tokens = built(config), ids(config, 2, sum(pieces))
    cache = KVCache(config, 2, sum(pieces))
    with torch.no_grad():
        whole = model(tokens).value
        parts = torch.cat([model(part, cache=cache).value for part in tokens.split(pieces, dim=1)], dim=1)
        assert distance(parts, whole) < 1e-5
        assert cache.length == sum(pieces)


def test_cache_says_when_it_is_full():
    config = dense()
    cache = KVCache(config, 1, 4)
    with pytest.raises(UserError, match="room for 4 tokens"):
        built(config)(ids(config, 1, 5), cache=cache)
    assert len(cache) == config.num_hidden_layers
    assert cache[0][0].shape == (1, 2, 0, 8)


def test_bfloat16_is_near_float32(config):
    tokens = ids(config, 2, 40)
    with torch.no_grad():
        exact = built(config)(tokens).value
        rounded = built(config, dtype=torch.bfloat16)(tokens).value
    assert rounded.dtype == torch.bfloat16
    assert distance(rounded, exact) < 0.15


def test_head_runs_inside_and_gets_what_makes_the_logits(config):
    model, tokens = built(config), ids(config, 2, 6)
    with torch.no_grad():
        logits = model(tokens).value
        value = model(tokens, head=lambda hidden, weight: (hidden @ weight.T, weight.shape)).value
    assert torch.allclose(value[0], logits, atol=1e-5)
    assert tuple(value[1]) == (config.vocab_size, config.hidden_size)


def test_every_parameter_gets_a_gradient(config):
    model = built(config)
    output = model(ids(config, 2, 16))
    loss = output.value.logsumexp(-1).sum() + sum(output.router[:2] if output.router else ())
    loss.backward()
    assert [name for name, p in model.named_parameters() if p.grad is None or not p.grad.abs().sum() > 0] == []


def test_parameter_count_equals_the_plan(config):
    with torch.device("meta"):
        model = Decoder(config)
    assert sum(p.numel() for p in model.parameters()) == count(config).total
    assert list(model.buffers()) == []


def test_meta_device_then_storage_gives_the_same_model(config):
    with torch.device("meta"):
        later = Decoder(config)
    later.to_empty(device="cpu")
    init_weights(later, config, 1)
    now = Decoder(config)
    init_weights(now, config, 1)
    tokens = ids(config, 1, 9)
    with torch.no_grad():
        assert torch.equal(later(tokens).value, now(tokens).value)


@pytest.mark.sample(3)
def test_same_input_same_bits_forward_and_backward(config):
    def bits():
        model = built(config, dtype=torch.bfloat16)
        model(ids(config, 3, 33)).value.float().logsumexp(-1).sum().backward()
        return [p.grad.clone() for p in model.parameters()]

    assert all(torch.equal(a, b) for a, b in zip(bits(), bits(), strict=True))


def test_a_window_hides_what_is_before_it():
    config = dense(sliding_window=4, num_hidden_layers=1)
    model, tokens = built(config), ids(config, 1, 12)
    changed = tokens.clone()
    changed[:, 3] = (changed[:, 3] + 1) % config.vocab_size
    with torch.no_grad():
        before, after = model(tokens).value, model(changed).value
    same = (before - after).abs().amax(-1)[0] < 1e-6
    assert same.tolist() == [True] * 3 + [False] * 4 + [True] * 5


def test_alibi_reads_beyond_the_length_that_the_config_names():
    config = dense(position="alibi", max_position_embeddings=8)
    longer = dense(position="alibi", max_position_embeddings=64)
    tokens = ids(config, 1, 40)
    with torch.no_grad():
        assert torch.equal(built(config)(tokens).value, built(longer)(tokens).value)


def test_final_soft_cap_bounds_the_logits():
    config = dense(final_logit_softcapping=0.5)
    tokens = ids(config, 1, 12)
    with torch.no_grad():
        capped, plain = built(config)(tokens).value, built(dense())(tokens).value
    assert distance(capped, 0.5 * torch.tanh(plain / 0.5)) < 1e-6
