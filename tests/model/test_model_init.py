"""Initial weights depend on (config, seed, name, expert) and on nothing else."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from model_cases import dense, sparse

from smalti.model.decoder import Decoder
from smalti.model.init import draw, draw_expert, init_weights


@given(st.integers(0, 2**40), st.integers(0, 1000))
def test_draw_does_not_depend_on_what_happened_before(seed, noise):
    config = dense()
    name, shape = "blocks.0.mlp.up_proj.weight", (40, 32)
    first = draw(name, shape, config, seed)
    torch.manual_seed(noise)
    torch.randn(noise + 1)
    draw("embed.weight", (noise + 1, 4), config, noise)
    with torch.device("meta"):
        second = draw(name, shape, config, seed)
    assert second.device.type == "cpu"
    assert torch.equal(first, second)


def test_draw_does_not_depend_on_threads_or_default_dtype():
    config, name, shape = dense(), "embed.weight", (300, 70)
    first, threads, dtype = draw(name, shape, config, 1), torch.get_num_threads(), torch.get_default_dtype()
    try:
        torch.set_num_threads(1 if threads > 1 else 2)
        torch.set_default_dtype(torch.float64)
        assert torch.equal(first, draw(name, shape, config, 1))
    finally:
        torch.set_num_threads(threads)
        torch.set_default_dtype(dtype)


def test_an_expert_is_the_same_whatever_the_number_of_experts():
    config, name = sparse(), "blocks.1.mlp.experts.up_proj"
    all_six, first_four = draw(name, (6, 24, 32), config, 5), draw(name, (4, 24, 32), config, 5)
    assert torch.equal(all_six[:4], first_four)
    assert torch.equal(all_six[5], draw_expert(name, 5, (24, 32), config, 5))
    assert not torch.equal(all_six[0], all_six[1])


def test_names_seeds_and_layers_differ():
    config, shape = dense(), (32, 32)
    names = ["blocks.0.attention.q_proj.weight", "blocks.1.attention.q_proj.weight", "blocks.0.attention.o_proj.weight"]
    drawn = [draw(name, shape, config, seed) for name in names for seed in (1, 2)]
    assert len({tuple(tensor.flatten()[:4].tolist()) for tensor in drawn}) == 6


def test_scales():
    config = dense(
        vocab_size=512,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=8,
        initializer_range=0.05,
        qk_norm="head",
    )
    model = Decoder(config)
    init_weights(model, config, 0)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            assert bool((parameter == 1).all()), name
            continue
        std = 0.05 / 4 if ("o_proj" in name or "down_proj" in name) else 0.05
        assert float(parameter.detach().std()) == pytest.approx(std, rel=0.05), name
        assert float(parameter.detach().mean()) == pytest.approx(0, abs=std / 20), name


@pytest.mark.parametrize(("given", "std"), [(None, 0.05), (0.2, 0.2)])
def test_routers_may_have_a_scale_of_their_own(given, std):
    config = sparse(initializer_range=0.05)
    moe = config.moe.model_copy(update={"router_initializer_range": given})
    config = config.model_copy(update={"moe": moe})
    drawn = {name: draw(name, (64, 128), config, 0).std() for name in ("blocks.0.mlp.router.weight", "embed.weight")}
    assert float(drawn["blocks.0.mlp.router.weight"]) == pytest.approx(std, rel=0.05)
    assert float(drawn["embed.weight"]) == pytest.approx(0.05, rel=0.05)


def test_cast_comes_after_the_draw():
    config, name, shape = dense(), "embed.weight", (48, 32)
    assert torch.equal(draw(name, shape, config, 1, torch.bfloat16), draw(name, shape, config, 1).to(torch.bfloat16))
